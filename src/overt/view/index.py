"""The index of a trace, which the viewer loads first, and the maps that it unpacks when they are viewed.

An entry of the index describes one example: its tokens, its groups of maps (the trace's own; of an
encoder–decoder also "encoder" and "cross"), where each layer's packed maps are, importances, predictions, the
picture. `missing` says why something is absent, and how to include it; `drowned`, if present, which special
token leaves the words pale.
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
EVERY_SPREAD = 256  # tokens up to which every query's row has a spread
MOST_WORK = 5e11  # multiplications, roughly, that "auto" spends on passes of the model: seconds on two cores
SHOWN_CLASSES = 6
DROWNED = 0.2  # of a special token's value: words with less share the palest fifth of the scale
DIGITS = 5  # of numbers in the index


@dataclass(frozen=True)
class PageContents:
    """What a page should contain.

    Attributes:
        methods: names of the methods that read maps.
        named: whether the caller named these, so that a failure of one of them is an error.
        running: names of the methods that run the model, and whether they are required (True) or included
            only if they are quick and possible ("auto").
        queries: the queries to compute rows for.
        residual: None for the default of each trace's mixing.
        target: what methods that run the model explain.
        unk: id of the replacement token.
        mass: share of each row's sum that is kept.
        progress: whether to show a progress bar.
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


class Fields:
    """Packs maps, and records where they are."""

    def __init__(self, blocks: list[bytes], mass: float, most: int | None = None) -> None:
        self.blocks, self.mass, self.most = blocks, mass, most
        self.layers_of: dict[str, list[dict[str, Any] | None]] = {}

    def add(self, name: str, layers: Iterable[Tensor | None], width: int | None = None) -> None:
        """One (map, row, column) per layer, or None where a layer has none.

        Args:
            name: of the field.
            layers: its maps.
            width: bytes of a weight; by default as each layer's size says.
        """
        self.layers_of[name] = [None if cells is None else self._pack(cells, width) for cells in layers]

    def add_maps(self, group: str, maps: Sequence[Tensor | None], suffix: str = "") -> None:
        """Maps of a batch of one: their mean over heads, and single heads if they were kept."""
        if not any(cells is not None for cells in maps):
            return
        means = (None if c is None else averaged(c, "mean") if c.dim() == 4 else c for c in maps)
        self.add(f"{group}{suffix or 'mean'}", means)
        if all(c is None or c.dim() == 4 for c in maps):
            name = f"{group}{suffix}{' ' if suffix else ''}heads"
            self.add(name, (None if c is None else c[0] for c in maps))

    def _pack(self, cells: Tensor, width: int | None) -> dict[str, Any]:
        about, data = pack(cells, self.mass, width, self.most)
        self.blocks.append(data)
        return {"at": len(self.blocks) - 1, **about}


