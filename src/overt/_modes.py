"""Change the training or evaluation mode of a model's modules temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def in_other_mode(model: nn.Module, trains: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules whose mode differs from `trains`: True for training, False for evaluation."""
    return [module for module in model.modules() if module.training != trains(module)]


@contextmanager
def switched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Switch the mode of each of these modules, and back at the end."""
    try:
        for module in modules:
            module.training = not module.training
        yield
    finally:
        for module in modules:
            module.training = not module.training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; each module's mode is restored at the end."""
    with switched(in_other_mode(model, lambda _: False)):
        yield
