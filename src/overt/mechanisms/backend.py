"""Which form of an operation runs: one predicate, `unfit`, gives the reason why a faster form does not.

The plain operations are the definition and are always available. Faster forms run where they apply: compiled
loops on a CPU, kernels on a GPU. At level DEBUG, the logger "overt" reports for each attention which form
ran, and why.
"""

from __future__ import annotations

import importlib
import os
import sys
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
        name: for messages.
        device: type of the devices that it runs on.
        dtypes: the dtypes it takes; all tensors must have the same one.
        library: the library that must be installed.
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
    """How deeply this thread is nested in `naive` and in `wanting_maps`."""

    def __init__(self) -> None:  # not class attributes, whose changes compilers would not see
        self.naive = 0
        self.maps = 0


_depth = _Depth()


@contextmanager
def naive() -> Iterator[None]:
    """Disables GPU kernels and compiled CPU loops for forward passes started inside, in this thread.

    The plain operations that define a mechanism run instead. Other threads are unaffected. Setting
    OVERT_NAIVE=1 in the environment does the same for a whole process.
    """
    _depth.naive += 1
    try:
        yield
    finally:
        _depth.naive -= 1


@contextmanager
def wanting_maps() -> Iterator[None]:
    """Requires attentions that run inside, in this thread, to compute their maps; fused forms make none."""
    _depth.maps += 1
    try:
        yield
    finally:
        _depth.maps -= 1


def maps_wanted() -> bool:
    """Whether attentions that run now, in this thread, must compute their maps."""
    return _depth.maps > 0


def switched_off() -> str | None:
    """Why passes that start now, in this thread, use no faster form; None if they may."""
    if _depth.naive:
        return "switched off by overt.naive()"
    if os.environ.get(OFF, "0") not in ("", "0"):
        return f"switched off by {OFF}={os.environ[OFF]}"
    return None


def unfit(backend: Backend, *tensors: Tensor, off: str | None = None) -> str | None:
    """Why a faster form cannot take these tensors; None if it can.

    Args:
        backend: the kind of form.
        tensors: what it would read, at least one tensor.
        off: why faster forms are switched off in this pass (`Chain.switched_off`).
    """
    if off is not None:
        return off
    devices = KERNEL_DEVICES if backend.device == "cuda" else {backend.device}
    first = tensors[0]
    if first.device.type not in devices:
        return f"{backend.name} run on {backend.device} devices, not on {first.device.type}"
    if any(tensor.dtype not in backend.dtypes or tensor.dtype != first.dtype for tensor in tensors):
        names = [str(dtype).removeprefix("torch.") for dtype in backend.dtypes]
        allowed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        dtypes = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        return f"{backend.name} take {allowed}, the same for all tensors, not {dtypes}"
    if any(tensor.device != first.device for tensor in tensors):
        return f"tensors are on {', '.join(str(tensor.device) for tensor in tensors)}"
    if transformed():
        return "torch.func transforms and forward-mode derivatives need plain operations"
    if not backend.operators and torch.compiler.is_compiling():
        return f"{backend.name} are not operators that a compiler can take"
    return _unavailable(backend, first.device)


_device_limits: dict[torch.device, str | None] = {}


def _unavailable(backend: Backend, device: torch.device) -> str | None:
    """Why a backend cannot run on a device of its type at all."""
    if device.type == "cuda":
        if device not in _device_limits:  # a dictionary: compilers trace into function caches and complain
            _device_limits[device] = _device_limit(device)
        if _device_limits[device] is not None:
            return _device_limits[device]
    return None if _importable(backend.library) else f"{backend.library} cannot be imported"


def _device_limit(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "kernels have not been tested on ROCm"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "kernels need a GPU of compute capability 8.0 or more"
    return None


def _importable(library: str) -> bool:
    """Whether a library can be imported. A compiler, which cannot trace an import, takes the result."""
    if sys.modules.get(library) is not None:  # importing it again takes longer
        return True
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


_importable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def active(backend: Backend, device: torch.device) -> str | None:
    """Why a backend's forms currently do not run on a device; None if they do."""
    return switched_off() or (
        f"{backend.name} run on {backend.device} devices, not on {device.type}"
        if device.type not in (KERNEL_DEVICES if backend.device == "cuda" else {backend.device})
        else _unavailable(backend, device)
    )


def room(device: torch.device) -> int:
    """Bytes of shared memory available to one block of threads on a device."""
    if device.type != "cuda":
        return 2**20
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


# As `torch.compiler.assume_constant_result` does, which would import the compiler.
room._dynamo_marked_constant = True  # type: ignore[attr-defined]
