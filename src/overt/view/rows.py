"""The index of a trace without maps: rows of some queries at every layer, in place of maps.

The size of such a page grows with the number of tokens, not with its square. Weights take one byte each, as
in `overt.view.pack`, or two if there are few; none are left out unless `mass` is below one, or rows are those
of many generated words: then the largest weights of each are kept, and the page says what it left out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from overt.tracing.generation import UNFINISHED
from overt.tracing.kept_rows import METHODS
from overt.tracing.levels import HeldMaps
from overt.tracing.methods.method import Method, methods
from overt.tracing.options import numbers
from overt.tracing.result import Trace
from overt.view.index import (
    Fields,
    PageContents,
    add_importances,
    add_outputs,
    add_picture,
    drowned,
    method_entry,
    printable,
    short,
)

FEW = 1_000_000  # values of a trace that take two bytes each; those of single heads take one
MOST_HEADS = 3_000_000  # values of a trace up to which rows of single heads are included
MOST_KEPT = 1_500_000  # weights of all rows of generated words in a trace; of more, the largest are kept
LEAST_KEPT = 64  # weights of each row, however many rows there are
GLUED, SPACED, BROKEN = "012"  # what comes before a token


def rows_entry(
    trace: Trace, contents: PageContents, blocks: list[bytes], number: int, examples: int
) -> dict[str, Any]:
    """One example's part of the index; its rows go to `blocks`."""
    real = trace.mask[0].nonzero().flatten()
    first = trace.first  # of the queries among the tokens
    source = int((real < first).sum())
    positions = real[real >= first] - first
    main, rows = _queries(trace, contents, positions.tolist())
    readers = [methods()[name] for name in METHODS]
    if contents.named:
        readers += [methods()[name] for name in contents.methods if name not in METHODS]
    missing = _missing(trace, contents, readers)
    readers = [method for method in readers if method.name not in missing]
    found = {
        method.name: trace.read(method.name, positions[rows], **_arguments(method, contents))[0][..., real]
        for method in readers
    }  # by method, (layer, query, token)
    heads = _heads(trace, found, missing)
    fields = Fields(blocks, contents.mass, _most(trace, found))
    width = 2 if sum(values.numel() for values in found.values()) <= FEW else 1
    for name, values in found.items():
        fields.add(name, (layer.unsqueeze(0) for layer in values), width)
    if heads:
        single = trace.raw(positions[rows], heads="each")[0][..., real]
        fields.add("raw heads", iter(single), 1)
    aside = trace.special[0, real].clone()
    aside[0] |= not source
    place = source + main
    begins = {name: values[-1, rows.index(main)] for name, values in found.items()}  # what is shown first
    if trace.generated is not None:
        begins["raw"] = found["raw"][:, rows.index(main)].mean(dim=0)
    pale = drowned(begins, aside, place)
    spans = {"rows": (source, len(real)), "columns": (0, len(real))}
    entry: dict[str, Any] = {
        "kind": trace.kind,
        "mixing": trace.mixing,
        "mixing_title": trace.mixing_kind.title,
        "methods": [method_entry(method) for method in methods().values()],
        "tokens": [printable(name) for name in _names(trace, real)],
        "special": trace.special[0, real].int().tolist(),
        "source": source,
        "layers": trace.layers,
        "heads": heads,
        "groups": {"": {"layers": trace.layers, "heads": heads, **spans}},
        "main": main,
        "rows": {"queries": rows, "before": _before(trace, real, source), **_written(trace, real)},
        "missing": missing,
        "queries": dict.fromkeys(found, rows),
    }
    if pale is not None:
        averaged = trace.generated is not None and pale["method"] == "raw"
        entry["drowned"] = short({**pale, "averaged": averaged})
    add_importances(trace, contents, entry, positions, real, main, number, examples)
    add_outputs(trace, entry)
    if trace.grid is not None:
        add_picture(trace, entry)
    entry["fields"] = fields.layers_of
    return entry


