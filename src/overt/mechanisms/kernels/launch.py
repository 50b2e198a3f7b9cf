"""Launching Triton kernels at little cost to the host.

Triton looks at each argument of each launch to find the kernel that was compiled for its kind, which for
kernels of many arguments takes longer than they run. Here a launch is made ready once for its shapes, and
keeps what was compiled for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided when kernels are defined
MOST = 4096  # launches that are kept ready, of each kernel
# Of these versions it is known what a compiled kernel's own launcher takes, without the hooks of profilers.
_DIRECT = triton.__version__.startswith(("3.6.", "3.7."))


def blocks(count: int, size: int) -> int:
    """How many blocks of a size cover a count."""
    return -(-count // size)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number, and not below 16: a tile's least width."""
    return max(16, 1 << (number - 1).bit_length())


def helper(function: Any) -> Any:
    """A function that kernels call. The interpreter sets itself up anew for each that is compiled."""
    return function if INTERPRETED else triton.jit(function)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A kernel is launched on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


class Ready:
    """A launch but for its tensors and the numbers that change from call to call.

    A kernel's parameters are tensors, floats, integers, loose integers and constants, in this order. Loose
    integers change from call to call, fit 32 bits, and are declared `do_not_specialize`.

    Args:
        kernel: Triton's.
        grid: of programs.
        integers: the kernel's.
        constants: the kernel's, by name.
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
        floats = tuple([float(number) for number in floats])  # of integers, Triton looks at the values
        options = {} if INTERPRETED else self.options
        return kernel[self.grid](*tensors, *floats, *self.integers, *loose, **constants, **options)
