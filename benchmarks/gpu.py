"""Fused kernels on a GPU against named rivals, all in one run; writes results/gpu.md and results/gpu.json.

Times are of forward and backward passes in bfloat16, medians. "device" is the time of the same work replayed
as a CUDA graph, or the sum of its kernels' times where it cannot be replayed: the host's share is not in it.
Memory is the peak above inputs and incoming gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import overt
from overt.mechanisms.bayesian import fused as fused_bayesian
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.evolving import fused as fused_evolving
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.maps import softmax

SHAPES = ((16, 12, 512, 64), (4, 16, 2048, 64), (1, 16, 8192, 64))
RESULTS = Path(__file__).parent.parent / "results"
BF16 = torch.bfloat16
Run = Callable[[], object]


def timed(run: Run, rep: int = 100) -> list[float]:
    """Milliseconds: the median, the first and the last tenth."""
    return [float(ms) for ms in do_bench(run, warmup=25, rep=rep, quantiles=[0.5, 0.1, 0.9])]


def milliseconds(run: Run) -> float:
    return timed(run)[0]


def replayed(run: Run) -> Run:
    """The same work as a CUDA graph."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernels_milliseconds(run: Run, repeats: int = 5) -> float:
    """The sum of the kernels' own times."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in seen.key_averages())) / repeats / 1e3


def peak_mebibytes(run: Run) -> float:
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


@triton.jit  # type: ignore[untyped-decorator]
def _exponentials(out, TURNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    x = (tl.program_id(0) * 256 + tl.arange(0, 256)).to(tl.float32) * 1e-6
    for _ in tl.static_range(TURNS):
        x = tl.exp2(-x)
    tl.store(out + tl.program_id(0) * 256 + tl.arange(0, 256), x)


def ceilings() -> dict[str, float]:
    """Bytes, products and special functions per second, as measured here."""
    source = torch.randn(2**28, device="cuda", dtype=BF16)
    to = torch.empty_like(source)
    copy = milliseconds(lambda: to.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    product = milliseconds(lambda: a @ b)
    out = torch.empty(2**22, device="cuda")
    turns = 128
    special = milliseconds(lambda: _exponentials[(2**22 // 256,)](out, TURNS=turns))
    return {
        "bytes_per_s": 2 * source.numel() * 2 / copy * 1e3,
        "flops_per_s": 2 * 8192**3 / product * 1e3,
        "special_per_s": 2**22 * turns / special * 1e3,
    }


def call_of(site: overt.mechanisms.Site, q: Tensor, k: Tensor, v: Tensor) -> overt.AttentionCall:
    return overt.AttentionCall(site, q, k, v, site.head_dim**-0.5)


def bayesian_forms(shape: tuple[int, int, int, int], compiled: bool) -> dict[str, Run]:
    batch, heads, _, width = shape
    q, k, v, to_out = (torch.randn(*shape, device="cuda", dtype=BF16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    step, ones = torch.tensor(3, device="cuda"), torch.ones(batch, device="cuda")
    layers = {
        family: BayesianLayer(overt.Bayesian(family=family), overt.mechanisms.Site(heads, width))
        .cuda()
        .train()
        for family in ("weibull", "lognormal")
    }

    def flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, inputs, to_out)

    def fused(family: str, kl: bool = True) -> Run:
        layer = layers[family]
        trained = [*inputs, *layer.parameters()] if kl else inputs

        def run() -> None:
            chain = overt.Chain(step=step, kl=kl)
            out = fused_bayesian.FORM.attend({"Bayesian": layer}, call_of(layer.site, q, k, v), chain)
            found, given = ((out, chain.kl(per_example=True)), (to_out, ones)) if kl else ((out,), (to_out,))
            torch.autograd.grad(found, trained, given)

        return run

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        chain, layer = overt.Chain(step=step), layers["weibull"]
        call = call_of(layer.site, q, k, v)
        weights = layer("weights", call.scores(), call, chain)
        return weights.to(BF16) @ v, chain.kl(per_example=True)

    def naive(form: Callable[..., tuple[Tensor, Tensor]]) -> Run:
        trained = [*inputs, *layers["weibull"].parameters()]
        return lambda: torch.autograd.grad(form(q, k, v), trained, (to_out, ones))

    forms: dict[str, Run] = {
        "sdpa, flash": flash,
        "Bayesian, naive": naive(plain),
        "Bayesian, fused": fused("weibull"),
        "Bayesian, fused, no KL": fused("weibull", kl=False),
        "Bayesian, fused, lognormal": fused("lognormal"),
    }
    if compiled:
        forms["Bayesian, compiled naive"] = naive(torch.compile(plain, dynamic=False))
    return forms


def evolving_forms(shape: tuple[int, int, int, int], compiled: bool) -> dict[str, Run]:
    batch, heads, length, width = shape
    q, k, v, to_out = (torch.randn(*shape, device="cuda", dtype=BF16) for _ in range(4))
    previous, to_next = (
        torch.randn(batch, heads, length, length, device="cuda", dtype=BF16) for _ in range(2)
    )
    layer = EvolvingLayer(overt.Evolving(), overt.mechanisms.Site(heads, width, layer=1)).cuda().train()
    bayesian = BayesianLayer(overt.Bayesian(), layer.site).cuda().train()
    inputs = [x.requires_grad_() for x in (q, k, v, previous)]
    trained = [*inputs, *layer.parameters()]
    step, ones = torch.tensor(3, device="cuda"), torch.ones(batch, device="cuda")

    def chain_of(previous: Tensor) -> overt.Chain:
        chain = overt.Chain(step=step)
        chain.maps["Evolving", "encoder", 0] = previous
        return chain

    def fused(second: BayesianLayer | None) -> Run:
        everything = trained if second is None else [*trained, *second.parameters()]
        of = {"Evolving": layer} if second is None else {"Evolving": layer, "Bayesian": second}

        def run() -> None:
            chain = chain_of(previous)
            out = fused_evolving.attend(of, call_of(layer.site, q, k, v), chain)
            found, given = [out, chain.maps["Evolving", "encoder", 1]], [to_out, to_next]
            if second is not None:
                found, given = [*found, chain.kl(per_example=True)], [*given, ones]
            torch.autograd.grad(found, everything, given)

        return run

    def plain(q: Tensor, k: Tensor, v: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        chain = chain_of(previous)
        with torch.autocast("cuda", BF16):
            call = call_of(layer.site, q, k, v)
            evolved = layer("refine", call.scores(), call, chain)
            return softmax(evolved, call.visible()).to(BF16) @ v, evolved

    def naive(form: Callable[..., tuple[Tensor, Tensor]]) -> Run:
        return lambda: torch.autograd.grad(form(q, k, v, previous), trained, (to_out, to_next))

    forms: dict[str, Run] = {
        "Evolving, naive": naive(plain),
        "Evolving, fused": fused(None),
        "both, fused": fused(bayesian),
    }
    if compiled:
        forms["Evolving, compiled naive"] = naive(torch.compile(plain, dynamic=False))
    return forms


def floors(shape: tuple[int, int, int, int], rates: dict[str, float]) -> dict[str, float]:
    """The least milliseconds that forward and backward passes can take here."""
    batch, heads, length, width = shape
    cells = batch * heads * length**2
    products = 14 * cells * width / rates["flops_per_s"]
    # Two logarithms and two exponentials per cell and pass.
    special = 2 * 4 * cells / rates["special_per_s"]
    # The previous map read, the new one written; both and the new one's gradient read, the other's written.
    maps = 6 * cells * 2 / rates["bytes_per_s"]
    convolutions = 3 * 2 * cells * heads * 9 / rates["flops_per_s"]
    return {
        "Bayesian": 1e3 * max(products, special),
        "Evolving": 1e3 * max(maps, products + convolutions),
    }


def model_forms() -> dict[str, tuple[list[overt.Mechanism], bool]]:
    return {
        "plain, sdpa": ([], False),
        "Bayesian, fused": ([overt.Bayesian()], False),
        "Bayesian, naive": ([overt.Bayesian()], True),
        "Evolving, fused": ([overt.Evolving()], False),
        "Evolving, naive": ([overt.Evolving()], True),
        "both, fused": ([overt.Evolving(), overt.Bayesian()], False),
        "both, naive": ([overt.Evolving(), overt.Bayesian()], True),
    }


def model_step(mechanisms: list[overt.Mechanism], naive: bool, batch: int, length: int) -> Run:
    """A training step of a BERT-base-sized classifier under autocast: forward, backward, AdamW."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    make: Any = BertForSequenceClassification
    settings: dict[str, Any] = {"attn_implementation": "sdpa"}
    model = make(BertConfig(**settings)).cuda().train()
    if mechanisms:
        overt.attach(model, *mechanisms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(5, 30000, (batch, length), device="cuda")
    labels = torch.arange(batch, device="cuda") % 2

    def step() -> None:
        with torch.autocast("cuda", BF16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def plainly() -> None:
        with overt.naive():
            step()

    return plainly if naive else step


def measure_model(batch: int, length: int, repeats: int) -> list[Row]:
    """All forms take turns, so that what else the host does falls on all of them."""
    steps, peaks = {}, {}
    for name, (mechanisms, naive) in model_forms().items():
        steps[name] = model_step(mechanisms, naive, batch, length)
        for _ in range(3):
            steps[name]()
        peaks[name] = peak_mebibytes(steps[name])
        torch.cuda.empty_cache()
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats):
        for name, step in steps.items():
            if turn >= 3 and "naive" in name:
                continue
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seen[name].append(1e3 * (time.perf_counter() - start))
    rows = []
    for name, times in seen.items():
        row = {"shape": [batch, length], "form": name, "ms": statistics.median(times)}
        rows.append({**row, "peak_mib": peaks[name], "low_ms": min(times), "high_ms": max(times)})
        print(rows[-1], flush=True)
    return rows


Row = dict[str, Any]


def measure_attention(
    shape: tuple[int, int, int, int], compiled: bool, rep: int
) -> tuple[list[Row], list[tuple[Row, Run]]]:
    """What was measured, and what is still to be profiled, which slows the host down ever after."""
    rows, later = [], []
    forms = bayesian_forms(shape, compiled)
    if shape[2] <= 2048:
        forms |= evolving_forms(shape, compiled)
    for name, run in forms.items():
        row: Row = {"shape": list(shape), "form": name, "device_ms": None}
        try:
            row["peak_mib"] = peak_mebibytes(run)
        except torch.OutOfMemoryError:
            print(f"{name} at {shape} does not fit on this GPU and is left out", flush=True)
            continue
        row["ms"], row["low_ms"], row["high_ms"] = timed(run, rep)
        if "naive" not in name:
            row["device_ms"] = timed(replayed(run), rep)[0]
        elif shape[2] <= 2048:
            later.append((row, run))
        rows.append(row)
        print(row, flush=True)
    return rows, later


def rivals(name: str) -> list[str]:
    mechanism = name.split(",")[0]
    return ["sdpa, flash", f"{mechanism}, naive", f"{mechanism}, compiled naive"]


def tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, headings and rows."""
    made = []
    heads = [
        "form",
        "ms",
        "10–90 %",
        "device ms",
        "× flash",
        "naive ×",
        "compiled ×",
        "peak MiB",
        "× flash ",
        "× floor",
    ]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in found["attention"]):
        of_shape = {row["form"]: row for row in found["attention"] if tuple(row["shape"]) == shape}
        floor = floors(shape, found["ceilings"])
        flash = of_shape["sdpa, flash"]
        rows = []
        for name, row in of_shape.items():
            _, naive, compiled = (of_shape.get(rival) for rival in rivals(name))
            least = floor.get("Evolving" if name.startswith("both") else name.split(",")[0])
            device = row["device_ms"]

            def gain(rival: Row | None, row: Row = row) -> str:
                if rival is None or "naive" in row["form"]:
                    return ""
                by_device = rival["device_ms"] and f" ({rival['device_ms'] / row['device_ms']:.1f})"
                return f"{rival['ms'] / row['ms']:.1f}{by_device or ''}"

            rows.append(
                [
                    name,
                    f"{row['ms']:.3f}",
                    f"{row['low_ms']:.3f}–{row['high_ms']:.3f}",
                    "" if device is None else f"{device:.3f}",
                    f"{row['ms'] / flash['ms']:.2f}"
                    + (f" ({device / flash['device_ms']:.2f})" if device is not None else ""),
                    gain(naive),
                    gain(compiled),
                    f"{row['peak_mib']:.0f}",
                    f"{row['peak_mib'] / flash['peak_mib']:.2f}",
                    "" if least is None or device is None else f"{device / least:.1f}",
                ]
            )
        made.append((f"Attention (batch, heads, length, width) = {shape}", heads, rows))
    if found["model"]:
        of_form: dict[str, Row] = {row["form"]: row for row in found["model"]}
        plain = of_form["plain, sdpa"]
        rows = []
        for name, row in of_form.items():
            naive = of_form.get(name.replace("fused", "naive"))
            faster = "" if naive is None or "fused" not in name else f"{naive['ms'] / row['ms']:.1f}"
            spread = f"{row['low_ms']:.1f}–{row['high_ms']:.1f}"
            ratio = f"{row['ms'] / plain['ms']:.2f}"
            rows.append([name, f"{row['ms']:.1f}", spread, ratio, faster, f"{row['peak_mib']:.0f}"])
        heads = ["form", "ms", "least–most", "× plain, sdpa", "naive ×", "peak MiB"]
        batch, length = plain["shape"]
        made.append((f"Training step, BERT-base size, batch {batch} × {length}", heads, rows))
    return made


def report(found: dict[str, Any], out: Path) -> None:
    rates = found["ceilings"]
    lines = [
        "# Fused kernels on a GPU",
        "",
        f"`make bench-gpu`. {found['device']}, torch {found['torch']}, triton {found['triton']}, "
        f"transformers {found['transformers']}; bfloat16, forward + backward, medians.",
        "",
        '"device" is the same work replayed as a CUDA graph, and for plain operations the sum of their '
        "kernels' times: the host's share is not in it. Memory is the peak above inputs and incoming "
        'gradients. "naive ×" and "compiled ×" are how many times faster a form is than plain operations '
        'and than torch.compile of them; in brackets, by device times. "× floor" is device time over the '
        "least that it could be: "
        "products, special functions (two logarithms and two exponentials per cell and pass) or bytes "
        "(Evolving: the maps that must be read and written), over the rates measured in the same run: "
        f"{rates['bytes_per_s'] / 1e12:.2f} TB/s copied, {rates['flops_per_s'] / 1e12:.0f} TFLOP/s of "
        f"bfloat16 products, {rates['special_per_s'] / 1e12:.2f} T exponentials/s.",
    ]
    console = Console(width=140)
    for title, heads, rows in tables(found):
        table = Table(title=title, title_justify="left")
        for place, head in enumerate(heads):
            table.add_column(head, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        lines += ["", f"## {title}", "", "| " + " | ".join(heads) + " |"]
        lines += ["|" + "---|" + "---:|" * (len(heads) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--no-compiled", action="store_true", help="leave out torch.compile of naive")
    parser.add_argument("--no-model", action="store_true", help="leave out the whole model")
    parser.add_argument("--batch", type=int, default=16, help="of the whole model")
    parser.add_argument("--length", type=int, default=512, help="of the whole model")
    parser.add_argument("--repeats", type=int, default=30, help="steps of the whole model")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds that a form is repeated for")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs a CUDA device: torch sees none")
    import transformers

    torch._dynamo.config.recompile_limit = 64
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "ceilings": ceilings(),
        "attention": [],
        "model": [],
    }
    later: list[tuple[Row, Run]] = []
    for shape in SHAPES[: given.shapes]:
        compiled = not given.no_compiled
        rows, more = measure_attention(shape, compiled, given.rep)
        found["attention"] += rows
        later += more
        torch.cuda.empty_cache()
    if not given.no_model:
        found["model"] = measure_model(given.batch, given.length, given.repeats)
    for row, run in later:
        row["device_ms"] = kernels_milliseconds(run)
    report(found, given.out)


if __name__ == "__main__":
    main()
