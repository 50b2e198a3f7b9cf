"""The measurements of `gpu.py` as tables: results/gpu.md and results/gpu.json."""

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

SAME = ("device", "torch", "triton", "transformers", "overt")  # if any differs, nothing is kept
LISTS = ("attention", "model", "left_out")


# --- Parts, each a table, kept from earlier runs or measured again in full ---


def resumed(old: Measurements | None, new: Measurements) -> Measurements:
    """The measurements that a run starts with: all earlier parts, if from the same machine."""
    if old is None or "parts" not in old or any(old.get(key) != new[key] for key in SAME):
        return new
    parts = dict(old["parts"])
    rows = {key: [row for row in old[key] if row.get("part") in parts] for key in LISTS}
    return {**new, **rows, "parts": parts, "ceilings": old["ceilings"], "way": old["way"]}


def lacking(note: Note | None, settings: Note, code: str | None) -> str | None:
    """Why a part must be measured; None if it need not be. A `code` of None accepts any."""
    if note is None:
        return "never measured"
    if note["settings"] != settings:
        return "other settings"
    if note["missing"]:
        return "rows missing"
    if not note["profiled"]:
        return "device times missing"
    return "other code" if code is not None and note["code"] != code else None


def to_measure(
    measurements: Measurements, settings: dict[str, Note], code: str | None, fresh: bool = False
) -> dict[str, str]:
    """Parts by name and why they must be measured, least complete first; `fresh` takes all of `settings`."""
    reasons = {name: lacking(measurements["parts"].get(name), part, code) for name, part in settings.items()}
    order = ["never measured", "other settings", "rows missing", "device times missing", "other code"]
    chosen = {name: reason or "requested" for name, reason in reasons.items() if reason is not None or fresh}
    order.append("requested")
    return dict(sorted(chosen.items(), key=lambda item: order.index(item[1])))


def put(measurements: Measurements, name: str, rows: dict[str, list[Row]], note: Note) -> bool:
    """Replace a part, unless it is otherwise the same and more of its rows are missing than before."""
    before = measurements["parts"].get(name)
    alike = before is not None and all(before[key] == note[key] for key in ("settings", "code"))
    if alike and before["profiled"] and note["missing"] > before["missing"]:
        return False
    for key in LISTS:
        measurements[key] = [row for row in measurements[key] if row.get("part") != name]
        measurements[key] += [{**row, "part": name} for row in rows.get(key, [])]
    measurements["parts"][name] = {**note, "runs": 1 + (0 if before is None else before["runs"])}
    return True


def kept_before(out: Path) -> Measurements | None:
    try:
        earlier: Measurements = json.loads((out / "gpu.json").read_text())
    except (OSError, ValueError):
        return None
    return earlier


# --- Tables ---


def floors(shape: Shape, rates: dict[str, float]) -> dict[str, float]:
    """Lower bounds of the milliseconds of forward and backward passes here, by what they compute."""
    if not rates:
        return {}
    batch, heads, length, width = shape
    cells = batch * heads * length**2
    products = 14 * cells * width / rates["flops_per_s"]
    # Two logarithms and two exponentials per cell and pass.
    special = 2 * 4 * cells / rates["special_per_s"]
    # Forward: read the previous map, write the new one. Backward: read both and the new one's gradient, write
    # the previous one's gradient.
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
    """A row's time relative to another's; in brackets, the same for device times."""
    if other is None:
        return ""
    whole = f"{row['ms'] / other['ms']:.{places}f}"
    if row.get("device_ms") is None or other.get("device_ms") is None:
        return whole
    return f"{whole} ({row['device_ms'] / other['device_ms']:.{places}f})"


