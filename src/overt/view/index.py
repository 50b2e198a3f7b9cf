"""What the viewer knows of a trace at once, and the maps that it unpacks when they are looked at.

An entry of the index describes one example: its tokens, its groups of maps (the trace's own; of an
encoder–decoder also "encoder" and "cross"), where each layer's packed maps lie, importances, predictions, the
picture. `missing` says for what is not there why, and how to have it; `drowned`, where it is there, which
special token leaves the words pale.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from overt.tracing.capture import FUSED
from overt.tracing.levels import averaged
from overt.tracing.methods.method import Method, methods, request_of
from overt.tracing.options import Numbers, numbers
from overt.tracing.result import Trace
from overt.view.pack import pack

Queries = Numbers | Literal["auto", "all", "main"]
EVERY_SPREAD = 256  # tokens up to which there is a spread of every query's row
MOST_WORK = 5e11  # multiplications, about, that "auto" spends on passes of the model: seconds on two cores
SHOWN_CLASSES = 6
DROWNED = 0.2  # of what a special token has: words that have less share the palest fifth of the scale
DIGITS = 5  # of numbers in the index


@dataclass(frozen=True)
class PageContents:
    """What a page is asked to hold.

    Attributes:
        methods: names of those that read maps.
        named: whether these were asked for, so that what one of them cannot do is an error.
        running: names of those that run the model, and whether they have to be there (True) or only if they
            are quick and can be had ("auto").
        queries: for which there are rows.
        residual: None for what each trace's mixing implies.
        target: what methods that run the model explain.
        unk: the token that blanks out.
        mass: share of each row's sum that is kept.
        progress: whether to show a bar.
    """

    methods: tuple[str, ...]
    named: bool
    running: dict[str, bool | Literal["auto"]]
    queries: Queries
    residual: float | None
    target: Any
    unk: int | None
    mass: float
    progress: bool | None


class _Fields:
    """Packs maps as they come, and knows where they went."""

    def __init__(self, blocks: list[bytes], mass: float) -> None:
        self.blocks, self.mass = blocks, mass
        self.found: dict[str, list[dict[str, Any] | None]] = {}

    def add(self, name: str, layers: Iterable[Tensor | None]) -> None:
        """One (map, row, column) per layer, or None where a layer has none."""
        self.found[name] = [None if cells is None else self._packed(cells) for cells in layers]

    def add_maps(self, group: str, maps: Sequence[Tensor | None], suffix: str = "") -> None:
        """Maps of a batch of one: their mean over heads, and single heads where they were kept."""
        if not any(cells is not None for cells in maps):
            return
        means = (None if c is None else averaged(c, "mean") if c.dim() == 4 else c for c in maps)
        self.add(f"{group}{suffix or 'mean'}", means)
        if all(c is None or c.dim() == 4 for c in maps):
            name = f"{group}{suffix}{' ' if suffix else ''}heads"
            self.add(name, (None if c is None else c[0] for c in maps))

    def _packed(self, cells: Tensor) -> dict[str, Any]:
        about, data = pack(cells, self.mass)
        self.blocks.append(data)
        return {"at": len(self.blocks) - 1, **about}


def entry_of(
    trace: Trace, wanted: PageContents, blocks: list[bytes], number: int, examples: int
) -> dict[str, Any]:
    """One example's part of the index; its maps go to `blocks`."""
    real = trace.mask[0].nonzero().flatten()
    total, queries = trace.mask.shape[1], trace.maps[0].shape[-2]
    first = total - queries  # of the queries among the tokens
    source = real[real < first] if first else real[:0]
    own = real[real >= first] - first
    tokens = [trace.tokens[0][place] for place in real.tolist()]
    main = own.tolist().index(trace.main_queries()[0]) if trace.main_queries()[0] in own.tolist() else 0
    fields = _Fields(blocks, wanted.mass)

    def cut(cells: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
        return None if cells is None else cells[..., rows, :][..., columns]

    places = {"": (own, own), "encoder ": (source, source), "cross ": (own, source)}
    kept = {"": trace.maps, "encoder ": trace.encoder_maps, "cross ": trace.cross}
    spans = {"": (len(source), len(real)), "encoder ": (0, len(source)), "cross ": (0, len(source))}
    groups: dict[str, Any] = {}
    for group, maps in kept.items():
        if not maps:
            continue
        fields.add_maps(group, [cut(cells, *places[group]) for cells in maps])
        rows = (len(source), len(real)) if group == "cross " else spans[group]
        heads = maps[0].shape[1] if maps[0].dim() == 4 else 0
        groups[group.strip()] = {"layers": len(maps), "heads": heads, "rows": rows, "columns": spans[group]}
    for name, parts in trace.parts.items():
        group = next((one for one in ("encoder ", "cross ") if name.startswith(one)), "")
        if name.removeprefix(group) != FUSED:  # which the maps are
            cells = [cut(one, *places[group]) for one in parts]
            fields.add_maps(group, cells, f"part {name.removeprefix(group)}")
    levels = trace.levels()
    entry: dict[str, Any] = {
        "kind": trace.kind,
        "mixing": trace.mixing,
        "mixing_title": trace.mixing_kind.title,
        "joint": levels.joint,
        "unit": levels.unit,
        "signed": levels.signed,
        "single_heads": trace.mixing_kind.heads,
        "methods": [method_entry(method) for method in methods().values()],
        "tokens": [printable(token) for token in tokens],
        "special": trace.special[0, real].int().tolist(),
        "source": len(source),
        "layers": len(trace.maps),
        "heads": groups[""]["heads"],
        "groups": groups,
        "main": main,
        "averaged": trace.averaged,
        "residual": levels.residual if wanted.residual is None else wanted.residual,
        "missing": {},
        "queries": {},
    }
    packed = [layer for layers in fields.found.values() for layer in layers if layer is not None]
    whole = all("broken" not in layer for layer in packed)
    drawn = {"raw": trace.raw(own[[main]], layers=-1)[0, 0, 0, real]} if whole else {}  # what is shown first
    for name, method in methods("maps").items():
        missing: str | None
        if name == "raw":
            continue  # the maps are there
        if name not in wanted.methods:
            missing = f"{method.title} was not asked for: t.html(…, methods=[…, {name!r}])"
        elif not whole:
            missing = f"no {method.title}: the maps hold weights that are no numbers"
        else:
            missing = _add_method(trace, method, wanted, entry, fields, drawn, own, real, main)
        if missing is not None:
            entry["missing"][name] = missing
    if found := drowned(drawn, trace.special[0, real], len(source) + main):
        entry["drowned"] = short(found)
    _add_importances(trace, wanted, entry, own, real, main, number, examples)
    if trace.draws:
        _add_spread(trace, wanted, entry, fields, own, real, cut)
    _add_outputs(trace, entry)
    if trace.grid is not None:
        _add_picture(trace, entry)
    entry["fields"] = fields.found
    return entry


def method_entry(method: Method) -> dict[str, Any]:
    """What a viewer has to know of a method."""
    kept = {"name": method.name, "title": method.title, "reads": method.reads, "value": method.value}
    return {**kept, "paths": method.paths}


def _add_method(
    trace: Trace,
    method: Method,
    wanted: PageContents,
    entry: dict[str, Any],
    fields: _Fields,
    drawn: dict[str, Tensor],
    own: Tensor,
    real: Tensor,
    main: int,
) -> str | None:
    """A method's rows of the wanted queries, (query, token) for each layer; or why there are none.

    The main one's at the last layer goes to `drawn` too.
    """
    quick, possible = method.cost.every, method.cost.most
    if isinstance(wanted.queries, str):
        every = wanted.queries == "all"
        every |= wanted.queries == "auto" and (quick is None or len(real) <= quick)
        rows = list(range(len(own))) if every else [main]
        if wanted.queries == "auto" and possible is not None and len(real) > possible:
            left = f"{method.title} over {len(real)} tokens takes long and was left out"
            return f'{left}: t.html(…, queries="main") has it'
    else:
        rows = numbers("queries", wanted.queries, len(own))
    given = method.fitting({"residual": wanted.residual, "progress": wanted.progress})
    request_of(trace.levels(), method.options_of({**given, "queries": own[rows]}))  # what is asked can be
    try:
        found = trace.read(method.name, own[rows], **given)[0]
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        if wanted.named:
            raise
        return f"no {method.title}: {(str(error).splitlines() or ['it failed'])[0]}"
    fields.add(method.name, (layer[:, real].unsqueeze(0) for layer in found))
    if rows != list(range(len(own))):
        entry["queries"][method.name] = rows
    if main in rows:
        drawn[method.name] = found[-1, rows.index(main), real]
    return None


def drowned(rows: dict[str, Tensor], special: Tensor, query: int) -> dict[str, Any] | None:
    """Where a special token drowns the words, so that strip and graph start with the words' scale; else None.

    It does where by one of the methods no word, the query itself apart, has a `DROWNED` share of what it has.
    Words that have nothing are not drowned: no scale would show them.

    Args:
        rows: what a query draws on by each method, at one layer, (token,).
        special: boolean (token,).
        query: its place among the tokens.

    Returns:
        The method by which it does so most, the token's number, what it has, and what a word has at most.
    """
    words = ~special
    words[query] = False
    if not special.any() or not words.any():
        return None
    found: list[dict[str, Any]] = []
    for method, row in rows.items():
        sizes = row.abs()
        token = int(torch.where(special, sizes, -1.0).argmax())
        above, word = float(sizes[token]), float(sizes[words].max())
        if 0 < word < DROWNED * above:
            found.append({"method": method, "token": token, "special": above, "word": word})
    return min(found, key=lambda one: one["word"] / one["special"], default=None)


def _add_importances(
    trace: Trace,
    wanted: PageContents,
    entry: dict[str, Any],
    own: Tensor,
    real: Tensor,
    main: int,
    number: int,
    examples: int,
) -> None:
    entry["importances"] = []
    for name, method in methods("model").items():
        asked = wanted.running.get(name)
        missing = trace.why_not(method)
        if missing is None and asked is None:
            missing = f"{method.title} ({method.cost.words}) was not asked for: t.html(…, importances=True)"
        elif missing is None and asked == "auto" and _work(trace, method, len(real)) > MOST_WORK:
            missing = f"{method.title} of {len(real)} tokens takes long: t.html(…, importances=True) has it"
        if missing is None:
            # A model with one output for all tokens answers with one row, however many are asked for: hence
            # two.
            rows = list(range(len(own)))
            if method.cost.every is not None and len(real) > method.cost.every:
                rows = [main, *(one for one in rows[:2] if one != main)][:2]
            target = _one_target(wanted.target, number, examples)
            given = method.fitting({"target": target, "unk": wanted.unk})
            try:
                found = trace.read(name, own[rows], **given)[0, 0]
            except (ValueError, RuntimeError) as error:  # torch's own, of models whose inputs are no tokens
                missing = f"no {method.title}: {(str(error).splitlines() or [type(error).__name__])[0]}"
                if asked is True or wanted.target is not None:
                    raise
            else:
                single = found.shape[0] == 1
                one = {"method": name, "title": method.title, "values": short(found[:, real].tolist())}
                explained = {"target": _explained(trace, target, single)}
                entry["importances"].append({**one, **explained, "queries": None if single else rows})
        if missing is not None:
            entry["missing"][name] = missing


def _work(trace: Trace, method: Method, tokens: int) -> float:
    """Multiplications that a method's passes of the model take, about."""
    if trace.subject is None:
        return 0.0
    return method.cost.passes * float(
        tokens**2 * sum(parameter.numel() for parameter in trace.subject.model.parameters())
    )


def _explained(trace: Trace, target: Any, single: bool) -> str:
    """What importances are of, in words."""
    if single and trace.outputs is not None and trace.subject is not None:
        chosen = int(trace.subject.target(trace.outputs.unsqueeze(1), target, [0])[0, 0])
        named = trace.labels[chosen] if trace.labels else trace.words.get(chosen, str(chosen))
        return f"“{printable(named)}”"
    if target is not None:
        return "the target"
    return "the prediction" if trace.kind == "encoder" else "the next token"


def _one_target(target: Any, number: int, examples: int) -> Any:
    """The target of one example, where there is one for each."""
    if isinstance(target, Tensor) and target.dim() and target.shape[0] == examples:
        return target[number : number + 1]
    if isinstance(target, list | tuple) and len(target) == examples:
        return [target[number]]
    return target


def _add_spread(
    trace: Trace,
    wanted: PageContents,
    entry: dict[str, Any],
    fields: _Fields,
    own: Tensor,
    real: Tensor,
    cut: Any,
) -> None:
    """Mean and spread over posterior samples: of each weight, and of what each token's rollout draws on."""
    entry["samples"] = len(trace.draws)
    single, layers = trace.maps[0].dim() == 4, range(len(trace.maps))

    def drawn(layer: int, each: bool) -> Tensor:
        """(sample, head or 1, query, key), of single heads or of their mean."""
        found = torch.stack([draw.maps[layer].flatten(0, -3) for draw in trace.draws]).double()  # one example
        cells: Tensor = cut(found if each else found.mean(dim=1, keepdim=True), own, own)
        return cells

    for suffix, each in (("", False), (" heads", True)) if single else (("", False),):
        fields.add(f"average{suffix}", (drawn(layer, each).mean(dim=0) for layer in layers))
        fields.add(f"spread{suffix}", (drawn(layer, each).std(dim=0, correction=0) for layer in layers))
    if "rollout" in wanted.methods:
        every = len(real) <= EVERY_SPREAD
        rows = list(range(len(own))) if every else [entry["main"]]
        found = trace.spread("rollout", own[rows], residual=wanted.residual)
        for name, values in (("rollout average", found.mean), ("rollout spread", found.spread)):
            fields.add(name, (layer[:, real].unsqueeze(0) for layer in values[0]))
            if not every:
                entry["queries"][name] = rows


def _add_outputs(trace: Trace, entry: dict[str, Any]) -> None:
    """The likeliest classes, with every sample's probabilities where there are samples."""
    if trace.outputs is None:
        return
    found = trace.predictions(SHOWN_CLASSES)[0]
    entry["outputs"] = {
        "labels": [printable(label) for label in found.labels],
        "mean": short(found.mean.tolist()),
        "draws": None if found.draws is None else short(found.draws.tolist()),
    }


def _add_picture(trace: Trace, entry: dict[str, Any]) -> None:
    entry["grid"], entry["image"] = trace.grid, trace.image
    if trace.picture is not None:
        coded = base64.b64encode(_png(trace.picture[0])).decode()
        entry["picture"] = f"data:image/png;base64,{coded}"


def _png(picture: Tensor) -> bytes:
    """An (height, width, 3) picture as a PNG file."""
    height, width, _ = picture.shape
    rows = picture.to(torch.uint8).reshape(height, 3 * width)
    plain = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), rows], dim=1).numpy().tobytes()

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(plain, 9)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def label_of(trace: Trace) -> str:
    """The first words of an example, or its patches."""
    if trace.grid is not None:
        return f"image, {trace.grid[0]} × {trace.grid[1]} patches"
    words: list[str] = []
    length = 0
    for token, special, real in zip(trace.tokens[0], trace.special[0], trace.mask[0], strict=True):
        if not real or special:
            continue
        piece = printable(token)[:40]
        glued = piece.startswith("##") and bool(words)
        words.append(piece[2:] if glued else piece if not words else f" {piece}")
        length += len(words[-1])
        if length > 40:
            words.append(" …")
            break
    return "".join(words) or trace.kind


def printable(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates become the sign for what cannot be shown."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def short(value: Any) -> Any:
    """Numbers with a few digits that count; what is no number becomes None."""
    if isinstance(value, dict):
        return {key: short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [short(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if value == value and abs(value) != float("inf") else None
    return printable(value) if isinstance(value, str) else value
