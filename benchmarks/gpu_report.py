"""What `gpu.py` found, as tables: results/gpu.md and results/gpu.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_forms import AS_CHOSEN, Shape

Row = dict[str, Any]
Measurements = dict[str, Any]
Note = dict[str, Any]

SAME = ("device", "torch", "triton", "transformers", "overt")  # or nothing is kept
LISTS = ("attention", "model", "left_out")


# --- Parts, each a table, that are kept from runs before or measured again whole ---


def resumed(old: Measurements | None, new: Measurements) -> Measurements:
    """A run's findings to begin with: all parts of those before, if they are of the same machine."""
    if old is None or "parts" not in old or any(old.get(key) != new[key] for key in SAME):
        return new
    parts = dict(old["parts"])
    rows = {key: [row for row in old[key] if row.get("part") in parts] for key in LISTS}
    return {**new, **rows, "parts": parts, "ceilings": old["ceilings"], "way": old["way"]}


def lacking(note: Note | None, settings: Note, code: str | None) -> str | None:
    """Why a part is to be measured, None if it need not be; a `code` of None takes any."""
    if note is None:
        return "never measured"
    if note["settings"] != settings:
        return "measured otherwise"
    if note["missing"]:
        return "rows missing"
    if not note["profiled"]:
        return "device times missing"
    return "of other code" if code is not None and note["code"] != code else None


def to_measure(
    found: Measurements, wanted: dict[str, Note], code: str | None, fresh: bool = False
) -> dict[str, str]:
    """Parts by name and why, those that lack most first; `wanted` has their settings, `fresh` takes all."""
    whys = {name: lacking(found["parts"].get(name), settings, code) for name, settings in wanted.items()}
    order = ["never measured", "measured otherwise", "rows missing", "device times missing", "of other code"]
    chosen = {name: why or "asked for" for name, why in whys.items() if why is not None or fresh}
    order.append("asked for")
    return dict(sorted(chosen.items(), key=lambda item: order.index(item[1])))


def put(found: Measurements, name: str, rows: dict[str, list[Row]], note: Note) -> bool:
    """Replace a part whole, unless more rows are missing than in the one before, all else the same."""
    before = found["parts"].get(name)
    alike = before is not None and all(before[key] == note[key] for key in ("settings", "code"))
    if alike and before["profiled"] and note["missing"] > before["missing"]:
        return False
    for key in LISTS:
        found[key] = [row for row in found[key] if row.get("part") != name]
        found[key] += [{**row, "part": name} for row in rows.get(key, [])]
    found["parts"][name] = {**note, "runs": 1 + (0 if before is None else before["runs"])}
    return True


def kept_before(out: Path) -> Measurements | None:
    try:
        found: Measurements = json.loads((out / "gpu.json").read_text())
    except (OSError, ValueError):
        return None
    return found


# --- Tables ---


def floors(shape: Shape, rates: dict[str, float]) -> dict[str, float]:
    """The least milliseconds that forward and backward passes can take here, by what they compute."""
    if not rates:
        return {}
    batch, heads, length, width = shape
    cells = batch * heads * length**2
    products = 14 * cells * width / rates["flops_per_s"]
    # Two logarithms and two exponentials per cell and pass.
    special = 2 * 4 * cells / rates["special_per_s"]
    # The previous map read, the new one written; both and the new one's gradient read, the other's written.
    maps = 6 * cells * 2 / rates["bytes_per_s"]
    convolutions = 3 * 2 * cells * heads * 9 / rates["flops_per_s"]
    drawn, evolved = 1e3 * max(products, special), 1e3 * max(maps, products + convolutions)
    return {
        "Bayesian": drawn,
        "Bayesian without KL": drawn,
        "Bayesian, lognormal": drawn,
        "Evolving": evolved,
        "both": evolved,
    }


def fastest(rows: list[Row], measure: str) -> Row | None:
    known = [row for row in rows if row.get(measure) is not None]
    return min(known, key=lambda row: float(row[measure])) if known else None


def ratio(row: Row, other: Row | None, places: int = 2) -> str:
    """How many times another's time a row takes; in brackets, by device times."""
    if other is None:
        return ""
    whole = f"{row['ms'] / other['ms']:.{places}f}"
    if row.get("device_ms") is None or other.get("device_ms") is None:
        return whole
    return f"{whole} ({row['device_ms'] / other['device_ms']:.{places}f})"


def gain(row: Row, rows: list[Row]) -> list[str]:
    """How many times faster ours is than the fastest rival that computes the same, and that rival's name."""
    of_group = [other for other in rows if other["kind"] == "rival" and other["group"] == row["group"]]
    rival = fastest(of_group, "ms")
    if row["kind"] != "ours" or rival is None or not any("compiled" in other["name"] for other in of_group):
        return ["", ""]
    text = f"{rival['ms'] / row['ms']:.1f}"
    by_device = fastest(of_group, "device_ms")
    if by_device is not None and row["device_ms"] is not None:
        text += f" ({by_device['device_ms'] / row['device_ms']:.1f})"
    return [text, str(rival["name"])]


