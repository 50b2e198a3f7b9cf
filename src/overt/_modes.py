"""Where a model computes; and its mode, what it calls, or how torch computes, changed for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: the device of its weights, or the one that accelerate moves them to."""
    first = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for part in model.modules() if first.type == "meta" else (model,):
        place = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if place is not None:
            return torch.device(place)
    return first


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


def in_this_thread(
    function: Callable[..., Any], elsewhere: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function for the thread that calls this: hooks of a module are called by all that run it.

    Args:
        function: a hook, or what takes the place of a method.
        elsewhere: the method, for other threads; they pass by hooks, whatever the arguments: torch gives
            other ones to a hook that is just being removed.
    """
    thread = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return function(*args, **kwargs)
        return None if elsewhere is None else elsewhere(*args, **kwargs)

    return called


@contextmanager
def any_shape() -> Iterator[None]:
    """Inside, torch's attention does not use cuDNN, which prepares for every new shape of a batch anew.

    With the many shapes of token-sized batches and of growing translations that takes most of the time.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
