"""Cost of attached mechanisms, all forms in one run.

Training steps of a BERT-base-sized model, and evaluations of a MiniLM-sized one. The baseline of all ratios
is the same plain model with sdpa, as torch chooses its backend, which is transformers' default; eager
attention has a row too.
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
BASELINE, EAGER = "plain, sdpa", "plain, eager"
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


def peak_mebibytes(form: str, options: argparse.Namespace) -> float:
    """Peak memory of a step beyond the model's: of the device, or on a CPU of a separate process."""
    if options.device == "cuda":
        model, inputs = (
            build(form, "cuda", num_hidden_layers=options.layers),
            batch_of(options.batch, options.length, "cuda"),
        )
        step(model, inputs, options.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step(model, inputs, options.bfloat16)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    command = [sys.executable, __file__, "--peak", form, *sys.argv[1:]]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_of_this_process(form: str, options: argparse.Namespace) -> float:
    model, inputs = (
        build(form, "cpu", num_hidden_layers=options.layers),
        batch_of(options.batch, options.length, "cpu"),
    )
    model(**batch_of(1, 8, "cpu")).loss.backward()  # so that gradients are allocated before the measured step
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (Linux)
    held = memory_kibibytes("VmRSS")
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
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
    """Milliseconds of each form. Forms take turns; the first turn is a warm-up."""
    seen: dict[str, list[float]] = {form: [] for form in models}
    for turn in range(repeats + 1):
        for form, model in models.items():
            start = time.perf_counter()
            run(model, inputs, bfloat16)
            if turn > 0:
                seen[form].append(1000 * (time.perf_counter() - start))
    return seen


def show(title: str, seen: dict[str, list[float]], peaks: dict[str, float] | None) -> None:
    """Print one table: medians, their ratios to both plain attentions, ranges, and memory."""
    times = {form: statistics.median(values) for form, values in seen.items()}
    table = Table(title=title, title_justify="left")
    columns = ["", "ms", f"× {BASELINE}", f"× {EAGER}", "spread"]
    for column in [*columns, *(() if peaks is None else ("peak MiB", f"× {BASELINE} "))]:
        table.add_column(column, justify="left" if column == "" else "right")
    for form, value in times.items():
        spread = f"{min(seen[form]):.0f}–{max(seen[form]):.0f}"
        cells = [
            form,
            f"{value:.1f}",
            f"{value / times[BASELINE]:.2f}",
            f"{value / times[EAGER]:.2f}",
            spread,
        ]
        if peaks is not None:
            cells += [f"{peaks[form]:.0f}", f"{peaks[form] / peaks[BASELINE]:.2f}"]
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
    parser.add_argument("--only", choices=("training", "evaluation"), help="only one of the two tables")
    parser.add_argument("--peak", choices=list(FORMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        print(peak_of_this_process(options.peak, options))
        return

    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    kind = "bfloat16 autocast" if options.bfloat16 else "float32"
    print(f"torch {torch.__version__}, {where}, {platform.machine()}; medians of {options.repeats}, padded")
    if options.only != "evaluation":
        peaks = {form: peak_mebibytes(form, options) for form in FORMS}
        models = {form: build(form, options.device, num_hidden_layers=options.layers) for form in FORMS}
        inputs = batch_of(options.batch, options.length, options.device)
        seen = timed(models, inputs, step, options.repeats, options.bfloat16)
        size = f"BERT-base size × {options.layers} layers, batch {options.batch} × {options.length}, {kind}"
        show(f"Forward + backward, {size}", seen, peaks)
    if options.only != "training":
        models = {form: build(form, options.device, **SMALL).eval() for form in FORMS}
        inputs = batch_of(4, 256, options.device)
        seen = timed(models, inputs, evaluate, 3 * options.repeats, options.bfloat16)
        show(f"Evaluation, MiniLM's size, batch 4 × 256, {kind}; without the KL", seen, None)


if __name__ == "__main__":
    main()