def entry_of(
    trace: Trace, contents: PageContents, blocks: list[bytes], number: int, examples: int
) -> dict[str, Any]:
    """One example's part of the index; its maps go to `blocks`."""
    real = trace.mask[0].nonzero().flatten()
    first = trace.first  # of the queries among the tokens
    source = real[real < first] if first else real[:0]
    positions = real[real >= first] - first
    tokens = [trace.tokens[0][place] for place in real.tolist()]
    main_query = trace.main_queries()[0]
    main = positions.tolist().index(main_query) if main_query in positions.tolist() else 0
    fields = Fields(blocks, contents.mass)

    def cut(cells: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
        return None if cells is None else cells[..., rows, :][..., columns]

    places = {"": (positions, positions), "encoder ": (source, source), "cross ": (positions, source)}
    maps_of = {"": trace.maps, "encoder ": trace.encoder_maps, "cross ": trace.cross}
    spans = {"": (len(source), len(real)), "encoder ": (0, len(source)), "cross ": (0, len(source))}
    groups: dict[str, Any] = {}
    for group, maps in maps_of.items():
        if not maps:
            continue
        fields.add_maps(group, [cut(cells, *places[group]) for cells in maps])
        rows = (len(source), len(real)) if group == "cross " else spans[group]
        heads = maps[0].shape[1] if maps[0].dim() == 4 else 0
        groups[group.strip()] = {"layers": len(maps), "heads": heads, "rows": rows, "columns": spans[group]}
    for name, parts in trace.parts.items():
        group = next((prefix for prefix in ("encoder ", "cross ") if name.startswith(prefix)), "")
        if name.removeprefix(group) != FUSED:  # the maps themselves
            cells = [cut(part, *places[group]) for part in parts]
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
        "layers": trace.layers,
        "heads": next(iter(groups.values()))["heads"],
        "groups": groups,
        "main": main,
        "averaged": trace.averaged,
        "residual": levels.residual if contents.residual is None else contents.residual,
        "missing": {},
        "queries": {},
    }
    packed = [layer for layers in fields.layers_of.values() for layer in layers if layer is not None]
    whole = all("broken" not in layer for layer in packed)
    # What is shown first.
    first_rows = {"raw": trace.raw(positions[[main]], layers=-1)[0, 0, 0, real]} if whole else {}
    for name, method in methods("maps").items():
        missing: str | None
        if name == "raw":
            continue  # included with the maps
        if name not in contents.methods:
            unasked = f"{method.title} was not requested: t.html(…, methods=[…, {name!r}])"
            missing = trace.why_not(method) or unasked
        elif not contents.named and (reason := trace.why_not(method)) is not None:
            missing = reason  # another trace of the page has it
        elif not whole:
            missing = f"no {method.title}: the maps contain NaN or infinite weights"
        else:
            missing = _add_method(trace, method, contents, entry, fields, first_rows, positions, real, main)
        if missing is not None:
            entry["missing"][name] = missing
    if pale := drowned(first_rows, trace.special[0, real], len(source) + main):
        entry["drowned"] = short(pale)
    add_importances(trace, contents, entry, positions, real, main, number, examples)
    if trace.draws:
        columns = positions if trace.maps else source
        _add_spread(trace, contents, entry, fields, positions, columns, real, cut)
    add_outputs(trace, entry)
    if trace.grid is not None:
        add_picture(trace, entry)
    entry["fields"] = fields.layers_of
    return entry


def method_entry(method: Method) -> dict[str, Any]:
    """What the viewer needs to know about a method."""
    entry = {"name": method.name, "title": method.title, "reads": method.reads, "value": method.value}
    return {**entry, "paths": method.paths}


def _add_method(
    trace: Trace,
    method: Method,
    contents: PageContents,
    entry: dict[str, Any],
    fields: Fields,
    first_rows: dict[str, Tensor],
    positions: Tensor,
    real: Tensor,
    main: int,
) -> str | None:
    """Add a method's rows for the requested queries, (query, token) per layer; or return why there are none.

    The main query's row at the last layer also goes to `first_rows`.
    """
    quick, possible = method.cost.every, method.cost.most
    if isinstance(contents.queries, str):
        every = contents.queries == "all"
        every |= contents.queries == "auto" and (quick is None or len(real) <= quick)
        rows = list(range(len(positions))) if every else [main]
        if contents.queries == "auto" and possible is not None and len(real) > possible:
            left = f"{method.title} over {len(real)} tokens is slow and was left out"
            return f'{left}: t.html(…, queries="main") includes it'
    else:
        rows = numbers("queries", contents.queries, len(positions))
    options = method.fitting({"residual": contents.residual, "progress": contents.progress})
    # Raises if the arguments are wrong.
    request_of(trace.levels(), method.options_of({**options, "queries": positions[rows]}))
    try:
        values = trace.read(method.name, positions[rows], **options)[0]
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        if contents.named:
            raise
        return f"no {method.title}: {(str(error).splitlines() or ['it failed'])[0]}"
    fields.add(method.name, (layer[:, real].unsqueeze(0) for layer in values))
    if rows != list(range(len(positions))):
        entry["queries"][method.name] = rows
    if main in rows:
        first_rows[method.name] = values[-1, rows.index(main), real]
    return None


