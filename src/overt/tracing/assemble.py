"""Assembling a trace: captured calls, sorted into encoder, decoder and cross-attention, with a token axis."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from overt import _check
from overt.tracing.capture import FUSED, CapturedAttention
from overt.tracing.collect import Collector, Stack, is_at
from overt.tracing.inputs import Inputs, picture_of
from overt.tracing.result import PosteriorDraw, Trace, TraceKind, main_queries
from overt.tracing.subject import Output, Subject

if TYPE_CHECKING:
    from overt.tracing.chat import Turn
    from overt.tracing.places import Change


class CallGroups(NamedTuple):
    """Numbers of the calls that make up a trace, by their place in the model."""

    kind: TraceKind
    maps: list[int]
    encoder: list[int]
    cross: list[int]


def sort_calls(collector: Collector) -> CallGroups:
    """Which calls are the encoder's, the decoder's and cross-attention."""
    calls = collector.calls
    names = ", ".join(repr(chain) for chain in collector.stacks)
    several = f"the model has several stacks of attention layers, choose one with stack=…: {names}"
    several += ' (or name the calls of one chain, stack={"encoder": […]})'
    if isinstance(collector.stack, Mapping):
        groups = _named_groups(collector.stack, collector)
        _check_groups(groups, collector)
        return groups
    if not calls:
        if collector.stack is None:
            raise ValueError("no attention ran: nothing to trace")
        raise ValueError(f"no attention ran in {collector.stack!r}; stacks that did: {names}")
    in_layers = [n for n, call in enumerate(calls) if call.chain != call.path or call.recurrent]
    # An attention outside all lists of layers pools their outputs.
    in_layers = in_layers or list(range(len(calls)))
    cross = [number for number in in_layers if calls[number].kind == "cross"]
    by_chain: dict[str, list[int]] = {}
    for number in in_layers:
        if calls[number].kind != "cross":
            by_chain.setdefault(calls[number].chain, []).append(number)
    chains = list(by_chain)
    if not cross and all(calls[number].grid is not None for number in in_layers):
        groups = CallGroups("pixels", by_chain[chains[0]], [], [])  # the finest: images shrink
    elif not cross:
        if len(chains) > 1 and not _follow_each_other(calls, in_layers):
            raise ValueError(several)
        self_attentions = in_layers
        kind: TraceKind = "causal" if all(_causal(calls[number]) for number in self_attentions) else "encoder"
        groups = CallGroups(kind, self_attentions, [], [])
    else:
        across = {calls[number].chain for number in cross}
        decoder = [n for chain in chains if chain in across for n in by_chain[chain]]
        others = [chain for chain in chains if chain not in across]
        if len(across) > 1 or len(others) > 1:
            raise ValueError(several)
        recurrent = not decoder and all(calls[number].recurrent for number in cross)
        if recurrent and len({calls[number].path for number in cross}) < len(cross):
            pieces = f"{calls[cross[0]].path} was made in {len(cross)} pieces"
            raise ValueError(f"{pieces}: trace one pass over the whole target")
        if len(decoder) != len(cross) and not recurrent:
            raise ValueError(
                f"the decoder has {len(decoder)} self-attentions and {len(cross)} cross-attentions; "
                f"only one of each per layer is supported; {_seen(collector)}"
            )
        groups = CallGroups("encoder–decoder", decoder, by_chain[others[0]] if others else [], cross)
    _check_groups(groups, collector)
    return groups


def _follow_each_other(calls: Sequence[CapturedAttention], numbers: Sequence[int]) -> bool:
    """Whether calls outside all lists of layers are layers all the same: each reads the one before."""
    pairs = itertools.pairwise(calls[number] for number in numbers)
    return all(call.chain == call.path for call in calls) and all(
        below.token and above.after is not None and below.token in above.after for below, above in pairs
    )


CHAINS = ("encoder", "decoder", "cross")


def stack_of(stack: Any) -> Stack | None:
    """The argument `stack` of `trace`, checked; in a mapping, each chain has a list of paths."""
    if stack is None or isinstance(stack, str):
        return stack
    if not isinstance(stack, Mapping):
        raise TypeError(f"stack must be a path or a mapping of chain → calls, got {type(stack).__name__}")
    for chain in stack:
        _check.one_of("a chain in stack", chain, CHAINS)
    named = {chain: [calls] if isinstance(calls, str) else list(calls) for chain, calls in stack.items()}
    if not named or not all(named.values()):
        raise ValueError(
            f"stack must name the calls of a chain, such as {{'encoder': ['blocks']}}, got {stack}"
        )
    if len(named) > 1 and not {"decoder", "cross"} <= set(named):
        raise ValueError(
            f"stack must name one chain, or the decoder and cross-attention, got {', '.join(named)}: towers "
            "are traced one at a time"
        )
    if set(named) == {"cross"}:
        raise ValueError("stack must name the decoder's calls as well, got only cross")
    return named


def _named_groups(stack: Mapping[str, Sequence[str]], collector: Collector) -> CallGroups:
    """The calls that were named for each chain."""
    calls = collector.calls
    found: dict[str, list[int]] = {}
    for chain, places in stack.items():
        found[chain] = []
        for place in places:
            numbers = [n for n, call in enumerate(calls) if is_at(call.path, place)]
            if not numbers:
                raise ValueError(f"no attention ran at {place!r} (stack[{chain!r}]); {_seen(collector)}")
            found[chain] += numbers
    encoder, decoder, cross = (found.get(chain, []) for chain in CHAINS)
    if not cross:
        maps = encoder or decoder
        kind: TraceKind = "causal" if all(_causal(calls[number]) for number in maps) else "encoder"
        return CallGroups(kind, maps, [], [])
    if len(decoder) != len(cross):
        raise ValueError(
            f"stack names {len(decoder)} calls of the decoder and {len(cross)} of cross-attention: as many "
            f"are needed; {_seen(collector)}"
        )
    return CallGroups("encoder–decoder", decoder, encoder, cross)


def _seen(collector: Collector) -> str:
    """The calls that ran, in words."""
    paths = [*collector.seen]
    return "calls seen: " + ", ".join(paths[:24]) + (", …" if len(paths) > 24 else "")


def _check_groups(groups: CallGroups, collector: Collector) -> None:
    """Refuse maps that cannot be multiplied, layer by layer."""
    calls, sizes = collector.calls, collector.shapes
    for group in (groups.maps, groups.encoder, groups.cross):
        shapes = {(sizes[n][0], *sizes[n][-2:]) for n in group}
        if len(shapes) > 1:
            shown = ", ".join(str(shape) for shape in sorted(shapes))
            raise ValueError(
                f"maps must have the same size in all layers, got (batch, query, key) {shown}: models that "
                "attend in windows or shrink their sequence are not supported"
            )
    for group in (groups.maps, groups.encoder):
        if group and sizes[group[0]][-1] != sizes[group[0]][-2]:
            rows, columns = sizes[group[0]][-2:]
            raise ValueError(
                f"{calls[group[0]].path} has {rows} queries and {columns} keys: trace without a cache; keys "
                "that are not tokens are not supported"
            )
    _check_memory(groups, collector)
    _check_lowest(groups, collector)
    for group in (groups.maps, groups.encoder, groups.cross):
        for below, above in itertools.pairwise(calls[number] for number in group):
            unread = group is not groups.cross and above.reads is not None and below.token not in above.reads
            if unread and below.token and above.after is not None and below.token in above.after:
                raise ValueError(
                    f"{above.path} has queries made of what {below.path} wrote, and values that are not, so "
                    f"its map leads past that layer: not supported; {_seen(collector)}"
                )
            if above.after is not None and below.token and below.token not in above.after:
                advice = 'name the calls of a chain with stack={"encoder": […]}'
                if sum(call.path == above.path for call in calls) > 1:
                    advice = "trace a module that runs more than once by itself, on one of its inputs"
                    advice += " (heads that are computed one by one are not supported)"
                raise ValueError(
                    f"{above.path} does not read what {below.path} wrote, so they are no layers of one "
                    f"chain, but side by side, as heads or towers are: {advice}; {_seen(collector)}"
                )
    if groups.maps:
        order = itertools.chain.from_iterable(zip(groups.maps, groups.cross, strict=False))
        for below, above in itertools.pairwise(calls[number] for number in order):
            if above.after is not None and below.token and below.token not in above.after:
                raise ValueError(
                    f"{above.path} does not read what {below.path} wrote: only layers of self-attention, "
                    f"then cross-attention, are supported; {_seen(collector)}"
                )


def _check_lowest(groups: CallGroups, collector: Collector) -> None:
    """Refuse a stack that reads what an attention outside it wrote, unless the caller chose it."""
    calls, inside = collector.calls, {*groups.maps, *groups.encoder, *groups.cross}
    for group in (groups.maps, groups.encoder):
        after = calls[group[0]].after if group and collector.stack is None else None
        for number, call in enumerate(calls):
            if after and call.token in after and number not in inside:
                raise ValueError(
                    f"{calls[group[0]].path} reads what {call.path} wrote, which is in no list of layers, so "
                    f"maps would not lead to the input: choose calls with stack=…; {_seen(collector)}"
                )


def _check_memory(groups: CallGroups, collector: Collector) -> None:
    """Refuse cross-attention to anything but the encoder's last states."""
    calls = collector.calls
    own = {calls[number].token for number in groups.maps if calls[number].token}
    last = calls[groups.encoder[-1]].token if groups.encoder else 0
    for call in (calls[number] for number in groups.cross):
        if call.reads is None:
            continue
        if own & call.reads:
            raise ValueError(
                f"{call.path} attends to states of its own decoder, perhaps before they were shortened: not "
                f"supported; {_seen(collector)}"
            )
        if last and last not in call.reads:
            raise ValueError(
                f"{call.path} does not attend to what {calls[groups.encoder[-1]].path} wrote: name the "
                f'encoder that it attends to with stack={{"encoder": […], …}}; {_seen(collector)}'
            )


