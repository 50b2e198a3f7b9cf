"""Time the mechanisms against named rivals, all in one run; every figure is a ratio beside its rival."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import overt
from overt.mechanisms.bayesian import noise
from overt.mechanisms.bayesian.closed import Dot, closed_kl
from overt.mechanisms.bayesian.naive import dense_kl
from overt.mechanisms.maps import log_normalizer

REPEATS = 7


def milliseconds(*runs: Callable[[], object]) -> list[float]:
    """Median time of each run; runs take turns, so that a disturbance falls on all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(REPEATS):
        for run, seen in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            seen.append(1000 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


def table_of(title: str, names: list[str], times: list[float], rival: int = 0) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column(f"× {names[rival]}", justify="right")
    for name, value in zip(names, times, strict=True):
        table.add_row(name, f"{value:.1f}", f"{value / times[rival]:.2f}")
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
    console.print(f"{versions}; forward + backward unless said, medians of {REPEATS}, float32")

    width, heads, layers = 384, 12, 6  # the size of MiniLM
    x = torch.randn(8, 128, width)
    forms: dict[str, list[overt.Mechanism]] = {
        "overt, no mechanism": [],
        "Evolving": [overt.Evolving()],
        "Bayesian, no KL": [overt.Bayesian(prior=None)],
        "Bayesian": [overt.Bayesian()],
        "both": [overt.Evolving(), overt.Bayesian()],
    }
    runs = [torch_encoder(width, heads, layers, x)]
    models = [overt.Encoder(width, heads, layers, form, dropout=0.0) for form in forms.values()]
    runs += [training_step(model, x) for model in models]
    names = ["nn.TransformerEncoder", *forms]
    title = "Training step, 6 layers × 12 heads × 384, batch 8 × 128"
    console.print(table_of(title, names, milliseconds(*runs), rival=1))

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
    everything, config = torch.ones(2, 1024, dtype=torch.bool), overt.Bayesian()
    visible = everything.view(2, 1, 1, 1024)

    def kl(closed: bool) -> None:
        logits = q @ k.mT / 8
        if closed:
            dot = Dot(q, k, 0.125, None, everything, everything, causal=False)
            value = closed_kl(dot, log_normalizer(logits, visible), prior, config)
        else:
            value = dense_kl(logits, visible, prior, config)
        torch.autograd.backward(value.sum())

    names, times = ["dense KL", "closed KL"], milliseconds(lambda: kl(False), lambda: kl(True))
    console.print(table_of("KL of one map, 2 × 8 × 1024 × 1024, with its logits", names, times))

    plain, both = import_seconds()
    console.print(f"import torch {plain:.2f} s; with overt {both:.2f} s ({both - plain:+.2f} s)")


if __name__ == "__main__":
    main()
