"""Running compiled loops on the CPU: importing them, dividing rows among threads, preparing inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch
from torch import Tensor

CELLS_PER_THREAD = 2**18  # with fewer cells, starting threads costs more than it saves


def loops(name: str) -> ModuleType | None:
    """A module of compiled loops, by its name inside `overt.mechanisms`; None without numba."""
    try:
        return importlib.import_module(f"overt.mechanisms.{name}")
    except ImportError:
        return None


def eager() -> bool:
    """Whether operations run one by one: neither compiled nor under a torch.func transform."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


def run_threaded(count: int, cells: int, run: Callable[..., None], *tensors: Tensor) -> None:
    """Run a compiled loop over 0 … count, in as many threads as torch uses if there are enough cells."""
    arrays = [tensor.numpy() for tensor in tensors]
    threads = torch.get_num_threads() if cells >= CELLS_PER_THREAD else 1
    if threads == 1:
        run(0, count, *arrays)
        return
    bounds = [count * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first, last: run(first, last, *arrays), bounds[:-1], bounds[1:]))


def bytes_of(visible: Tensor, logits: Tensor) -> Tensor:
    """The visibility of a map, (batch, heads or 1, query, key), as bytes."""
    batch, _, queries, keys = logits.shape
    return visible.expand(batch, -1, queries, keys).contiguous().view(torch.uint8)
