"""Running modules uncompiled, and layers for one token alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from overt.tracing.origins import tensors


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the modules behind compiled ones."""
    in_place = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    wrapped = [
        m for m in model.modules() if type(m).__module__.startswith("torch.") and "_orig_mod" in m._modules
    ]
    kept = [(module.__dict__, "_compiled_call_impl", module._compiled_call_impl) for module in in_place]
    kept += [(module.__dict__, "forward", module.__dict__["forward"]) for module in wrapped]
    try:
        for module in in_place:
            module.__dict__["_compiled_call_impl"] = None
        for module in wrapped:
            module.__dict__["forward"] = module._modules["_orig_mod"]
        yield
    finally:
        for attributes, name, value in kept:
            attributes[name] = value


@contextmanager
def functions_uncompiled() -> Iterator[None]:
    """Run functions uncompiled, in this thread.

    torch compiles nothing while it runs a kernel for tensors without numbers, which is a state of a thread.
    """
    from torch._guards import TracingContext, tracing

    inside: Any = SimpleNamespace(in_kernel_invocation=True, shape_env=None)
    with tracing(TracingContext(inside)):
        yield


ALONE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU)


def is_tokenwise(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether a module's output for the first and the last token is what it gives for these tokens alone."""
    if isinstance(module, ALONE):
        return True
    x = args[0] if args and isinstance(args[0], Tensor) else None
    out = next(tensors(output), None)
    if x is None or out is None or x.dim() < 3 or out.shape[:2] != x.shape[:2]:
        return False
    for token in (slice(0, 1), slice(-1, None)):
        given, named = _taken((args, kwargs), x.shape[:2], token)
        try:
            with torch.no_grad():
                alone = next(tensors(module(*given, **named)), None)
        except Exception:  # whatever a module raises that takes no single token
            return False
        whole = out[token, token]
        if alone is None or alone.shape != whole.shape:
            return False
        if float((alone - whole).abs().max()) > 1e-3 * float(whole.abs().max()) + 1e-6:
            return False
    return True


def _taken(value: Any, lead: torch.Size, token: slice) -> Any:
    """Arguments with one example's one token, where they have an axis for each."""
    if isinstance(value, Tensor):
        return value[token, token] if value.shape[:2] == lead else value
    if type(value) in (tuple, list):
        return type(value)(_taken(entry, lead, token) for entry in value)
    if type(value) is dict:
        return {name: _taken(entry, lead, token) for name, entry in value.items()}
    return value