def drowned(rows: dict[str, Tensor], special: Tensor, query: int) -> dict[str, Any] | None:
    """Whether a special token drowns out the words, so that strip and graph start with the words' scale.

    It does if, by one of the methods, no word other than the query reaches a `DROWNED` share of its value.
    Words with value zero are not drowned out: no scale would show them.

    Args:
        rows: what a query draws on by each method, at one layer, (token,).
        special: boolean (token,).
        query: its place among the tokens.

    Returns:
        The method with the strongest effect, the token's number, its value, and the largest value of a word;
        None if no words are drowned out.
    """
    words = ~special
    words[query] = False
    if not special.any() or not words.any():
        return None
    cases: list[dict[str, Any]] = []
    for method, row in rows.items():
        sizes = row.abs()
        token = int(torch.where(special, sizes, -1.0).argmax())
        above, word = float(sizes[token]), float(sizes[words].max())
        if 0 < word < DROWNED * above:
            cases.append({"method": method, "token": token, "special": above, "word": word})
    return min(cases, key=lambda case: case["word"] / case["special"], default=None)


def add_importances(
    trace: Trace,
    contents: PageContents,
    entry: dict[str, Any],
    positions: Tensor,
    real: Tensor,
    main: int,
    number: int,
    examples: int,
) -> None:
    """Add what methods that run the model say of each token, or why there is nothing."""
    entry["importances"] = []
    for name, method in methods("model").items():
        requested = contents.running.get(name)
        missing = trace.why_not(method)
        if missing is None and requested is None:
            missing = f"{method.title} ({method.cost.words}) was not requested: t.html(…, importances=True)"
        elif missing is None and requested == "auto" and _work(trace, method, len(real)) > MOST_WORK:
            missing = f"{method.title} of {len(real)} tokens is slow: t.html(…, importances=True) includes it"
        if missing is None:
            # A model with one output for all tokens returns one row, however many are requested: request two
            # to tell.
            rows = list(range(len(positions)))
            if method.cost.every is not None and len(real) > method.cost.every:
                rows = [main, *(row for row in rows[:2] if row != main)][:2]
            target = _one_target(contents.target, number, examples)
            options = method.fitting({"target": target, "unk": contents.unk})
            try:
                values = trace.read(name, positions[rows], **options)[0, 0]
            except (ValueError, RuntimeError) as error:  # torch's, for models whose inputs are not tokens
                missing = f"no {method.title}: {(str(error).splitlines() or [type(error).__name__])[0]}"
                if requested is True or contents.target is not None:
                    raise
            else:
                single = values.shape[0] == 1
                importance = {
                    "method": name,
                    "title": method.title,
                    "values": short(values[:, real].tolist()),
                }
                explained = {"target": _explained(trace, target, single)}
                entry["importances"].append({**importance, **explained, "queries": None if single else rows})
        if missing is not None:
            entry["missing"][name] = missing


def _work(trace: Trace, method: Method, tokens: int) -> float:
    """Approximate multiplications in a method's passes of the model."""
    if trace.subject is None:
        return 0.0
    return method.cost.passes * float(
        tokens**2 * sum(parameter.numel() for parameter in trace.subject.model.parameters())
    )


def _explained(trace: Trace, target: Any, single: bool) -> str:
    """What importances explain, in words."""
    if single and trace.outputs is not None and trace.subject is not None:
        chosen = int(trace.subject.target(trace.outputs.unsqueeze(1), target, [0])[0, 0])
        label = trace.labels[chosen] if trace.labels else trace.words.get(chosen, str(chosen))
        return f"“{printable(label)}”"
    if target is not None:
        return "the target"
    return "the prediction" if trace.kind == "encoder" else "the next token"


