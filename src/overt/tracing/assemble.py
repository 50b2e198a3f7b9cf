"""Assembling: what was collected, sorted into encoder, decoder and cross-attention, with its token axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt.tracing.capture import FUSED, CapturedAttention
from overt.tracing.collect import Collector
from overt.tracing.inputs import Inputs, picture_of
from overt.tracing.result import PosteriorDraw, Trace, TraceKind, main_queries
from overt.tracing.subject import Output, Subject


class Sorted(NamedTuple):
    """Numbers of the calls that make up a trace."""

    kind: TraceKind
    maps: list[int]
    encoder: list[int]
    cross: list[int]


def sort_calls(collector: Collector) -> Sorted:
    """Which calls are the encoder's, the decoder's and cross-attention."""
    calls, sizes = collector.calls, collector.shapes
    names = ", ".join(repr(chain) for chain in collector.stacks)
    several = f"the model attends in several stacks, choose one by stack=…: {names}"
    if not calls:
        if collector.stack is None:
            raise ValueError("no attention ran: nothing to trace")
        raise ValueError(f"no attention ran in {collector.stack!r}; stacks that did: {names}")
    kept = [number for number, call in enumerate(calls) if call.chain != call.path]
    kept = kept or list(range(len(calls)))  # an attention outside of all lists of layers pools what they made
    cross = [number for number in kept if calls[number].kind == "cross"]
    by_chain: dict[str, list[int]] = {}
    for number in kept:
        if calls[number].kind != "cross":
            by_chain.setdefault(calls[number].chain, []).append(number)
    chains = list(by_chain)
    if not cross:
        if len(chains) > 1:
            raise ValueError(several)
        own = by_chain[chains[0]]
        kind: TraceKind = "causal" if all(_causal(calls[number]) for number in own) else "encoder"
        found = Sorted(kind, own, [], [])
    else:
        across = {calls[number].chain for number in cross}
        decoder = [n for chain in chains if chain in across for n in by_chain[chain]]
        others = [chain for chain in chains if chain not in across]
        if len(across) > 1 or len(others) > 1:
            raise ValueError(several)
        if len(decoder) != len(cross):
            raise ValueError(
                f"the decoder has {len(decoder)} self-attentions and {len(cross)} cross-attentions; "
                "only one of each per layer is supported"
            )
        found = Sorted("encoder–decoder", decoder, by_chain[others[0]] if others else [], cross)
    for group in (found.maps, found.encoder, found.cross):
        shapes = {(sizes[n][0], *sizes[n][-2:]) for n in group}
        if len(shapes) > 1:
            shown = ", ".join(str(shape) for shape in sorted(shapes))
            raise ValueError(
                f"maps must have one size in all layers, got (batch, query, key) {shown}: models that attend "
                "in windows or shrink their sequence are not supported"
            )
    for group in (found.maps, found.encoder):
        if group and sizes[group[0]][-1] != sizes[group[0]][-2]:
            rows, columns = sizes[group[0]][-2:]
            raise ValueError(
                f"{calls[group[0]].path} has {rows} queries and {columns} keys: trace without a cache"
            )
    return found


def _check_whole(model: nn.Module, calls: Sequence[CapturedAttention], found: Sorted) -> None:
    """Refuse a stack some of whose layers mix tokens without attention, which no map would show."""
    for group in (found.maps, found.encoder):
        paths = [calls[number].path for number in group]
        chain = calls[group[0]].chain if group else ""
        try:
            layers = model.get_submodule(chain)
        except AttributeError:
            continue
        if not group or chain == paths[0] or not isinstance(layers, nn.ModuleList):
            continue
        seen = {int(path.removeprefix(chain + ".").split(".")[0]) for path in paths}
        if missing := sorted(set(range(len(layers))) - seen):
            shown = ", ".join(map(str, missing[:4])) + (", …" if len(missing) > 4 else "")
            raise ValueError(
                f"layers {shown} of {chain} do not attend (a convolution or a state space instead?), so maps "
                "alone do not tell how tokens mix: not supported"
            )


def _causal(call: CapturedAttention) -> bool:
    """Whether a map is causal: by its mask where there is one to see, else as its module says."""
    seen = call.visible
    if seen is None or seen.shape[-1] != seen.shape[-2] or seen.shape[-1] < 2:
        return call.kind == "decoder"
    return not bool(seen.triu(1).any())


@dataclass(frozen=True, eq=False)
class Frame:
    """All of a trace but its maps: which calls they are of, and what is known of the tokens.

    Attributes:
        found: numbers of the calls.
        mask: boolean (batch, token).
        special: boolean (batch, token).
        tokens: in words.
        offsets: (batch, token, 2), or None.
        given: the inputs.
        pictured: whether the tokens are patches of an image.
        subject: the model with its batch.
        queries: length of the query axis.
    """

    found: Sorted
    mask: Tensor
    special: Tensor
    tokens: list[list[str]]
    offsets: Tensor | None
    given: Inputs
    pictured: bool
    subject: Subject
    queries: int

    def main_queries(self) -> list[int]:
        """As of the trace."""
        return main_queries(self.found.kind, self.mask, self.queries)


def framed(model: nn.Module, given: Inputs, collector: Collector, output: Output | None) -> Frame:
    """Sort what ran, and name the tokens."""
    calls, sizes = collector.calls, collector.shapes
    found = sort_calls(collector)
    _check_whole(model, calls, found)
    batch, queries = sizes[found.maps[0]][0], sizes[found.maps[0]][-2]
    source = sizes[found.cross[0]][-1] if found.cross else 0
    lowest = calls[(found.encoder or found.cross or found.maps)[0]]
    pictured = given.grid is not None and _sees_pixels(model, lowest.chain)
    if not pictured:
        given.grid = None
    mask, special, words = _token_axis(given, calls, found, batch, queries, source)
    total = source + queries
    offsets = None
    if given.offsets is not None and given.offsets.shape[1] in (source or total, total):
        offsets = torch.zeros(batch, total, 2, dtype=torch.int64)
        offsets[:, : given.offsets.shape[1]] = given.offsets
    subject = Subject(model, given, mask, source, found.kind, output)
    return Frame(found, mask, special, words, offsets, given, pictured, subject, queries)


def assembled(frame: Frame, collector: Collector) -> Trace:
    """A trace of the maps that were collected."""
    found, calls, given = frame.found, collector.calls, frame.given
    order = [*found.maps, *found.encoder, *found.cross]
    return Trace(
        kind=found.kind,
        maps=[collector.map(n) for n in found.maps],
        mask=frame.mask,
        tokens=frame.tokens,
        special=frame.special,
        offsets=frame.offsets,
        grid=given.grid,
        image=given.image if frame.pictured else None,
        picture=picture_of(given) if frame.pictured else None,
        encoder_maps=[collector.map(n) for n in found.encoder],
        cross=[collector.map(n) for n in found.cross],
        mixing=collector.mixing.name,
        parts=_parts(found, collector) if collector.with_parts else {},
        visible=[calls[n].visible for n in order],
        paths=[calls[n].path for n in order],
        sums_to_one=all(calls[n].sums_to_one for n in order),
        signed=any(calls[n].signed for n in order),
        subject=frame.subject,
    )


def drawn(collector: Collector, outputs: Tensor | None) -> PosteriorDraw:
    """One posterior sample's maps."""
    found = sort_calls(collector)
    maps, below, across = (
        [collector.map(n) for n in group] for group in (found.maps, found.encoder, found.cross)
    )
    return PosteriorDraw(maps, below, across, outputs)


