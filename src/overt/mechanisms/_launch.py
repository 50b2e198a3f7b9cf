"""Launching Triton kernels at little cost to the host.

Triton looks at each argument of each launch to find the kernel that was compiled for its kind, which for
kernels of many arguments takes longer than they run. Here what was compiled is kept by the numbers that
decide it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided when kernels are defined
_MOST = 4096
# Of these versions it is known what a compiled kernel's own launcher takes, without the hooks of profilers.
_DIRECT = triton.__version__.startswith(("3.6.", "3.7."))
_compiled: dict[Any, Any] = {}


def blocks(count: int, size: int) -> int:
    """How many blocks of a size cover a count."""
    return -(-count // size)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number, and not below 16: a tile's least width."""
    return max(16, 1 << (number - 1).bit_length())


def signed(word: int) -> int:
    """The low 32 bits of a number as a 32-bit integer, so that its type is always the same."""
    return (word + 2**31) % 2**32 - 2**31


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A kernel is launched on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    floats: tuple[float, ...],
    integers: tuple[int, ...],
    loose: tuple[int, ...],
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 2,
    registers: int | None = None,
) -> None:
    """Run a kernel whose parameters are tensors, floats, integers, loose integers, constants, in this order.

    Loose integers change from call to call, fit 32 bits, and are declared `do_not_specialize`.
    """
    floats = tuple([float(number) for number in floats])  # of integers, Triton looks at the values
    if INTERPRETED:
        kernel[grid](*tensors, *floats, *integers, *loose, **constants)
        return
    places = [tensor.data_ptr() for tensor in tensors]
    fixed = tuple(constants.values())
    kinds = tuple([tensor.dtype for tensor in tensors])
    aligned = tuple([place & 15 for place in places])
    number = tensors[0].get_device()
    key = (kernel, number, kinds, aligned, integers, fixed, warps, stages, registers)
    compiled = _compiled.get(key)
    if compiled is not None and number == torch._C._cuda_getDevice():
        stream = torch._C._cuda_getCurrentRawStream(number)
        if _DIRECT:
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *places, *floats, *integers, *loose, *fixed,
            )  # fmt: skip
        else:
            compiled[grid](*places, *floats, *integers, *loose, *fixed, stream=stream)
        return
    with on_device_of(tensors[0]):
        if list(constants) != kernel.arg_names[-len(constants) :]:
            raise TypeError(f"{kernel.__name__} takes its constants in the order of its parameters")
        if len(_compiled) >= _MOST:
            _compiled.clear()
        options = {"num_warps": warps, "num_stages": stages}
        if registers is not None:
            options["maxnreg"] = registers
        _compiled[key] = kernel[grid](*tensors, *floats, *integers, *loose, **constants, **options)
