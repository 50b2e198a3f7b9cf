"""Running modules uncompiled, and layers for one token alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Samples:
    """Arguments of a module, with the first and the last token alone: copies, made before the module runs.

    Attributes:
        lead: the first two sizes of the module's first argument.
        first: positional and named arguments with the first token of the first example.
        last: those with the last token of the last example.
    """

    lead: torch.Size
    first: Any
    last: Any


def samples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Samples | None:
    """Copies of two tokens among a module's arguments; None where there is no axis of tokens."""
    x = args[0] if args and isinstance(args[0], Tensor) else None
    if x is None or x.dim() < 3 or not x.numel():
        return None
    lead = x.shape[:2]
    return Samples(lead, *(_taken((args, kwargs), lead, token) for token in ENDS))


ENDS = (slice(0, 1), slice(-1, None))


def is_tokenwise(module: nn.Module, samples: Samples | None, output: Any) -> bool:
    """Whether a module's output for the first and the last token is what it gives for these tokens alone."""
    if isinstance(module, ALONE):
        return True
    out = next(tensors(output), None)
    if samples is None or out is None or out.shape[:2] != samples.lead:
        return False
    for token, (given, named) in zip(ENDS, (samples.first, samples.last), strict=True):
        try:
            with torch.no_grad(), _unchanged(module):
                alone = next(tensors(module(*given, **named)), None)
        except Exception:  # whatever a module raises that takes no single token
            return False
        whole = out[token, token]
        if alone is None or alone.shape != whole.shape:
            return False
        if float((alone - whole).abs().max()) > 1e-3 * float(whole.abs().max()) + 1e-6:
            return False
    return True


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Give a module its attributes and buffers back, and torch its random numbers."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    kept = [(vars(part), dict(vars(part)), dict(part._buffers)) for part in parts]
    copies = [(buffer, buffer.clone()) for buffer in module.buffers()]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for attributes, before, buffers in kept:
            attributes.clear()
            attributes.update(before)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)
        for buffer, copy in copies:
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)


def _taken(value: Any, lead: torch.Size, token: slice) -> Any:
    """Arguments with one example's one token, where they have an axis for each."""
    if isinstance(value, Tensor):
        return value[token, token].clone() if value.shape[:2] == lead else value
    if type(value) in (tuple, list):
        return type(value)(_taken(entry, lead, token) for entry in value)
    if type(value) is dict:
        return {name: _taken(entry, lead, token) for name, entry in value.items()}
    return value