def _check_missed(model: nn.Module, inputs: Inputs, collector: Collector, groups: CallGroups) -> None:
    """Refuse a model some of whose attention was not captured, unless the caller chose a stack."""
    if collector.stack is not None:
        return
    names = ", ".join(repr(chain) for chain in collector.stacks)
    for path, kind in collector.missed.items():
        raise ValueError(
            f"{path} ({kind}) attends, and not through transformers' attention interface, so its maps would "
            f"be missing: choose one of the other stacks with stack=…: {names}"
        )
    if not groups.cross or groups.encoder or not hasattr(getattr(model, "config", None), "model_type"):
        return
    from overt.tracing.origins import tensors  # on first use

    batch, _, _, keys = collector.shapes[groups.cross[0]]
    given = [tensor.shape[:2] for tensor in tensors(inputs.arguments) if tensor.dim() == 3]
    if (batch, keys) not in given:
        path = collector.calls[groups.cross[0]].path
        raise ValueError(
            f"no attention was recognised in what makes the states that {path} reads, so maps would not "
            f"lead to the input: trace the decoder alone with stack=…: {names}"
        )


def _check_runs(model: nn.Module, collector: Collector, groups: CallGroups) -> None:
    """Refuse maps of a module of transformers that runs more than once, which may not be those of layers."""
    calls = [collector.calls[n] for n in (*groups.maps, *groups.encoder, *groups.cross)]
    paths = [call.path for call in calls if not call.token and not call.recurrent]
    known = [module for _, module in model.named_modules(remove_duplicate=False)]
    shared = isinstance(getattr(getattr(model, "config", None), "num_hidden_groups", None), int)  # ALBERT
    for call in calls:
        if call.path in collector.repeated:
            raise ValueError(
                f"{call.path} cannot be traced: it attends more than once in one call, to one picture after "
                "another or for maps that it combines, and a layer has one map"
            )
    for path in dict.fromkeys(paths):
        if shared or paths.count(path) < 2:
            continue
        if paths.count(path) > sum(module is model.get_submodule(path) for module in known):
            raise ValueError(
                f"{path} cannot be traced: it runs {paths.count(path)} times, and whether that is one layer "
                "after another, or several inputs side by side, cannot be told"
            )


