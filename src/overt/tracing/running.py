"""Running modules uncompiled, and layers for one token alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_not
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from overt.tracing.asked import version_of
from overt.tracing.axes import Axes, labels_of
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
            with torch.no_grad(), kept_as_it_is(module):
                alone = next(tensors(module(*given, **named)), None)
        except Exception:  # whatever a module raises that takes no single token
            return False
        whole = out[token, token].detach()
        if alone is None or alone.shape != whole.shape:
            return False
        if float((alone - whole).abs().max()) > 1e-3 * float(whole.abs().max()) + 1e-6:
            return False
    return True


@contextmanager
def kept_as_it_is(module: nn.Module) -> Iterator[None]:
    """Give a module its attributes and buffers back, and torch its random numbers.

    Only what has changed is set: other threads may be running the module.
    """
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    held = [vars(part) for part in parts]
    held += [value for attributes in held for value in attributes.values() if type(value) is dict]
    kept = [(attributes, dict(attributes)) for attributes in held]
    values = [value for part in parts for value in vars(part).values()]
    lists = [(value, list(value)) for value in values if type(value) is list]
    copies = [(buffer, buffer.clone()) for buffer in module.buffers()]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for attributes, before in kept:
            for name in [*attributes]:
                if name not in before:
                    del attributes[name]
            for name, value in before.items():
                if name not in attributes or attributes[name] is not value:
                    attributes[name] = value
        for entries, earlier in lists:
            if len(entries) != len(earlier) or any(map(is_not, entries, earlier)):
                entries[:] = earlier
        for buffer, copy in copies:
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)


STATISTICS = (nn.Softmax, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.Embedding)
FEW = 16  # tokens for which a module is run again


@dataclass(frozen=True, eq=False)
class Probe:
    """A module's arguments, to run it again with others.

    Attributes:
        few: positional and named arguments with few tokens: copies, made before the module runs.
        whole: all of them.
        version: of the tensor that is changed, among all of them; it is another if the module changed it.
        axes: those of the tensor that is changed.
    """

    few: Any
    whole: Any
    version: int
    axes: Axes


def probe_of(args: Any, kwargs: Any, axes_of: Callable[[Tensor], Axes | None]) -> Probe | None:
    """What a module is given, if it is given states whose axes are known."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            axes = axes_of(value) or ()
            dims = [dim for dim, axis in enumerate(axes) if len(axis) == 1 and labels_of(axis)]
            for dim in dims:
                value = value.narrow(dim, 0, min(FEW, value.shape[dim]))
            return value.clone() if dims else value
        if type(value) in (tuple, list):
            return type(value)(map(cut, value))
        return {name: cut(entry) for name, entry in value.items()} if type(value) is dict else value

    x = _states((args, kwargs))
    axes = None if x is None else axes_of(x)
    if x is None or axes is None or not any(map(labels_of, axes)):
        return None
    return Probe(cut((args, kwargs)), (args, kwargs), version_of(x), axes)


def is_mixing(module: nn.Module, probe: Probe, out: Axes) -> bool:
    """Whether what a module gives for a token is known to depend on others.

    Args:
        module: the module.
        probe: what it was given.
        out: axes of what it gave.
    """
    for given in (probe.few, probe.whole):
        x = _states(given)
        if x is None or (given is probe.whole and version_of(x) != probe.version):
            return False
        try:
            with torch.no_grad(), kept_as_it_is(module):
                return _mixes(module, given, x, probe.axes, out)
        except Exception:  # whatever a module raises that takes no fewer tokens
            continue
    return False


def _mixes(module: nn.Module, given: Any, x: Tensor, axes: Axes, out: Axes) -> bool:
    args, kwargs = _with(given, x, x)
    plain = next(tensors(module(*args, **kwargs)))
    for dim, axis in enumerate(axes):
        places = [place for place, each in enumerate(out) if labels_of(each) == labels_of(axis)]
        if not places and plain.shape == x.shape and not labels_of(out[dim]):
            places = [dim]
        if not labels_of(axis) or x.shape[dim] < 2 or axes.count(axis) > 1 or len(places) != 1:
            continue
        for changed in {0, x.shape[dim] // 2, x.shape[dim] - 1}:
            other = x.clone()
            other.select(dim, changed).mul_(-1).add_(1)
            args, kwargs = _with(given, x, other)
            left, right = (
                each.movedim(places[0], 0).flatten(1).double().nan_to_num()
                for each in (plain, next(tensors(module(*args, **kwargs))))
            )
            differs = (left - right).abs().amax(dim=1) > 1e-4 * float(left.abs().max()) + 1e-6
            if len(differs) == x.shape[dim]:
                differs[changed] = False
            elif int(differs.sum()) < 2:  # tokens were cut off, or joined
                continue
            if bool(differs.any()):
                return True
    return False


def _states(value: Any) -> Tensor | None:
    return next(
        (tensor for tensor in tensors(value) if tensor.is_floating_point() and tensor.dim() > 1), None
    )


def _with(value: Any, old: Tensor, new: Tensor) -> Any:
    """Copies of arguments, with one tensor in place of another."""
    if isinstance(value, Tensor):
        return new.clone() if value is old else value.clone()
    if type(value) in (tuple, list):
        return type(value)(_with(entry, old, new) for entry in value)
    if type(value) is dict:
        return {name: _with(entry, old, new) for name, entry in value.items()}
    return value


def _taken(value: Any, lead: torch.Size, token: slice) -> Any:
    """Arguments with one example's one token, where they have an axis for each."""
    if isinstance(value, Tensor):
        return value[token, token].clone() if value.shape[:2] == lead else value
    if type(value) in (tuple, list):
        return type(value)(_taken(entry, lead, token) for entry in value)
    if type(value) is dict:
        return {name: _taken(entry, lead, token) for name, entry in value.items()}
    return value