def gain(row: Row, rows: list[Row]) -> list[str]:
    """How many times faster ours is than the fastest baseline that computes the same, and its name."""
    of_group = [other for other in rows if other["kind"] == "rival" and other["group"] == row["group"]]
    baseline = fastest(of_group, "ms")
    compiled = any("compiled" in other["name"] for other in of_group)
    if row["kind"] != "ours" or baseline is None or not compiled:
        return ["", ""]
    text = f"{baseline['ms'] / row['ms']:.1f}"
    by_device = fastest(of_group, "device_ms")
    if by_device is not None and row["device_ms"] is not None:
        text += f" ({by_device['device_ms'] / row['device_ms']:.1f})"
    return [text, str(baseline["name"])]


def in_order(rows: list[Row]) -> list[Row]:
    """Plain attention, then each group: ours, then its baselines, fastest first."""
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


def attention_tables(measurements: Measurements) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    heads = [
        "form",
        "ms",
        "10–90 %",
        "device ms",
        "× plain",
        "gain over the fastest baseline",
        "that baseline",
    ]
    heads += ["peak MiB", "peak × plain", "× floor"]
    places = dict.fromkeys((tuple(row["shape"]), row["padded"]) for row in measurements["attention"])
    for shape, padded in sorted(places, key=lambda place: (place[1], place[0][2])):
        rows = [
            row
            for row in measurements["attention"]
            if tuple(row["shape"]) == shape and row["padded"] == padded
        ]
        plain = next((row for row in rows if row["name"] == AS_CHOSEN), None)
        rates = measurements.get("parts", {}).get(rows[0].get("part"), measurements)["ceilings"]
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


def model_tables(measurements: Measurements) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    heads = ["form", "ms", "min–max", "turns", "× plain", "gain over the fastest baseline", "that baseline"]
    heads += ["peak MiB", "peak × plain"]
    for padded in (False, True):
        rows = [row for row in measurements["model"] if row["padded"] == padded]
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
        size = (
            "BERT-base size" if measurements["layers"] == 12 else f"BERT of {measurements['layers']} layers"
        )
        title = f"Training step, {size}, batch {batch} × {length}"
        yield title + (", padded" if padded else ""), heads, cells


BASELINES = """\
Baselines, all in `benchmarks/gpu_rivals.py`:

- *ten lines*: plain operations on dense maps, as one would write them, with `torch.rand`; *compiled*:
  the same under `torch.compile` in its default mode.
- *FlexAttention, compiled*: noise from a hash of the cell's number in its `score_mod`. The KL is computed in
  closed form by plain operations, compiled with it; that needs the log-sum-exp of scores without noise, hence
  a second call.
- *sdpa with noise as its mask, compiled*: dense noise, drawn by one compiled kernel, as `attn_mask`; the KL
  as for FlexAttention.
- *our definition*: overt's own plain operations (`overt.naive()`), which every form is tested against, with
  counter-based noise; *compiled*: the same under `torch.compile`, with the closed form of the KL.

Baselines draw from the same distributions, but not the same numbers. Before attentions were timed, they were
compared with the kernels: outputs, KL and all gradients without noise, within 5 % in norm (those of the
convolution, sums that nearly cancel, within 50 %); without padding, the variance of Bayesian's noise; and up
to 2048 tokens, FlexAttention's outputs and gradients with noise against dense operations with the same noise.
For training steps, the first loss is compared with ours, within 0.15. (*Our definition, compiled* was not
checked.)

Not every baseline was run everywhere. *Our definition, compiled* was run at the first shape only, the
definition of Bayesian and Evolving up to 2048 tokens; the ten lines of Lognormal and of Bayesian without KL
were not compiled at 8192 tokens, nor the latter in padded batches. Where no compiled baseline was run, no
gain is reported. FlexAttention cannot compute Evolving, whose cells depend on those of other rows and heads;
Lognormal noise was not implemented for FlexAttention or for sdpa's mask.

Padded batches have lengths drawn uniformly between half the length and all of it. There, sdpa takes a boolean
mask (batch, 1, 1, key), FlexAttention a BlockMask that is built in advance. The model of the training steps
has no dropout of attention weights, since FlexAttention does not support it."""


def dates_of(measurements: Measurements) -> list[str]:
    """Start dates of the runs that measured the parts."""
    return sorted({note["date"] for note in measurements.get("parts", {}).values()})