def _check_whole(model: nn.Module, collector: Collector, groups: CallGroups) -> None:
    """Refuse a stack with layers that mix tokens without attention, which no map would show."""
    calls = collector.calls
    for group in (groups.maps, groups.encoder):
        paths = [calls[number].path for number in group]
        chain = _chain_in(collector.stack, calls[group[0]]) if group else ""
        try:
            layers = model.get_submodule(chain)
        except AttributeError:
            continue
        known = bool(group) and calls[group[0]].reads is not None  # others of the list were looked at, too
        lists = (nn.ModuleList, nn.Sequential) if known else nn.ModuleList
        if not group or chain == paths[0] or not isinstance(layers, lists):
            continue
        # A layer may be one of cross-attention alone, and the caller need not have named all.
        paths = [call.path for call in calls if call.path.startswith(chain + ".")]
        if isinstance(collector.stack, Mapping):
            paths = [path for path in collector.seen if path.startswith(chain + ".")]
        seen = {int(path.removeprefix(chain + ".").split(".")[0]) for path in paths}
        seen |= {n for n, layer in enumerate(layers) if any(layer is layers[other] for other in seen)}
        # A sequence may begin with what makes tokens, and end with what reads them.
        whole = isinstance(layers, nn.ModuleList)
        expected = range(len(layers)) if whole else range(min(seen), max(seen))
        alone = {n for n in expected if f"{chain}.{n}" in collector.tokenwise}
        if missing := sorted(set(expected) - seen - alone):
            shown = ", ".join(map(str, missing[:4])) + (", …" if len(missing) > 4 else "")
            raise ValueError(
                f"layers {shown} of {chain} do not attend (a convolution or a state space instead?), so maps "
                "alone do not show how tokens mix: not supported"
            )


