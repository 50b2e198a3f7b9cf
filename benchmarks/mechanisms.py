"""Time the mechanisms against baselines, all in one run; every time comes with its ratio to a baseline."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import overt
from overt.mechanisms import noise
from overt.mechanisms.bayesian.closed import closed_kl
from overt.mechanisms.bayesian.naive import map_kl
from overt.mechanisms.maps import log_normalizer

REPEATS = 7
WIDTH, HEADS, LAYERS, BATCH, LENGTH = 384, 12, 6, 8, 128  # the size of MiniLM
FORMS: dict[str, list[overt.Mechanism]] = {
    "plain": [],
    "Evolving": [overt.Evolving()],
    "Bayesian, no KL": [overt.Bayesian(prior=None)],
    "Bayesian": [overt.Bayesian()],
    "both": [overt.Evolving(), overt.Bayesian()],
}
# The highest allowed cost of a mechanism on a CPU, relative to the plain step: product, softmax, product.
LIMITS = {"Evolving": 1.25, "Bayesian": 1.4}


def milliseconds(*runs: Callable[[], object]) -> list[list[float]]:
    """Times of each run; runs take turns, so that disturbances affect all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(REPEATS):
        for run, seen in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            seen.append(1000 * (time.perf_counter() - start))
    return times


def table_of(
    title: str,
    names: list[str],
    times: list[list[float]],
    baseline: int = 0,
    limits: dict[str, float] | None = None,
) -> Table:
    """Median times, and the median over turns of the ratio to the baseline, with its quartiles."""
    limits = limits or {}
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("ms", f"× {names[baseline]}", "quartiles", *(["at most"] if limits else [])):
        table.add_column(column, justify="right")
    for name, seen in zip(names, times, strict=True):
        ratios = [mine / other for mine, other in zip(seen, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        cells = [f"{statistics.median(seen):.1f}", f"{middle:.2f}", f"{low:.2f}–{high:.2f}"]
        table.add_row(name, *cells, *([f"{limits[name]:.2f}" if name in limits else ""] if limits else []))
    return table


def training_step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def step() -> None:
        chain = overt.Chain(step=0)
        loss = model(x, chain=chain).square().mean() + chain.penalty()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def torch_encoder(width: int, heads: int, layers: int, x: Tensor) -> Callable[[], object]:
    options = {"batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", **options)
    model = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def attached_step(form: str) -> Callable[[], object]:
    """A training step of a Hugging Face BERT, eager, with mechanisms attached, on a padded batch."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    settings: dict[str, Any] = {"attn_implementation": "eager", "intermediate_size": 4 * WIDTH}
    settings |= {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    config = BertConfig(**settings)
    make: Any = BertForSequenceClassification
    model = make(config).train()
    if FORMS[form]:
        overt.attach(model, *FORMS[form])
    mask = (torch.arange(LENGTH) < torch.linspace(LENGTH // 2, LENGTH, BATCH).long().view(-1, 1)).long()
    ids = torch.randint(5, 30000, (BATCH, LENGTH)) * mask
    labels = torch.arange(BATCH) % 2

    def step() -> None:
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def import_seconds() -> tuple[float, float]:
    """Median seconds to import torch, and torch with overt, in fresh interpreters."""
    import subprocess

    def once(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    pairs = [(once("import torch"), once("import torch, overt")) for _ in range(5)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def main() -> None:
    console = Console()
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    console.print(
        f"{versions}; forward + backward unless stated otherwise, medians of {REPEATS} turns, float32"
    )

    x = torch.randn(BATCH, LENGTH, WIDTH)
    size = f"{LAYERS} layers × {HEADS} heads × {WIDTH}, batch {BATCH} × {LENGTH}"
    runs = [torch_encoder(WIDTH, HEADS, LAYERS, x)]
    models = [overt.Encoder(WIDTH, HEADS, LAYERS, form, dropout=0.0) for form in FORMS.values()]
    runs += [training_step(model, x) for model in models]
    names = ["nn.TransformerEncoder", *FORMS]
    title = f"Training step of overt.Encoder, {size}"
    console.print(table_of(title, names, milliseconds(*runs), baseline=1, limits=LIMITS))

    times = milliseconds(*(attached_step(form) for form in FORMS))
    title = f"Training step of a Hugging Face BERT, eager, {size}"
    console.print(table_of(title, list(FORMS), times, limits=LIMITS))

    key = noise.stream(torch.tensor(0), torch.tensor(0), 0, torch.tensor(0), 0)
    examples, keys = torch.arange(8), key.expand(8, 2)
    times = milliseconds(
        lambda: torch.rand(8, 12, 128, 128),
        lambda: noise.uniform(key, examples, 12, 128, 128),
        lambda: noise._uniform_definition(keys, examples, 12, 128, 128, 0),
    )
    names = ["torch.rand", "compiled Philox", "Philox in torch operations"]
    console.print(table_of("Noise for one map, 8 × 12 × 128 × 128, draw only", names, times))

    q, k = (torch.randn(2, 8, 1024, 64, requires_grad=True) for _ in range(2))
    prior = torch.log_softmax(torch.randn(2, 8, 1024), -1).requires_grad_()
    visible, config = torch.ones(2, 1, 1, 1024, dtype=torch.bool), overt.Bayesian()

    def kl(closed: bool) -> None:
        logits = q @ k.mT / 8
        if closed:
            call = overt.AttentionCall(overt.mechanisms.Site(8, 64), q, k, k, 0.125)
            value = closed_kl(call, log_normalizer(logits, visible), prior, config)
        else:
            value = map_kl(logits, visible, prior, config)
        torch.autograd.backward(value.sum())

    names, times = ["dense KL", "closed KL"], milliseconds(lambda: kl(False), lambda: kl(True))
    console.print(table_of("KL of one map, 2 × 8 × 1024 × 1024, with its logits", names, times))

    plain, both = import_seconds()
    console.print(f"import torch {plain:.2f} s; with overt {both:.2f} s ({both - plain:+.2f} s)")


if __name__ == "__main__":
    main()
