"""Which form of an operation runs: one predicate, `unfit`, that says why a faster form does not.

The plain operations are the definition, and always at hand. Faster forms of them run where they apply:
compiled loops on a CPU, kernels on a GPU. A line of the logger "overt" at level DEBUG says for each attention
which ran, and why.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from overt.mechanisms.maps import transformed

OFF = "OVERT_NAIVE"


@dataclass(frozen=True)
class Backend:
    """A kind of faster form.

    Attributes:
        name: in messages.
        device: type of the devices that it runs on.
        dtypes: of tensors that it takes, all alike.
        library: what it needs installed.
        operators: whether its forms are operators, which torch.compile takes as they are.
    """

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    library: str
    operators: bool


KERNELS = Backend("kernels", "cuda", (torch.float32, torch.float16, torch.bfloat16), "triton", True)
LOOPS = Backend("compiled loops", "cpu", (torch.float32,), "numba", True)
EDGE_KERNELS = Backend("kernels on edges", "cuda", (torch.float32,), "triton", False)
EDGE_LOOPS = Backend("compiled loops on edges", "cpu", (torch.float32,), "numba", False)
# Tests add "cpu" here, to run kernels in Triton's interpreter.
KERNEL_DEVICES = {"cuda"}


class _Depth(threading.local):
    """How deep this thread is in `naive` and in `wanting_maps`."""

    def __init__(self) -> None:  # not on the class, where compilers would not see it change
        self.naive = 0
        self.maps = 0


_depth = _Depth()


@contextmanager
def naive() -> Iterator[None]:
    """Disables GPU kernels and compiled CPU loops for forward passes begun in this thread inside.

    The plain operations that define a mechanism run instead. Other threads are left alone. Setting
    OVERT_NAIVE=1 in the environment does the same for a whole process.
    """
    _depth.naive += 1
    try:
        yield
    finally:
        _depth.naive -= 1


@contextmanager
def wanting_maps() -> Iterator[None]:
    """Attentions that run in this thread inside are asked for their maps, which fused forms do not make."""
    _depth.maps += 1
    try:
        yield
    finally:
        _depth.maps -= 1


def maps_wanted() -> bool:
    """Whether attentions that run here and now are asked for their maps."""
    return _depth.maps > 0


def switched_off() -> str | None:
    """Why passes that begin here and now have no faster form; None where they have."""
    if _depth.naive:
        return "switched off by overt.naive()"
    if os.environ.get(OFF, "0") not in ("", "0"):
        return f"switched off by {OFF}={os.environ[OFF]}"
    return None


def unfit(backend: Backend, *tensors: Tensor, off: str | None = None) -> str | None:
    """Why a faster form does not do for these tensors, of which there is at least one; None if it does.

    Args:
        backend: the kind of form.
        tensors: what it would read.
        off: why it is switched off in this pass (`Chain.switched_off`).
    """
    if off is not None:
        return off
    devices = KERNEL_DEVICES if backend.device == "cuda" else {backend.device}
    first = tensors[0]
    if first.device.type not in devices:
        return f"{backend.name} run on {backend.device} devices, not on {first.device.type}"
    if any(tensor.dtype not in backend.dtypes or tensor.dtype != first.dtype for tensor in tensors):
        named = [str(dtype).removeprefix("torch.") for dtype in backend.dtypes]
        takes = " or ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
        came = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        return f"{backend.name} take {takes}, all alike, not {came}"
    if any(tensor.device != first.device for tensor in tensors):
        return f"tensors lie on {', '.join(str(tensor.device) for tensor in tensors)}"
    if transformed():
        return "torch.func transforms and forward-mode derivatives go through plain operations"
    if not backend.operators and torch.compiler.is_compiling():
        return f"{backend.name} are no operators for a compiler"
    return _unavailable(backend, first.device)


_known: dict[torch.device, str | None] = {}


def _unavailable(backend: Backend, device: torch.device) -> str | None:
    """Why a backend cannot run on a device of its type at all."""
    if device.type == "cuda":
        if device not in _known:  # a dictionary, since compilers look into caches of functions and complain
            _known[device] = _look_at(device)
        if _known[device] is not None:
            return _known[device]
    return None if _importable(backend.library) else f"{backend.library} cannot be imported"


def _look_at(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "kernels were never tried on ROCm"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "kernels need a GPU of compute capability 8.0 or more"
    return None


def _importable(library: str) -> bool:
    """Whether a library can be imported. A compiler, which cannot follow an import, takes the answer."""
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


_importable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def active(backend: Backend, device: torch.device) -> str | None:
    """Why no form of a backend runs on a device at the moment; None if they run."""
    return switched_off() or (
        f"{backend.name} run on {backend.device} devices, not on {device.type}"
        if device.type not in (KERNEL_DEVICES if backend.device == "cuda" else {backend.device})
        else _unavailable(backend, device)
    )


def room(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads may have on a device."""
    if device.type != "cuda":
        return 2**20
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


# What `torch.compiler.assume_constant_result` does, but that imports the compiler.
room._dynamo_marked_constant = True  # type: ignore[attr-defined]