def _check_mixers(collector: Collector, groups: CallGroups) -> None:
    """Refuse modules that mix tokens without attention, in a layer or between layers."""
    calls = collector.calls
    for group in (groups.maps, groups.encoder, groups.cross):
        layers = {found[1] for n in group if (found := re.match(r"(.*?\.\d+\.)", calls[n].path + "."))}
        tokens = {calls[n].token for n in (*group, *groups.encoder) if calls[n].token}
        read = frozenset().union(*((calls[n].after or ()) for n in group))
        read = read.union(*((calls[n].reads or ()) for n in groups.cross))
        for mixer in collector.mixers:
            inside = any((mixer.path + ".").startswith(layer) for layer in layers)
            if inside or (mixer.token in read and mixer.reads & tokens):
                raise ValueError(
                    f"{mixer.path} mixes tokens without attention (a convolution or a recurrent network?), "
                    "so maps alone do not show how tokens mix: not supported"
                )


def _check_places(change: Change, collector: Collector, groups: CallGroups) -> None:
    """Refuse a chain that sees a token's change at other tokens, though attention passed nothing on."""
    calls, paths = collector.calls, [call.path for call in collector.calls]
    traced = [n for n, path in enumerate(change.paths) if path in set(paths)]
    if [change.paths[n] for n in traced] != paths:
        return  # the run on a few tokens was another
    for group in (groups.maps, [*groups.encoder, *groups.cross]):
        seen = [(calls[n].path, change.seen[traced[n]]) for n in group]
        first = next((places for _, places in seen if places), frozenset())
        for path, places in seen:
            if not places <= first:
                raise ValueError(
                    f"{path} sees a change of one token of {change.name} at other places than the attention "
                    "before it, though attention passes nothing on: between them, tokens are mixed or moved, "
                    "which maps alone do not show: not supported"
                )
        at = {token for _, token in first}
        if not change.exact or len(at) != 1 or at == {change.token}:
            continue
        batch, _, _, tokens = collector.shapes[group[0]]
        if tuple(change.shape) == (batch, tokens):
            raise ValueError(
                f"{seen[0][0]} has values of token {change.token} of {change.name} at place {min(at)}: they "
                "are in another order than the tokens of the input: not supported"
            )