def in_order(rows: list[Row]) -> list[Row]:
    """Plain attention, then each group: ours before its rivals, the fastest of those first."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    kinds = ["plain", "ours", "rival"]
    return sorted(
        rows,
        key=lambda row: (
            groups.index(row["group"]),
            kinds.index(row["kind"]),
            row["ms"] if row["kind"] == "rival" else 0,
        ),
    )


def titled(row: Row) -> str:
    name = f"**{row['form']}**" if row["kind"] == "ours" else str(row["form"])
    return name if row.get("backend") is None else f"{name} ({row['backend']})"


def attention_tables(found: Measurements) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    heads = ["form", "ms", "10–90 %", "device ms", "× plain", "gain over the fastest rival", "that rival"]
    heads += ["peak MiB", "peak × plain", "× floor"]
    places = dict.fromkeys((tuple(row["shape"]), row["padded"]) for row in found["attention"])
    for shape, padded in sorted(places, key=lambda place: (place[1], place[0][2])):
        rows = [row for row in found["attention"] if tuple(row["shape"]) == shape and row["padded"] == padded]
        plain = next((row for row in rows if row["name"] == AS_CHOSEN), None)
        rates = found.get("parts", {}).get(rows[0].get("part"), found)["ceilings"]
        floor = {} if padded else floors(shape, rates)
        cells = []
        for row in in_order(rows):
            device, least = row["device_ms"], floor.get(row["group"])
            cells.append(
                [
                    titled(row),
                    f"{row['ms']:.3f}",
                    f"{row['low_ms']:.3f}–{row['high_ms']:.3f}",
                    "" if device is None else f"{device:.3f}",
                    ratio(row, plain),
                    *gain(row, rows),
                    f"{row['peak_mib']:.0f}",
                    "" if plain is None else f"{row['peak_mib'] / plain['peak_mib']:.2f}",
                    "" if least is None or device is None else f"{device / least:.1f}",
                ]
            )
        title = f"Attention (batch, heads, length, width) = {shape}"
        yield title + (", padded" if padded else ""), heads, cells


def model_tables(found: Measurements) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    heads = ["form", "ms", "least–most", "turns", "× plain", "gain over the fastest rival", "that rival"]
    heads += ["peak MiB", "peak × plain"]
    for padded in (False, True):
        rows = [row for row in found["model"] if row["padded"] == padded]
        if not rows:
            continue
        plain = next((row for row in rows if row["name"] == AS_CHOSEN), None)
        cells = [
            [
                titled(row),
                f"{row['ms']:.1f}",
                f"{row['low_ms']:.1f}–{row['high_ms']:.1f}",
                str(row["turns"]),
                "" if plain is None else f"{row['ms'] / plain['ms']:.2f}",
                *gain({**row, "device_ms": None}, rows),
                f"{row['peak_mib']:.0f}",
                "" if plain is None else f"{row['peak_mib'] / plain['peak_mib']:.2f}",
            ]
            for row in in_order(rows)
        ]
        batch, length = rows[0]["shape"]
        size = "BERT-base size" if found["layers"] == 12 else f"BERT of {found['layers']} layers"
        title = f"Training step, {size}, batch {batch} × {length}"
        yield title + (", padded" if padded else ""), heads, cells


RIVALS = """\
Rivals, all in `benchmarks/gpu_rivals.py`:

- *ten lines*: plain operations on dense maps, as one would write them, with `torch.rand`; *compiled*,
  `torch.compile` of them in its default mode.
- *FlexAttention, compiled*: noise from a hash of the cell's number in its `score_mod`. The KL by its closed
  form in plain operations, compiled with it; that needs the log-sum-exp of scores without noise, hence a
  second call.
- *sdpa with noise as its mask, compiled*: dense noise, drawn by one compiled kernel, as `attn_mask`; the KL
  as for FlexAttention.
- *our definition*: overt's own plain operations (`overt.naive()`), which every form is tested against, with
  counter-based noise; *compiled*, `torch.compile` of them, with the closed form of the KL.

Rivals draw from the same distributions, not the same numbers. Before attentions were timed they were held
against the kernels: outputs, KL and all gradients without noise, within 5 % in norm (those of the
convolution, sums that nearly cancel, within 50 %); without padding, the variance of Bayesian's noise; and up
to 2048 tokens, FlexAttention's outputs and gradients with noise against dense operations with the same noise.
Of training steps the first loss is held against ours, within 0.15. (*Our definition, compiled* was not
checked.)

