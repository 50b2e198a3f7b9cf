"""Cost of attached mechanisms, all forms in one run.

Training steps of a BERT-base-sized model, and evaluations of one of MiniLM's size. Ratios are over the same
model plain, with sdpa as torch chooses it, which is what transformers gives by default; eager attention is a
row of its own.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import overt

FORMS: dict[str, list[overt.Mechanism]] = {
    "plain, sdpa": [],
    "plain, eager": [],
    "Evolving": [overt.Evolving()],
    "Bayesian": [overt.Bayesian()],
    "both": [overt.Evolving(), overt.Bayesian()],
}
RIVAL, EAGER = "plain, sdpa", "plain, eager"
SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}  # MiniLM's


def build(form: str, device: str, **shape: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    settings: dict[str, Any] = {"attn_implementation": "eager" if "eager" in form else "sdpa", **shape}
    config = BertConfig(**settings)
    make: Any = BertForSequenceClassification
    model = make(config).to(device).train()
    return overt.attach(model, *FORMS[form]) if FORMS[form] else model


def batch_of(batch: int, length: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(length // 2, length, batch).long().view(-1, 1)
    mask = (torch.arange(length) < lengths).long()
    ids = torch.randint(5, 30000, (batch, length), generator=generator) * mask
    labels = torch.arange(batch) % 2
    return {
        key: value.to(device)
        for key, value in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()
    }


def step(model: Any, inputs: dict[str, torch.Tensor], bfloat16: bool) -> None:
    device = inputs["labels"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()


def peak_mebibytes(form: str, given: argparse.Namespace) -> float:
    """Memory of a step above what the model holds: of the device, or of a process of its own on a CPU."""
    if given.device == "cuda":
        model, inputs = (
            build(form, "cuda", num_hidden_layers=given.layers),
            batch_of(given.batch, given.length, "cuda"),
        )
        step(model, inputs, given.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step(model, inputs, given.bfloat16)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    command = [sys.executable, __file__, "--peak", form, *sys.argv[1:]]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_of_this_process(form: str, given: argparse.Namespace) -> float:
    model, inputs = (
        build(form, "cpu", num_hidden_layers=given.layers),
        batch_of(given.batch, given.length, "cpu"),
    )
    model(**batch_of(1, 8, "cpu")).loss.backward()  # gradients are held before the measured step
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten (Linux)
    held = memory_kibibytes("VmRSS")
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    return (memory_kibibytes("VmHWM") - held) / 1024


def memory_kibibytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@torch.inference_mode()
def evaluate(model: Any, inputs: dict[str, torch.Tensor], bfloat16: bool) -> None:
    device = inputs["labels"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
        model(**inputs)
    if device == "cuda":
        torch.cuda.synchronize()


def timed(
    models: dict[str, Any], inputs: dict[str, torch.Tensor], run: Any, repeats: int, bfloat16: bool
) -> dict[str, list[float]]:
    """Milliseconds of each form. Forms take turns, and the first turn warms up."""
    seen: dict[str, list[float]] = {form: [] for form in models}
    for turn in range(repeats + 1):
        for form, model in models.items():
            start = time.perf_counter()
            run(model, inputs, bfloat16)
            if turn > 0:
                seen[form].append(1000 * (time.perf_counter() - start))
    return seen


def show(title: str, seen: dict[str, list[float]], peaks: dict[str, float] | None) -> None:
    """One table: medians, their ratios over plain attention of either kind, spreads, and memory."""
    times = {form: statistics.median(values) for form, values in seen.items()}
    table = Table(title=title, title_justify="left")
    columns = ["", "ms", f"× {RIVAL}", f"× {EAGER}", "spread"]
    for column in [*columns, *(() if peaks is None else ("peak MiB", f"× {RIVAL} "))]:
        table.add_column(column, justify="left" if column == "" else "right")
    for form, value in times.items():
        spread = f"{min(seen[form]):.0f}–{max(seen[form]):.0f}"
        cells = [form, f"{value:.1f}", f"{value / times[RIVAL]:.2f}", f"{value / times[EAGER]:.2f}", spread]
        if peaks is not None:
            cells += [f"{peaks[form]:.0f}", f"{peaks[form] / peaks[RIVAL]:.2f}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--only", choices=("training", "evaluation"), help="one of the two tables")
    parser.add_argument("--peak", choices=list(FORMS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak is not None:
        print(peak_of_this_process(given.peak, given))
        return

    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} threads"
    kind = "bfloat16 autocast" if given.bfloat16 else "float32"
    print(f"torch {torch.__version__}, {where}, {platform.machine()}; medians of {given.repeats}, padded")
    if given.only != "evaluation":
        peaks = {form: peak_mebibytes(form, given) for form in FORMS}
        models = {form: build(form, given.device, num_hidden_layers=given.layers) for form in FORMS}
        inputs = batch_of(given.batch, given.length, given.device)
        seen = timed(models, inputs, step, given.repeats, given.bfloat16)
        size = f"BERT-base size × {given.layers} layers, batch {given.batch} × {given.length}, {kind}"
        show(f"Forward + backward, {size}", seen, peaks)
    if given.only != "training":
        models = {form: build(form, given.device, **SMALL).eval() for form in FORMS}
        inputs = batch_of(4, 256, given.device)
        seen = timed(models, inputs, evaluate, 3 * given.repeats, given.bfloat16)
        show(f"Evaluation, MiniLM's size, batch 4 × 256, {kind}; no KL, which nobody asked for", seen, None)


if __name__ == "__main__":
    main()