def _chain_in(stack: Stack | None, call: CapturedAttention) -> str:
    """The list of layers that a call is in; below the stack that was chosen, if that is in a list itself."""
    if not isinstance(stack, str) or not stack.startswith(call.chain + "."):
        return call.chain
    below = re.split(r"(?:^|\.)\d+(?:\.|$)", call.path.removeprefix(stack + "."))[0]
    return f"{stack}.{below}" if below else stack


def _causal(call: CapturedAttention) -> bool:
    """Whether a map is causal: by its mask if there is one, otherwise by the kind of its module."""
    seen = call.visible
    if call.asked is not None and call.of_states and call.asked.shape[2] == call.asked.shape[3] > 1:
        from overt.tracing.asking import hides_later

        return hides_later(call.asked)
    if seen is None or seen.shape[-1] != seen.shape[-2] or seen.shape[-1] < 2:
        return call.kind == "decoder"
    return not bool(seen.triu(1).any())


@dataclass(frozen=True, eq=False)
class Frame:
    """All of a trace but its maps: the calls that they come from, and what is known about the tokens.

    Attributes:
        groups: numbers of the calls.
        mask: boolean (batch, token).
        special: boolean (batch, token).
        tokens: their names, per example.
        offsets: (batch, token, 2), or None.
        inputs: the batch.
        of_image: whether the tokens are patches of an image.
        subject: the model with its batch.
        queries: length of the query axis.
    """

    groups: CallGroups
    mask: Tensor
    special: Tensor
    tokens: list[list[str]]
    offsets: Tensor | None
    inputs: Inputs
    of_image: bool
    subject: Subject
    queries: int

    def main_queries(self) -> list[int]:
        """See `Trace.main_queries`."""
        return main_queries(self.groups.kind, self.mask, self.queries, self.inputs.grid)


def make_frame(model: nn.Module, inputs: Inputs, collector: Collector, output: Output | None) -> Frame:
    """Sort the captured calls, and name the tokens."""
    calls, sizes = collector.calls, collector.shapes
    groups = sort_calls(collector)
    _check_missed(model, inputs, collector, groups)
    _check_runs(model, collector, groups)
    _check_whole(model, collector, groups)
    _check_mixers(collector, groups)
    for change in collector.changes:
        _check_places(change, collector, groups)
    batch, _, queries, _ = sizes[(groups.maps or groups.cross)[0]]
    source = sizes[groups.cross[0]][-1] if groups.cross else 0
    lowest = calls[(groups.encoder or groups.cross or groups.maps)[0]]
    if groups.kind == "pixels":
        inputs.grid = lowest.grid
    of_image = inputs.grid is not None and _sees_pixels(model, lowest.chain)
    if not of_image:
        inputs.grid = None
    mask, special, words = _token_axis(inputs, calls, groups, batch, queries, source)
    total = source + queries
    offsets = None
    if inputs.offsets is not None and inputs.offsets.shape[1] in (source or total, total):
        offsets = torch.zeros(batch, total, 2, dtype=torch.int64)
        offsets[:, : inputs.offsets.shape[1]] = inputs.offsets
        if source and "target offsets" in inputs.extra:
            offsets[:, source:] = inputs.extra["target offsets"]
    subject = Subject(model, inputs, mask, source, groups.kind, output)
    if any(call.of_states for call in calls):  # what a backward pass needs would not fit either
        found = [re.match(r"(.*?\.\d+)(?:\.|$)", call.path) for call in calls]
        subject.layers = list(dict.fromkeys(match[1] for match in found if match))
    return Frame(groups, mask, special, words, offsets, inputs, of_image, subject, queries)


