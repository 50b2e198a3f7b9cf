"""Tiles of the attention kernels for short sequences: which are right, and how long each takes.

One Bayesian attention with the published contextual prior, forward and backward, once with each choice of
tile and warps for all passes, over sequences that are padded to one length. Outputs, KL and all gradients are
compared with those of the definition.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import overt
from overt.mechanisms.kernels import attend, attend_backward, attend_forward
from overt.mechanisms.kernels.attend import Tiles

WC = overt.Bayesian.paper("WC", k=10.0, prior_beta=1e-6, d_mid=20)


def passes(attention: overt.MultiheadAttention, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Output and KL of a forward pass, after its backward pass."""
    chain = overt.Chain(step=step, examples=torch.zeros_like(step))  # a number of the CPU cannot be captured
    tokens = torch.arange(x.shape[1], device=x.device)
    padding = tokens >= x.shape[1] - torch.arange(x.shape[0], device=x.device)[:, None] % x.shape[1]
    out, _ = attention(x, x, x, need_weights=False, key_padding_mask=padding, chain=chain)
    kl = chain.kl()
    (out.float().square().sum() + kl.sum()).backward()
    return out, kl


def found(attention: overt.MultiheadAttention, x: Tensor) -> list[Tensor]:
    """Output, KL and all gradients of a pass."""
    attention.zero_grad()
    x = x.detach().requires_grad_()
    out, kl = passes(attention, x, torch.tensor(3, device=x.device))
    gradients = [p.grad for p in attention.parameters() if p.grad is not None]
    return [each.detach().clone() for each in (out, kl, x.grad, *gradients) if each is not None]


def fitted(part: str, tiles: Tiles) -> Tiles:
    """Tiles for a pass, which sums over at least 32 of its rows or columns."""
    if part == "keys":
        return tiles._replace(rows=max(32, tiles.rows))
    return tiles._replace(columns=max(32, tiles.columns))


def milliseconds(attention: overt.MultiheadAttention, x: Tensor, repeats: int) -> float:
    """The median time of a pass, forward and backward, of those that one CUDA graph replays."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    x, step = x.detach().requires_grad_(), torch.tensor(3, device=x.device)
    with torch.cuda.stream(stream):
        passes(attention, x, step)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        passes(attention, x, step)
    times = list[float]()
    for _ in range(repeats + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(float(begun.elapsed_time(ended)))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 33])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64], help="of a tile")
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--products", choices=["float32", "tf32"], default="float32", help="of float32")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tiles.py times kernels on a GPU, and torch finds none")
    if options.products == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    usual = {name: dict(getattr(attend, name)) for name in ("_LARGE", "_SMALL", "_NARROW", "_SHORT")}

    def use(tiles: Tiles | None) -> None:
        for name, table in usual.items():
            getattr(attend, name).update(
                {part: fitted(part, tiles) if tiles else own for part, own in table.items()}
            )
        attend_forward._ready.cache_clear()
        attend_backward._ready.cache_clear()

    for length in options.lengths:
        torch.manual_seed(0)
        attention = overt.MultiheadAttention(options.width, options.heads, batch_first=True, mechanisms=[WC])
        attention = attention.to("cuda", getattr(torch, options.dtype)).train()
        x = torch.randn(options.batch, length, options.width).to("cuda", getattr(torch, options.dtype))
        table = Table("tile", "warps", "largest error", "ms", title=f"{length} tokens, {options.dtype}")
        with overt.naive():
            wanted = found(attention, x)
            table.add_row("definition", "", "–", f"{milliseconds(attention, x, options.repeats):.2f}")
        choices = [Tiles(r, r, w, 2) for r, w in itertools.product(options.sizes, options.warps)]
        for tiles in (None, *choices):
            use(tiles)
            name = (
                ["as shipped", ""]
                if tiles is None
                else ["{} × {}".format(*fitted("forward", tiles)), str(tiles.warps)]
            )
            try:
                got = found(attention, x)
                pairs = zip(got, wanted, strict=True)
                error = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)
                cells = [f"{error:.1e}", f"{milliseconds(attention, x, options.repeats):.2f}"]
            except Exception as problem:  # too much shared memory, or what the compiler refuses
                cells = [type(problem).__name__, "–"]
            table.add_row(*name, *cells)
        use(None)
        Console().print(table)
    print(torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
