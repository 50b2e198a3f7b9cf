"""Traces in files: tensors and metadata in one safetensors file, written atomically.

Format 2 of token traces records in which layers each part exists. Format 1 omitted the map in use from the
parts, and its maps under posterior samples are the samples' mean; files of format 1 are read as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from overt import _check
from overt._files import check_folder, written_whole
from overt.tracing.capture import FUSED

T = TypeVar("T")
TRACE = "2"
TRACES = ("1", "2")
ROWS = "rows 1"  # a trace of states, of which rows are written
GROUPS = {"": "maps", "encoder ": "encoder_maps", "cross ": "cross"}  # prefixes of parts


def write(path: str | Path, tensors: Mapping[str, Tensor], about: dict[str, Any], form: str) -> None:
    """Write tensors and JSON metadata, with the name of their format."""
    from safetensors.torch import save_file

    with written_whole(check_folder("path", path)) as part:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            part,
            {"format": form, "overt": json.dumps(about)},
        )


def read(
    path: str | Path,
    forms: Sequence[str],
    what: str,
    make: Callable[[dict[str, Tensor], dict[str, Any], str], T],
) -> T:
    """Read a file that `write` wrote, and pass its contents to `make`; a one-line error for any other file.

    Args:
        path: of the file.
        forms: names of the accepted formats.
        what: the kind of trace, for errors.
        make: takes tensors, metadata and the format; an error that it raises means that the file is broken.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no trace at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    form = metadata.get("format", "")
    if form not in forms or "overt" not in metadata:
        raise ValueError(f"{path} holds no {what} that this version of overt can read")
    try:
        return make(tensors, json.loads(metadata["overt"]), form)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} holds a broken trace ({type(error).__name__}: {error})") from None