def assemble(frame: Frame, collector: Collector) -> Trace:
    """A trace of the collected maps."""
    groups, calls, inputs = frame.groups, collector.calls, frame.inputs
    order = [*groups.maps, *groups.encoder, *groups.cross]
    if borrowing := [path for n in order if (path := calls[n].path) in collector.borrowed]:
        warnings.warn(
            f"{borrowing[0]} attends to the values of {collector.borrowed[borrowing[0]]}, as layers that "
            "share keys and values do: rollout and flow take them for values of the layer before",
            stacklevel=4,
        )
    return Trace(
        kind=groups.kind,
        maps=collector.group(groups.maps),
        mask=frame.mask,
        tokens=frame.tokens,
        special=frame.special,
        offsets=frame.offsets,
        grid=inputs.grid,
        image=inputs.image if frame.of_image else None,
        picture=picture_of(inputs) if frame.of_image else None,
        encoder_maps=collector.group(groups.encoder),
        cross=collector.group(groups.cross),
        mixing=collector.mixing.name,
        parts=_parts(groups, collector) if collector.with_parts else {},
        visible=[calls[n].visible for n in order],
        paths=[calls[n].path for n in order],
        sums_to_one=all(calls[n].sums_to_one for n in order),
        signed=any(calls[n].signed for n in order),
        memory=collector.budget.most if collector.budget is not None and collector.budget.states else None,
        generated=_generated(frame),
        texts=list(inputs.extra.get("texts", [])) if frame.offsets is not None else [],
        turns=_turns(frame),
        subject=frame.subject,
    )


def _generated(frame: Frame) -> Tensor | None:
    """Which tokens were generated, boolean (batch, token); None if none were."""
    written = frame.inputs.extra.get("generated")
    if written is None:
        return None
    if frame.groups.kind not in ("causal", "encoder–decoder"):
        raise ValueError(
            f"generate needs causal attention, and this stack is of kind {frame.groups.kind!r}: tokens would "
            "see what was generated after them"
        )
    if written.shape != (len(frame.mask), frame.queries):
        raise ValueError(
            f"generate needs an id for each token: there are {written.shape[1]}, and attention runs over "
            f"{frame.queries} tokens, so the model adds or joins some"
        )
    before = torch.zeros(len(written), frame.mask.shape[1] - frame.queries, dtype=torch.bool)
    return torch.cat([before, written], dim=1)


def _turns(frame: Frame) -> list[list[Turn]]:
    """Messages of a chat, with what was generated; or prompt and output."""
    from overt.tracing.chat import Turn

    turns: list[list[Turn]] = frame.inputs.extra.get("turns", [])
    written, first = _generated(frame), frame.mask.shape[1] - frame.queries
    if written is None:
        return turns
    found = []
    for number, output in enumerate(written):
        own = list(turns[number]) if turns else []
        end = int(frame.mask[number].nonzero().max()) + 1
        start = int(output.int().argmax()) if bool(output.any()) else end
        real = frame.mask[number, : first or start].nonzero().flatten()
        prompt = Turn("prompt", int(real.min()), int(real.max()) + 1)
        if own and not first:
            # The template's beginning of a reply is part of it.
            found.append([*own, Turn("assistant", own[-1].stop, end)])
        else:
            found.append([*(own or [prompt]), Turn("output", start, end)])
    return found


def posterior_draw(collector: Collector, outputs: Tensor | None) -> PosteriorDraw:
    """One posterior sample's maps."""
    groups = sort_calls(collector)
    maps, below, across = (
        list(collector.group(group)) for group in (groups.maps, groups.encoder, groups.cross)
    )
    return PosteriorDraw(maps, below, across, outputs)


def _parts(groups: CallGroups, collector: Collector) -> dict[str, list[Tensor | None]]:
    """Name → one map per layer, None where a layer has none."""
    calls = collector.calls
    if not any(call.part_names for call in calls):
        raise ValueError(
            "parts=True needs a mechanism that exposes its parts, such as Evolving: this model has none"
        )
    parts: dict[str, list[Tensor | None]] = {}
    for kind, numbers in (("", groups.maps), ("encoder ", groups.encoder), ("cross ", groups.cross)):
        names = dict.fromkeys(name for n in numbers for name in calls[n].part_names)
        for name in (*names, FUSED) if names else ():
            parts[f"{kind}{name}"] = [collector.part(n, name) for n in numbers]
    return parts


