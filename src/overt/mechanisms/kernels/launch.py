"""Launching Triton kernels at little cost to the host.

Triton inspects each argument of each launch to look up the compiled kernel, which for kernels with many
arguments takes longer than running them. Here a launch is prepared once for its shapes, and keeps its
compiled kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided when kernels are defined
MOST = 4096  # prepared launches kept per kernel
# For these versions the arguments of a compiled kernel's launcher, without profiler hooks, are known.
_DIRECT = triton.__version__.startswith(("3.6.", "3.7."))


def blocks(count: int, size: int) -> int:
    """The number of blocks of a size that cover a count."""
    return -(-count // size)


def power_of_two(number: int) -> int:
    """The least power of two that is at least a number, and at least 16, the least width of a tile."""
    return max(16, 1 << (number - 1).bit_length())


def helper(function: Any) -> Any:
    """A function that kernels call. The interpreter would set itself up again for each compiled function."""
    return function if INTERPRETED else triton.jit(function)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current: a kernel is launched on the current device."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


class Ready:
    """A prepared launch: all but its tensors and the numbers that change from call to call.

    A kernel's parameters are tensors, floats, integers, loose integers and constants, in this order. Loose
    integers change from call to call, fit 32 bits, and are declared `do_not_specialize`.

    Args:
        kernel: the Triton kernel.
        grid: of programs.
        integers: the kernel's integers.
        constants: the kernel's constants, by name.
        warps: of a program.
        stages: of its pipelines.
    """

    __slots__ = ("_compiled", "_fixed", "constants", "grid", "integers", "kernel", "options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        constants: dict[str, Any],
        warps: int = 4,
        stages: int = 2,
    ) -> None:
        self.kernel, self.grid, self.integers, self.constants = kernel, grid, integers, constants
        self.options = {"num_warps": warps, "num_stages": stages}
        self._fixed = tuple(constants.values())
        self._compiled: dict[Any, Any] = {}

    def run(
        self, tensors: tuple[Tensor, ...], floats: tuple[float, ...] = (), loose: tuple[int, ...] = ()
    ) -> None:
        """Launch it on the tensors' device."""
        if INTERPRETED:
            self._run_anew(tensors, floats, loose)
            return
        places = [tensor.data_ptr() for tensor in tensors]
        all_bits = 0
        for place in places:
            all_bits |= place
        number = tensors[0].get_device()
        aligned = all_bits & 15 == 0 or tuple([place & 15 == 0 for place in places])
        key = (number, aligned, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        if number != torch._C._cuda_getDevice():
            with on_device_of(tensors[0]):
                self.run(tensors, floats, loose)
            return
        if compiled is None:
            self._compiled[key] = self._run_anew(tensors, floats, loose)
            return
        stream = torch._C._cuda_getCurrentRawStream(number)
        if _DIRECT:
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *places, *floats, *self.integers, *loose, *self._fixed,
            )  # fmt: skip
        else:
            given = *places, *floats, *self.integers, *loose, *self._fixed
            compiled[self.grid](*given, stream=stream)

    def _run_anew(
        self, tensors: tuple[Tensor, ...], floats: tuple[float, ...], loose: tuple[int, ...]
    ) -> Any:
        kernel, constants = self.kernel, self.constants
        if list(constants) != kernel.arg_names[-len(constants) :]:
            raise TypeError(f"{kernel.__name__} takes its constants in the order of its parameters")
        floats = tuple([float(number) for number in floats])  # Triton would specialise on integer values
        options = {} if INTERPRETED else self.options
        return kernel[self.grid](*tensors, *floats, *self.integers, *loose, **constants, **options)