def _parts(found: Sorted, collector: Collector) -> dict[str, list[Tensor | None]]:
    """Name → one map per layer, None where a layer has none."""
    calls = collector.calls
    if not any(call.part_names for call in calls):
        raise ValueError(
            "parts=True needs a mechanism whose work has parts, such as Evolving: this model has none"
        )
    parts: dict[str, list[Tensor | None]] = {}
    for kind, numbers in (("", found.maps), ("encoder ", found.encoder), ("cross ", found.cross)):
        names = dict.fromkeys(name for n in numbers for name in calls[n].part_names)
        for name in (*names, FUSED) if names else ():
            parts[f"{kind}{name}"] = [collector.part(n, name) for n in numbers]
    return parts


def _sees_pixels(model: nn.Module, chain: str) -> bool:
    """Whether a list of layers reads an image, as the nearest model around it says."""
    names, module = [getattr(model, "main_input_name", None)], model
    for part in chain.split("."):
        module = module._modules.get(part) or module
        names.append(getattr(module, "main_input_name", None))
    return next((name for name in reversed(names) if isinstance(name, str)), None) in (None, "pixel_values")


def _token_axis(
    given: Inputs, calls: Sequence[CapturedAttention], found: Sorted, batch: int, queries: int, source: int
) -> tuple[Tensor, Tensor, list[list[str]]]:
    """Mask, special tokens and names along the token axis."""

    def of(length: int, mask: Tensor | None, words: Any, special: Any, call: CapturedAttention | None) -> Any:
        pictured = given.grid is not None and call is not None
        if mask is None or mask.shape != (batch, length) or pictured:
            mask = torch.ones(batch, length, dtype=torch.bool)
            if call is not None and call.visible is not None:
                # A key that no query sees is padding.
                mask = mask & call.visible.any(dim=-2)
        if pictured and given.grid is not None:
            words, special = _patch_names(batch, length, given.grid)
        if words is None or len(words) != batch or any(len(one) != length for one in words):
            if given.extra.get("named") and call is not None:
                sizes = [len(one) for one in words or ()]
                raise ValueError(f"tokens must be {batch} lists of {length} words, got lists of {sizes}")
            words = [[str(number) for number in range(length)] for _ in range(batch)]
        if special is None or special.shape != (batch, length):
            special = torch.zeros(batch, length, dtype=torch.bool)
        return mask, special & mask, words

    if not source:
        first = calls[found.maps[0]]
        mask, special, words = of(queries, given.mask, given.tokens, given.special, first)
        return mask, special, words
    lowest = calls[found.encoder[0] if found.encoder else found.cross[0]]
    extra = given.extra
    before = of(source, given.mask, given.tokens, given.special, lowest)
    after = of(
        queries, extra.get("target mask"), extra.get("target tokens"), extra.get("target special"), None
    )
    words = [one + other for one, other in zip(before[2], after[2], strict=True)]
    return torch.cat([before[0], after[0]], dim=1), torch.cat([before[1], after[1]], dim=1), words


def _patch_names(batch: int, length: int, grid: tuple[int, int]) -> tuple[Any, Any]:
    """Patches by row and column; what comes before them is special."""
    before = length - grid[0] * grid[1]
    if before < 0:
        return None, None
    names = [["[CLS]", *(f"[{n}]" for n in range(1, before))][n] for n in range(before)]
    names += [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    special = torch.zeros(batch, length, dtype=torch.bool)
    special[:, :before] = True
    return [names] * batch, special