def _sees_pixels(model: nn.Module, chain: str) -> bool:
    """Whether a list of layers reads an image, according to the innermost model that contains it."""
    names, module = [getattr(model, "main_input_name", None)], model
    for part in chain.split("."):
        module = module._modules.get(part) or module
        names.append(getattr(module, "main_input_name", None))
    return next((name for name in reversed(names) if isinstance(name, str)), None) in (None, "pixel_values")


def _token_axis(
    inputs: Inputs,
    calls: Sequence[CapturedAttention],
    groups: CallGroups,
    batch: int,
    queries: int,
    source: int,
) -> tuple[Tensor, Tensor, list[list[str]]]:
    """Mask, special tokens and names along the token axis."""

    def axis(
        length: int,
        mask: Tensor | None,
        words: Any,
        special: Any,
        call: CapturedAttention | None,
        target: bool = False,
    ) -> Any:
        of_image = inputs.grid is not None and not target
        seen = torch.ones(batch, length, dtype=torch.bool)
        if call is not None and call.visible is not None:
            # A key that no query sees is padding.
            seen = seen & call.visible.any(dim=-2)
        elif call is not None and call.of_states and call.asked is not None:
            from overt.tracing.asking import keys_seen

            known = keys_seen(call.asked.sight)
            seen = seen if known is None else seen & known
        fits = mask is not None and mask.shape == (batch, length) and not of_image
        mask = _agreed(mask, seen) if mask is not None and fits else seen
        if of_image and inputs.grid is not None:
            words, special = _patch_names(batch, length, inputs.grid)
        if words is None or len(words) != batch or any(len(names) != length for names in words):
            if inputs.extra.get("named") and not target:
                sizes = [len(names) for names in words or ()]
                raise ValueError(f"tokens must be {batch} lists of {length} words, got lists of {sizes}")
            # Tokens of the input are known, but which of these they are is not: some were added, perhaps.
            mark = "" if words is None else "#"
            words = [[f"{mark}{number}" for number in range(length)] for _ in range(batch)]
        if special is None or special.shape != (batch, length):
            special = torch.zeros(batch, length, dtype=torch.bool)
        return mask, special & mask, words

    if not source:
        first = calls[groups.maps[0]]
        mask, special, words = axis(queries, inputs.mask, inputs.tokens, inputs.special, first)
        return mask, special, words
    lowest = calls[groups.encoder[0] if groups.encoder else groups.cross[0]]
    extra, named = inputs.extra, inputs.tokens
    target = extra.get("target tokens")
    if named and all(len(each) == source + queries for each in named):  # those of the target, too
        named, target = [each[:source] for each in named], [each[source:] for each in named]
    before = axis(source, inputs.mask, named, inputs.special, lowest)
    own = calls[groups.maps[0]] if groups.maps else None
    after = axis(queries, extra.get("target mask"), target, extra.get("target special"), own, target=True)
    words = [left + right for left, right in zip(before[2], after[2], strict=True)]
    return torch.cat([before[0], after[0]], dim=1), torch.cat([before[1], after[1]], dim=1), words


def _agreed(mask: Tensor, seen: Tensor) -> Tensor:
    """A mask that was given, after comparing it with the tokens that queries see; both (batch, token)."""
    mask = mask.cpu()
    hidden, shown = int((mask & ~seen).sum()), int((~mask & seen).sum())
    if torch.equal(mask, ~seen):
        return seen  # in this model, it is 1 at padding
    if not (hidden and shown):
        return mask
    raise ValueError(
        "attention_mask must be 1 at tokens and 0 at padding, or the reverse, as the model takes it: of its "
        f"ones, {hidden} are at tokens that no query sees, of its zeros {shown} at tokens that are seen"
    )


def _patch_names(batch: int, length: int, grid: tuple[int, int]) -> tuple[Any, Any]:
    """Names of patches by row and column; the tokens before them are special."""
    before = length - grid[0] * grid[1]
    if before < 0:
        return None, None
    names = [["[CLS]", *(f"[{n}]" for n in range(1, before))][n] for n in range(before)]
    names += [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    special = torch.zeros(batch, length, dtype=torch.bool)
    special[:, :before] = True
    return [names] * batch, special