def _most(trace: Trace, found: dict[str, Tensor]) -> int | None:
    """How many weights of a row the page keeps at most; None for all."""
    count = sum(values.numel() for values in found.values())
    if trace.generated is None or count <= MOST_KEPT:
        return None
    rows = sum(values.shape[:-1].numel() for values in found.values())
    return max(LEAST_KEPT, MOST_KEPT // rows)


def _written(trace: Trace, real: Tensor) -> dict[str, Any]:
    """Where the output is among an example's tokens, and its turns, if it has any."""
    about: dict[str, Any] = {}
    if trace.generated is not None:
        places = trace.generated[0, real].nonzero().flatten().tolist()
        about["generated"] = [places[0], places[-1] + 1] if places else [len(real), len(real)]
    if trace.turns:
        ends = [(real < place).sum().item() for turn in trace.turns[0] for place in turn[1:]]
        roles = [printable(turn.role) for turn in trace.turns[0]]
        about["turns"] = [[role, *ends[2 * i : 2 * i + 2]] for i, role in enumerate(roles)]
    return about


def _writing(trace: Trace, positions: list[int]) -> list[int]:
    """The queries that wrote the output of the first example, as numbers among its queries."""
    if trace.generated is None:
        return []
    written = (trace.generated[0, trace.first + 1 :]).nonzero().flatten().tolist()
    return [positions.index(query) for query in written]


def _queries(trace: Trace, contents: PageContents, positions: list[int]) -> tuple[int, list[int]]:
    """The main query, and all whose rows the page has, as numbers among an example's queries."""
    wanted = contents.queries
    found = trace.main_queries()[0]
    main = positions.index(found) if found in positions else 0
    writing = _writing(trace, positions)
    main = writing[0] if writing else main  # a page begins with the first word that was written
    if trace.rows is None:
        if isinstance(wanted, str):
            few = writing if writing and wanted == "auto" else [main]
            return main, list(range(len(positions))) if wanted == "all" else few
        rows = numbers("queries", wanted, len(positions))
    else:
        kept = [positions.index(query) for query in trace.rows.queries if query in positions]
        rows = kept if isinstance(wanted, str) else numbers("queries", wanted, len(positions))
        if wanted == "main":
            rows = [main]
        if not kept or not set(rows) <= set(kept) or (wanted == "all" and len(kept) < len(positions)):
            some = ", ".join(map(str, kept[:8])) + (", …" if len(kept) > 8 else "")
            raise ValueError(
                f"queries must be among those whose rows this trace was saved with, {some or 'none'}, got "
                f'{wanted!r}: "auto" has these'
            )
    rows = list(dict.fromkeys(rows))
    return main if main in rows else rows[0], rows


def _arguments(method: Method, contents: PageContents) -> dict[str, Any]:
    given = method.fitting({"residual": contents.residual, "progress": contents.progress})
    return {name: value for name, value in given.items() if value is not None}


def _missing(trace: Trace, contents: PageContents, readers: list[Method]) -> dict[str, str]:
    """Methods that the page does not have, and why."""
    missing = {}
    for name, method in methods("maps").items():
        if (reason := trace.why_not(method)) is not None:
            if contents.named and name in contents.methods:
                raise ValueError(reason)
            missing[name] = reason
        elif contents.named and name not in contents.methods and name != "raw":
            missing[name] = f"{method.title} was not requested: t.html(…, methods=[…, {name!r}])"
        elif method not in readers:
            missing[name] = (
                f"{method.title} was left out, as this trace keeps no maps: t.html(…, methods=[…, {name!r}]) "
                "includes it if it fits memory=…"
            )
    return missing


def _heads(trace: Trace, found: dict[str, Tensor], missing: dict[str, str]) -> int:
    """How many heads have raw rows of their own on the page."""
    if isinstance(trace.maps, HeldMaps):
        heads = int(trace.maps.held[0].shape[1]) if trace.maps.heads else 0
    else:  # generated text, or none at all
        heads = trace.maps[0].shape[1] if trace.maps and trace.maps[0].dim() == 4 else 0
    if not heads:
        return 0
    single = heads * found["raw"].numel()
    count = sum(values.numel() for values in found.values()) + single
    if count <= MOST_HEADS and (trace.memory is None or 8 * single <= trace.memory):
        return heads
    missing["heads"] = f"rows of single heads were left out: with them the page has {count:,} weights"
    return 0


def _names(trace: Trace, real: Tensor) -> list[str]:
    """Names of tokens. Of the pieces of one character, the first has it, and the others have nothing.

    By themselves such pieces are bytes that no reader knows: in some scripts, most of a text is of them.
    """
    names = [trace.tokens[0][place] for place in real.tolist()]
    if not trace.texts or trace.offsets is None or len(trace.offsets[0]) != len(trace.mask[0]):
        return names
    text, end = trace.texts[0], 0
    for place, (start, stop) in enumerate(trace.offsets[0, real].tolist()):
        if UNFINISHED in names[place] and stop > start:
            names[place] = text[max(start, end) : stop].strip()
        end = max(end, stop)
    return names


def _before(trace: Trace, real: Tensor, source: int) -> str:
    """What comes before each token, one sign each: nothing, a space, or the end of a line.

    Names of tokens have no spaces, so offsets tell, together with the text where the trace still has it.
    Without offsets, only a word piece ("##s") is known to continue a word.
    """
    names = [trace.tokens[0][place] for place in real.tolist()]
    signs = [GLUED if name.startswith("##") and len(name) > 2 else SPACED for name in names]
    if trace.offsets is not None and bool(trace.offsets[0].any()):
        spans = trace.offsets[0, real].tolist() if len(trace.offsets[0]) == len(trace.mask[0]) else []
        text = trace.texts[0] if trace.texts else None
        begun, end, loose = 0, 0, ""  # white space at the end of the token before
        for place, (name, (start, stop)) in enumerate(zip(names, spans, strict=False)):
            if start == stop:
                loose = " "  # a special token
                continue
            if begun <= start < end:  # a piece of the same character
                signs[place], end = GLUED, max(end, stop)
                continue
            begun = start
            between = loose + (" " * max(0, start - end) if text is None else text[end:start])
            if text is None:
                loose = ""
                between += " " * (stop - start > len(name) and not name.startswith("##"))
            else:
                inside = text[start:stop]
                core = inside.strip()
                if core:
                    between += inside[: inside.index(core[0])]
                    loose = inside[len(inside.rstrip()) :]
                else:
                    loose = ""
            blank = SPACED if between else GLUED
            signs[place] = BROKEN if "\n" in between else blank
            end = max(end, stop)
    if 0 < source < len(signs):
        signs[source] = BROKEN
        if source + 1 < len(signs) and signs[source + 1] == BROKEN:
            signs[source + 1] = SPACED  # what was generated follows the token that it starts with
    return "".join(signs)