Not every way was run everywhere. *Our definition, compiled* is at the first shape alone, the definition of
Bayesian and Evolving up to 2048 tokens; the ten lines of Lognormal and of Bayesian without KL are not
compiled at 8192 tokens, nor the latter in padded batches. Where no compiled rival was run, no gain is given.
FlexAttention cannot compute Evolving, whose cells depend on those of other rows and heads; for it and for
sdpa's mask, Lognormal noise was not written.

Padded batches have lengths evenly drawn between half and the whole. sdpa takes a boolean mask (batch, 1, 1,
key) there, FlexAttention a BlockMask that is made beforehand. The model of the training steps has no dropout
of attention weights, since FlexAttention has none."""


def dates_of(found: Measurements) -> list[str]:
    """When runs began that parts are of."""
    return sorted({note["date"] for note in found.get("parts", {}).values()})


def runs_of(found: Measurements) -> str:
    dates = dates_of(found)
    if not dates:
        return ""
    if len(dates) == 1:
        return f"One process, on {dates[0]}. "
    text = (
        f"Each table is of one process, but not all of the same: they are of {len(dates)} runs, see the end"
    )
    codes = {note["code"] for note in found["parts"].values()}
    return text + (", and the code changed between them. " if len(codes) > 1 else ". ")


def parts_table(found: Measurements) -> list[str]:
    """When each part was measured."""
    if not found.get("parts"):
        return []
    lines = ["", "## Runs", "", "| part | run of | measured so often | seconds | rows still missing |"]
    lines.append("|---|---|---:|---:|---:|")
    for name, note in found["parts"].items():
        cells = [name, note["date"], str(note["runs"]), f"{note['seconds']:.0f}", str(note["missing"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def rates_of(found: Measurements) -> dict[str, float]:
    """Rates of the run that the first table with floors is of."""
    for row in found["attention"]:
        if not row["padded"]:
            rates: dict[str, float] = found.get("parts", {}).get(row.get("part"), found)["ceilings"]
            return rates
    return dict(found["ceilings"])


def explanation(found: Measurements) -> list[str]:
    rates = rates_of(found)
    lines = [
        "# Fused kernels on a GPU",
        "",
        f"`{found['command']}`. {found['device']}, torch {found['torch']}, triton {found['triton']}, "
        f"transformers {found['transformers']}; bfloat16, forward + backward. {runs_of(found)}Each attention "
        f"is warmed up for 25 ms, then repeated for {found['rep']} ms, at least once: medians, 10th to 90th "
        "percentile. Training steps take turns: medians, least to most. The host is shared, and whatever "
        "takes less than about 2 ms is its own to a good part: such times, and training steps, differ from "
        "run to run by a tenth and more.",
        "",
        "Two ratios. **× plain** is the cost over attention without any mechanism: sdpa with the backend "
        "that torch chooses here, named in its row. **Gain over the fastest rival** is how many times faster "
        "ours is than the fastest of the other ways below to compute the same, KL and all; the next column "
        "names it. In brackets the same by device times, where another rival may be the fastest.",
        "",
        '"Device" is the same work replayed as a CUDA graph, gaps between kernels and all; for rivals, of '
        "which not all can be captured, the sum of their kernels' times under the profiler, which leaves "
        "such gaps out and may stretch a kernel by a tenth. The host's share is in neither. Memory "
        "is the peak above inputs and incoming gradients.",
    ]
    if rates:
        lines[-1] += (
            ' "× floor" is device time over the least that the method could take: products, special '
            "functions (two logarithms and two exponentials per cell and pass, noise being drawn again in "
            "the backward pass) or bytes (Evolving and both: the maps that must be read and written), over "
            "the rates measured in the same run: "
            f"{rates['bytes_per_s'] / 1e12:.2f} TB/s copied, {rates['flops_per_s'] / 1e12:.0f} TFLOP/s of "
            f"bfloat16 products, {rates['special_per_s'] / 1e12:.2f} T exponentials/s."
        )
    return [*lines, "", RIVALS]


def report(found: Measurements, out: Path, show: bool = True) -> None:
    lines = explanation(found)
    console = Console(width=200)
    for title, heads, rows in (*attention_tables(found), *model_tables(found)):
        if show:
            table = Table(title=title, title_justify="left")
            for place, head in enumerate(heads):
                table.add_column(head, justify="right" if place else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
        lines += ["", f"## {title}", "", "| " + " | ".join(heads) + " |"]
        lines += ["|" + "---|" + "---:|" * (len(heads) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    if found["left_out"]:
        lines += ["", "## Left out", "", "| where | form | why |", "|---|---|---|"]
        for row in found["left_out"]:
            reason = row["reason"].replace("|", "/")
            lines.append(f"| {row['where']} | {row['form']} | {reason} |")
    lines += parts_table(found)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")