def pack(trace: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A `Trace` as tensors and metadata."""
    tensors: dict[str, Tensor] = {"mask": trace.mask, "special": trace.special}
    single = {name: getattr(trace, name) for name in ("offsets", "picture", "outputs", "generated")}
    single |= {f"draws.{number}.outputs": drawn.outputs for number, drawn in enumerate(trace.draws)}
    tensors |= {name: value for name, value in single.items() if value is not None}
    groups: dict[str, Sequence[Tensor]] = {name: getattr(trace, name) for name in GROUPS.values()}
    for number, drawn in enumerate(trace.draws):
        groups |= {f"draws.{number}.{name}": getattr(drawn, name) for name in GROUPS.values()}
    for name, group in groups.items():
        tensors |= {f"{name}.{i}": cells for i, cells in enumerate(group)}
    places: dict[str, list[str]] = {}
    for name, parts in trace.parts.items():
        own_maps = groups[GROUPS[_prefix(name)]]
        places[name] = [_place(name, cells, own_maps[i]) for i, cells in enumerate(parts)]
        tensors |= {
            f"parts.{name}.{i}": cells
            for i, cells in enumerate(parts)
            if cells is not None and places[name][i] == "here"
        }
    masks: list[Tensor] = []  # layers share masks, which are written once
    seen: list[int | None] = []
    for mask in trace.visible:
        if mask is not None and not any(mask is other for other in masks):
            masks.append(mask)
        seen.append(None if mask is None else next(i for i, m in enumerate(masks) if m is mask))
    tensors |= {f"visible.{i}": mask for i, mask in enumerate(masks)}
    about = {
        "kind": trace.kind,
        "mixing": trace.mixing,
        "tokens": trace.tokens,
        "grid": trace.grid,
        "image": trace.image,
        "paths": trace.paths,
        "visible": seen,
        "draws": len(trace.draws),
        "parts": places,
        "labels": trace.labels,
        "words": trace.words,
        "link": trace.link,
        "temperature": trace.temperature,
        "sums_to_one": trace.sums_to_one,
        "signed": trace.signed,
        "averaged": trace.averaged,
        "texts": trace.texts,
        "turns": trace.turns,
    }
    return tensors, about


def pack_rows(trace: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A `Trace` of rows as tensors and metadata."""
    tensors, about = pack(trace)
    tensors |= {f"rows.{name}": values for name, values in trace.rows.values.items()}
    about["rows"] = {
        "queries": trace.rows.queries,
        "count": trace.rows.count,
        "methods": list(trace.rows.values),
    }
    return tensors, about


def unpack_rows(tensors: dict[str, Tensor], about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of a trace, and its other fields, from the contents of a file."""
    kept = about["rows"]
    values = {str(name): tensors[f"rows.{name}"] for name in kept["methods"]}
    batch, tokens = tensors["mask"].shape
    queries = [int(query) for query in kept["queries"]]
    for rows in values.values():
        if rows.dim() != 4 or (rows.shape[0], *rows.shape[2:]) != (batch, len(queries), tokens):
            raise ValueError("rows and mask do not match")
    fields = unpack({**tensors, "maps.0": tensors["mask"]}, about, TRACE)
    return {"queries": queries, "count": int(kept["count"]), "values": values}, {**fields, "maps": []}


def _prefix(part: str) -> str:
    """The prefix of a part's name, which says whose maps it belongs to."""
    return next((prefix for prefix in GROUPS if prefix and part.startswith(prefix)), "")


def _place(name: str, cells: Tensor | None, whole: Tensor) -> str:
    """Where a part's map is written: nowhere, as the trace's own map, or separately."""
    if cells is None:
        return "none"
    same = name.removeprefix(_prefix(name)) == FUSED and (cells is whole or torch.equal(cells, whole))
    return "map" if same else "here"


def unpack(tensors: dict[str, Tensor], about: dict[str, Any], form: str) -> dict[str, Any]:
    """The fields of a trace from the contents of a file; those of draws as dicts."""

    from overt.tracing.chat import Turn

    def group(name: str) -> list[Tensor]:
        members: list[Tensor] = []
        while f"{name}.{len(members)}" in tensors:
            members.append(tensors[f"{name}.{len(members)}"])
        return members

    maps = {name: group(name) for name in GROUPS.values()}
    count = int(about["draws"])
    if not 0 <= count <= len(tensors):
        raise ValueError(f"{count} draws in {len(tensors)} tensors")
    draws: list[dict[str, Any]] = [
        {name: group(f"draws.{i}.{name}") for name in GROUPS.values()}
        | {"outputs": tensors.get(f"draws.{i}.outputs")}
        for i in range(count)
    ]
    if not all(len(draw[name]) == len(maps[name]) for draw in draws for name in maps):
        raise ValueError("maps and draws do not match")
    mask = tensors["mask"]
    lengths = [len(words) for words in about["tokens"]]
    if not (maps["maps"] or maps["cross"]) or lengths != [mask.shape[1]] * len(mask):
        raise ValueError("maps, mask and tokens do not match")
    per_example = [tensors.get(name) for name in ("picture", "outputs")] + [draw["outputs"] for draw in draws]
    if any(value is not None and len(value) != len(mask) for value in per_example):
        raise ValueError("picture, outputs and mask do not match")
    generated = tensors.get("generated")
    if generated is not None and generated.shape != mask.shape:
        raise ValueError("generated and mask do not match")
    texts = [str(text) for text in about.get("texts", [])]
    turns = [[Turn(str(role), int(a), int(b)) for role, a, b in each] for each in about.get("turns", [])]
    if any(listed and len(listed) != len(mask) for listed in (texts, turns)):
        raise ValueError("texts, turns and mask do not match")
    temperature = about.get("temperature", 1.0)
    _check.positive("temperature", temperature)
    places = about["parts"] if form != "1" else _places_before(tensors, about["parts"], bool(draws))
    visible = group("visible")
    return {
        "kind": about["kind"],
        **maps,
        "mask": mask,
        "tokens": about["tokens"],
        "special": tensors["special"],
        "offsets": tensors.get("offsets"),
        "grid": None if about["grid"] is None else (about["grid"][0], about["grid"][1]),
        "image": None if about["image"] is None else (about["image"][0], about["image"][1]),
        "mixing": about["mixing"] if "mixing" in about else about["graph"],
        "parts": {
            name: [_part(tensors, maps, name, i, place) for i, place in enumerate(listed)]
            for name, listed in places.items()
        },
        "draws": draws,
        "visible": [None if i is None else visible[i] for i in about["visible"]],
        "paths": about["paths"],
        # The oldest files have none of these.
        "picture": tensors.get("picture"),
        "outputs": tensors.get("outputs"),
        "labels": about.get("labels", []),
        "words": {int(number): word for number, word in about.get("words", {}).items()},
        "link": about.get("link", "softmax"),
        "temperature": temperature,
        "sums_to_one": about.get("sums_to_one", True),
        "signed": about.get("signed", False),
        "averaged": about.get("averaged", bool(draws) and form == "1"),
        "generated": generated,
        "texts": texts,
        "turns": turns,
    }


def _part(
    tensors: dict[str, Tensor], maps: dict[str, list[Tensor]], name: str, layer: int, place: str
) -> Tensor | None:
    if place == "here":
        return tensors[f"parts.{name}.{layer}"]
    return maps[GROUPS[_prefix(name)]][layer] if place == "map" else None


def _places_before(tensors: dict[str, Tensor], counts: dict[str, int], drawn: bool) -> dict[str, list[str]]:
    """Where the parts of a format 1 file are.

    The map in use exists where its layer has another part. Under posterior samples the file has only their
    mean, which is a different map, so there is no such part.
    """
    places: dict[str, list[str]] = {}
    for name, count in counts.items():
        if name.removeprefix(_prefix(name)) != FUSED:
            listed = [f"parts.{name}.{i}" in tensors for i in range(int(count))]
            places[name] = ["here" if here else "none" for here in listed]
        elif not drawn:
            others = [other for other in counts if _prefix(other) == _prefix(name) and other != name]
            has = [any(f"parts.{other}.{i}" in tensors for other in others) for i in range(int(count))]
            places[name] = ["map" if beside else "none" for beside in has]
    return places
