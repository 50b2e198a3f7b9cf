"""Fused GPU kernels: where they run, why they do not, and how to leave them out.

The plain operations are the definition, and always at hand; kernels run where they apply, and a line of the
logger "overt" at level DEBUG says for each attention which ran, and why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 128
MOST_EXAMPLES = 65_535
ROOM_FOR_WIDE = 180_224  # bytes of shared memory
# Tests put "cpu" here, to run kernels in Triton's interpreter.
DEVICES = {"cuda"}
OFF = "OVERT_NAIVE"

_switched_off = 0
_lock = threading.Lock()


@contextmanager
def naive() -> Iterator[None]:
    """Inside, no fused GPU kernel runs in forward passes that begin: plain operations do.

    It holds for all threads. Setting OVERT_NAIVE=1 in the environment does the same for a whole process.
    (Compiled loops on a CPU are left alone.)
    """
    global _switched_off
    with _lock:
        _switched_off += 1
    try:
        yield
    finally:
        with _lock:
            _switched_off -= 1


_known: dict[torch.device, str | None] = {}


def unsupported(device: torch.device) -> str | None:
    """Why kernels cannot run on a device; None where they can."""
    if device.type not in DEVICES:
        return f"kernels run on CUDA devices, not on {device.type}"
    if device not in _known:  # a dictionary, since compilers look into caches of functions and complain
        _known[device] = _look_at(device)
    return _known[device]


def _look_at(device: torch.device) -> str | None:
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "kernels were never tried on ROCm"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "kernels need a GPU of compute capability 8.0 or more"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton cannot be imported"
    return None


def why_not(device: torch.device) -> str | None:
    """Why no fused kernel runs on a device at the moment; None if they run."""
    if _switched_off:
        return "switched off by overt.naive()"
    if os.environ.get(OFF, "0") not in ("", "0"):
        return f"switched off by {OFF}={os.environ[OFF]}"
    return unsupported(device)


def room(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads may have on a device."""
    if device.type != "cuda":
        return 2**20
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


# What `torch.compiler.assume_constant_result` does, but that imports the compiler.
room._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unfit(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> str | None:
    """Why this call is not for the kernels; None if it is."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func transforms and forward-mode derivatives go through plain operations"
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        came = ", ".join(str(x.dtype) for x in (query, key, value))
        return f"kernels take float32, float16 or bfloat16, all three alike, not {came}"
    if not query.device == key.device == value.device:
        came = ", ".join(str(x.device) for x in (query, key, value))
        return f"queries, keys and values lie on {came}"
    if value.shape != key.shape:
        return f"values {tuple(value.shape)} and keys {tuple(key.shape)} differ in shape"
    if query.shape[-1] > WIDEST:
        return f"heads are {query.shape[-1]} wide, kernels take up to {WIDEST}"
    if query.dtype == torch.float32 and query.shape[-1] > 64 and room(query.device) < ROOM_FOR_WIDE:
        return "float32 heads of more than 64 need more shared memory than this GPU has"
    if not scale > 0.0:
        return f"the scale must be positive, got {scale}"
    if dropout >= 1.0:
        return "every weight is dropped"
    if query.shape[0] > MOST_EXAMPLES:
        return f"kernels take up to {MOST_EXAMPLES} examples, got {query.shape[0]}"
    if min(query.shape) == 0 or min(key.shape) == 0:
        return "there is nothing to attend"
    return None