def runs_of(measurements: Measurements) -> str:
    dates = dates_of(measurements)
    if not dates:
        return ""
    if len(dates) == 1:
        return f"One process, on {dates[0]}. "
    text = (
        f"Each table was measured in one process, but not all in the same: they are of {len(dates)} runs, "
        "see the end"
    )
    codes = {note["code"] for note in measurements["parts"].values()}
    return text + (", and the code changed between them. " if len(codes) > 1 else ". ")


def parts_table(measurements: Measurements) -> list[str]:
    """When each part was measured."""
    if not measurements.get("parts"):
        return []
    lines = ["", "## Runs", "", "| part | run of | times measured | seconds | rows still missing |"]
    lines.append("|---|---|---:|---:|---:|")
    for name, note in measurements["parts"].items():
        cells = [name, note["date"], str(note["runs"]), f"{note['seconds']:.0f}", str(note["missing"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def rates_of(measurements: Measurements) -> dict[str, float]:
    """Rates of the run that measured the first table with floors."""
    for row in measurements["attention"]:
        if not row["padded"]:
            rates: dict[str, float] = measurements.get("parts", {}).get(row.get("part"), measurements)[
                "ceilings"
            ]
            return rates
    return dict(measurements["ceilings"])


def explanation(measurements: Measurements) -> list[str]:
    rates = rates_of(measurements)
    lines = [
        "# Fused kernels on a GPU",
        "",
        f"`{measurements['command']}`. {measurements['device']}, torch {measurements['torch']}, "
        f"triton {measurements['triton']}, transformers {measurements['transformers']}; bfloat16, forward + "
        f"backward. {runs_of(measurements)}Each attention is warmed up for 25 ms, then repeated for "
        f"{measurements['rep']} ms, at least once: medians, 10th to 90th percentile. Training steps take "
        "turns: medians, minimum to maximum. The host is shared, and times below about 2 ms are to a large "
        "part the host's: such times, and training steps, differ from run to run by a tenth and more.",
        "",
        "Two ratios. **× plain** is the cost relative to attention without any mechanism: sdpa with the "
        "backend that torch chooses here, named in its row. **Gain over the fastest baseline** is how many "
        "times faster ours is than the fastest baseline below that computes the same, including the KL; the "
        "next column names it. In brackets, the same for device times, where another baseline may be the "
        "fastest.",
        "",
        '"Device" is the same work replayed as a CUDA graph, including gaps between kernels; for baselines, '
        "not all of which can be captured, it is the sum of their kernels' times under the profiler, which "
        "excludes such gaps and may lengthen a kernel by a tenth. Neither includes the host's share. Memory "
        "is the peak above inputs and incoming gradients.",
    ]
    if rates:
        lines[-1] += (
            ' "× floor" is device time over the least time that the method could take: products, special '
            "functions (two logarithms and two exponentials per cell and pass, since noise is drawn again in "
            "the backward pass) or bytes (Evolving and both: the maps that must be read and written), "
            "divided by the rates measured in the same run: "
            f"{rates['bytes_per_s'] / 1e12:.2f} TB/s copied, {rates['flops_per_s'] / 1e12:.0f} TFLOP/s of "
            f"bfloat16 products, {rates['special_per_s'] / 1e12:.2f} T exponentials/s."
        )
    return [*lines, "", BASELINES]


def report(measurements: Measurements, out: Path, show: bool = True) -> None:
    lines = explanation(measurements)
    console = Console(width=200)
    for title, heads, rows in (*attention_tables(measurements), *model_tables(measurements)):
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
    if measurements["left_out"]:
        lines += ["", "## Left out", "", "| where | form | why |", "|---|---|---|"]
        for row in measurements["left_out"]:
            reason = row["reason"].replace("|", "/")
            lines.append(f"| {row['where']} | {row['form']} | {reason} |")
    lines += parts_table(measurements)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(measurements, indent=1) + "\n")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")