def _one_target(target: Any, number: int, examples: int) -> Any:
    """The target of one example, if there is one for each."""
    if isinstance(target, Tensor) and target.dim() and target.shape[0] == examples:
        return target[number : number + 1]
    if isinstance(target, list | tuple) and len(target) == examples:
        return [target[number]]
    return target


def _add_spread(
    trace: Trace,
    contents: PageContents,
    entry: dict[str, Any],
    fields: Fields,
    positions: Tensor,
    columns: Tensor,
    real: Tensor,
    cut: Any,
) -> None:
    """Mean and spread over posterior samples: of each weight, and of what each token's rollout draws on.

    The weights are those of the trace's own maps, or of a recurrent decoder's cross-attention.
    """
    entry["samples"] = len(trace.draws)
    single, layers = (trace.maps or trace.cross)[0].dim() == 4, range(trace.layers)

    def drawn(layer: int, each: bool) -> Tensor:
        """(sample, head or 1, query, key), of single heads or of their mean."""
        drawn_maps = [(draw.maps or draw.cross)[layer] for draw in trace.draws]  # of one example
        maps = torch.stack([cells.flatten(0, -3) for cells in drawn_maps]).double()
        cells: Tensor = cut(maps if each else maps.mean(dim=1, keepdim=True), positions, columns)
        return cells

    for suffix, each in (("", False), (" heads", True)) if single else (("", False),):
        fields.add(f"average{suffix}", (drawn(layer, each).mean(dim=0) for layer in layers))
        fields.add(f"spread{suffix}", (drawn(layer, each).std(dim=0, correction=0) for layer in layers))
    if "rollout" in contents.methods and trace.why_not("rollout") is None:
        every = len(real) <= EVERY_SPREAD
        rows = list(range(len(positions))) if every else [entry["main"]]
        spread = trace.spread("rollout", positions[rows], residual=contents.residual)
        for name, values in (("rollout average", spread.mean), ("rollout spread", spread.spread)):
            fields.add(name, (layer[:, real].unsqueeze(0) for layer in values[0]))
            if not every:
                entry["queries"][name] = rows


def add_outputs(trace: Trace, entry: dict[str, Any]) -> None:
    """Add the likeliest classes, with the probabilities of any posterior samples."""
    if trace.outputs is None:
        return
    predictions = trace.predictions(SHOWN_CLASSES)[0]
    entry["outputs"] = {
        "labels": [printable(label) for label in predictions.labels],
        "mean": short(predictions.mean.tolist()),
        "draws": None if predictions.draws is None else short(predictions.draws.tolist()),
    }


def add_picture(trace: Trace, entry: dict[str, Any]) -> None:
    """Add an image and the grid of its patches."""
    entry["grid"], entry["image"] = trace.grid, trace.image
    if trace.picture is not None:
        entry["picture"] = picture_link(trace.picture[0])


def picture_link(picture: Tensor) -> str:
    """A picture, bytes of shape (height, width, 3), as a link that holds it."""
    return f"data:image/png;base64,{base64.b64encode(_png(picture)).decode()}"


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
        cells = "pixels" if trace.kind == "pixels" else "patches"
        return f"image, {trace.grid[0]} × {trace.grid[1]} {cells}"
    if trace.texts and any("\ufffd" in token for token in trace.tokens[0]):  # pieces of characters
        text = " ".join(printable(trace.texts[0]).split())
        return text if len(text) <= 40 else f"{text[:40]} …"
    words: list[str] = []
    length = 0
    for token, special, real in zip(trace.tokens[0], trace.special[0], trace.mask[0], strict=True):
        if not real or special or not token.strip("ĠĊ▁ \n"):
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
    """Text that UTF-8 can encode: lone surrogates become the replacement character."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def short(value: Any) -> Any:
    """Numbers rounded to a few significant digits; NaN and infinities become None."""
    if isinstance(value, dict):
        return {key: short(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [short(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if value == value and abs(value) != float("inf") else None
    return printable(value) if isinstance(value, str) else value
