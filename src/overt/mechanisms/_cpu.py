"""Where forms for the CPU apply: operators around compiled loops, which torch.compile takes as they are."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

_INSTALLED = importlib.util.find_spec("numba") is not None


def loops(name: str) -> ModuleType | None:
    """A module of compiled loops, or None where numba cannot be imported."""
    try:
        return importlib.import_module(f"overt.mechanisms.{name}")
    except ImportError:
        return None


def applies(name: str, *tensors: Tensor) -> bool:
    """Whether a form for the CPU does for these tensors.

    They must be float32 and on the CPU, and no transform of torch.func nor forward-mode derivative be under
    way, which have no rule for the operators.
    """
    if any(tensor.device.type != "cpu" or tensor.dtype != torch.float32 for tensor in tensors):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():  # which cannot follow an import
        return _INSTALLED
    return forward_ad._current_level < 0 and loops(name) is not None


def bytes_of(visible: Tensor, logits: Tensor) -> Tensor:
    """The visibility of a map, (batch, heads or 1, query, key), as bytes."""
    batch, _, queries, keys = logits.shape
    return visible.expand(batch, -1, queries, keys).contiguous().view(torch.uint8)
