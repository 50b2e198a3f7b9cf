"""What attention costs a ResNet in training: time and memory of a step, against timm's, eager and compiled.

A step is forward, backward and SGD on random images, in bfloat16 with channels last on a GPU. The rival is
timm's ResNet, or, where timm is not installed, the same network of overt.vision. Each form is compared with
the rival run the same way; times are medians over rounds in which the forms take turns. Memory is the peak
of a step above weights and images, in a round of its own.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overt
from generate import milliseconds
from overt.mechanisms.attention_map import AttentionMap
from overt.models import augmented_conv
from ratios import Report, compared, verdict

DEPTH, BATCH, SIDE = 50, 256, 224
TARGETS = {"aa-resnet": 1.35, "ea-aa-resnet": 1.6}  # of the rival's time
MEMORY = 1.6
CLASSES = 1000
SMALL = {"width": 16, "blocks": [1, 1, 1, 1]}
WAYS = ("eager", "compiled")
# What made the networks faster, and what there was instead: (owner, name, other value).
CHANGES: dict[str, tuple[Any, str, Any]] = {
    "values of maps are not filled up": (AttentionMap, "any_width", False),
    "one kernel widens queries, keys and values": (augmented_conv, "fits", lambda *_: False),
    "values are filled up to the width of keys": (augmented_conv, "of_equal_widths", lambda call: call),
    "positions and windows are made once in a pass": (overt.Chain, "once", lambda _chain, _key, make: make()),
    "pooling is two products": (augmented_conv, "pooled_by_products", lambda x, _: augmented_conv.pooled(x)),
}


def rival_of(options: argparse.Namespace) -> tuple[str, nn.Module]:
    """The plain network, and whose it is."""
    try:
        if options.small:
            raise ImportError
        import timm  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, RuntimeError):  # timm needs torchvision, which may not fit torch
        return "overt.vision's", network("resnet", options)
    return "timm's", timm.create_model(f"resnet{options.depth}", num_classes=CLASSES)


def network(kind: str, options: argparse.Namespace) -> nn.Module:
    """A network of overt.vision."""
    sizes = SMALL if options.small else {}
    return overt.vision.resnet(f"{kind}-{options.depth}", CLASSES, size=options.side, **sizes)  # type: ignore[arg-type]


class Step:
    """A training step of a network."""

    def __init__(self, net: nn.Module, images: Tensor, labels: Tensor, compiled: bool) -> None:
        self.images, self.labels = images, labels
        net = net.to(images.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
        self.net = torch.compile(net) if compiled else net

    def __call__(self) -> None:
        """Forward, backward and update; waits for the GPU."""
        kind = self.images.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = self.net(self.images)
        loss: Tensor = F.cross_entropy(logits.float(), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()


def peak(run: Callable[[], None]) -> float:
    """MiB of GPU memory that a run takes above what is there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def kernels(run: Callable[[], None], most: int) -> tuple[str, list[list[str]]]:
    """Time and number of all kernels of a run, and those that take the most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
    events = sorted(trace.key_averages(), key=lambda event: -event.device_time_total)[:most]
    whole = sum(event.device_time_total for event in trace.key_averages())
    calls = sum(event.count for event in trace.key_averages() if event.device_time_total > 0)
    return f"{whole / 1000:.1f} ms of {calls:,} kernels", [
        [
            event.key[:80].replace("|", "/"),
            f"{event.device_time_total / 1000:.2f}",
            f"{event.device_time_total / whole:.0%}",
            str(event.count),
        ]
        for event in events
    ]


def without_changes(steps: dict[str, Step], baseline: str, rounds: int) -> tuple[list[str], list[list[str]]]:
    """Times as ratios to the baseline's, as changes are undone one after the other, the earlier ones too."""
    lines = []
    with ExitStack() as undone:
        for label, change in {"as it is": None, **CHANGES}.items():
            if change is not None:
                undone.enter_context(patch.object(*change))
            seen = dict(compared(milliseconds(dict(steps), rounds), baseline, {}))
            cells = [f"{seen[name][0]} ms, {seen[name][1]}" for name in steps if name != baseline]
            lines.append([label if change is None else f"without: {label}", *cells])
    return [name for name in steps if name != baseline], lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=DEPTH, choices=(34, 50, 101, 152))
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--side", type=int, default=SIDE, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS), help="eager, compiled or both")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a small network, to see that it runs")
    parser.add_argument("--profile", type=int, default=0, help="show so many kernels of each eager network")
    parser.add_argument("--changes", action="store_true", help="time without what made the networks faster")
    parser.add_argument("--report", type=Path, help="file for the tables")
    options = parser.parse_args()
    for name in ("batch", "side", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    ways = options.ways.split(",")
    if not set(ways) <= set(WAYS):
        parser.error(f"--ways must be of {', '.join(WAYS)}, got {options.ways}")
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    report = Report()
    report.say(
        f"torch {torch.__version__}, {where}, {platform.machine()}; medians of {options.rounds} rounds"
    )
    images = torch.randn(options.batch, 3, options.side, options.side, device=options.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (options.batch,), device=options.device)
    for way in ways:
        whose, plain = rival_of(options)
        baseline = f"{whose} resnet-{options.depth}"
        nets = {baseline: plain}
        nets |= {f"{kind}-{options.depth}": network(kind, options) for kind in TARGETS}
        began = time.perf_counter()
        steps = {name: Step(net, images, labels, way == "compiled") for name, net in nets.items()}
        seen = milliseconds(dict(steps), options.rounds)
        on_target = options.device == "cuda" and not options.small
        targets = {f"{kind}-{options.depth}": most for kind, most in TARGETS.items()} if on_target else {}
        columns = ["ms", "× plain", "spread", "target"]
        lines = [[name, *cells] for name, cells in compared(seen, baseline, targets)]
        if options.device == "cuda":
            columns += ["peak MiB", "× plain", "target"]
            used = {name: peak(step) for name, step in steps.items()}
            for line in lines:
                ratio = used[line[0]] / used[baseline]
                aim = verdict(ratio, MEMORY if line[0] in targets else None)
                line += [f"{used[line[0]]:,.0f}", f"{ratio:.2f}", aim]
        precision = "bfloat16" if options.device == "cuda" else "float32"
        title = f"Training step, {options.batch} images of {options.side}², {precision}, channels last, {way}"
        report.table(title, columns, lines)
        report.say("", f"{time.perf_counter() - began:.0f} s in all")
        if options.changes and way == "eager":
            title = "Changes undone one after the other, × plain (pooling's gradient is then torch's, wrong)"
            report.table(title, *without_changes(steps, baseline, options.rounds))
        if options.profile and options.device == "cuda" and way == "eager":
            for name, step in steps.items():
                total, rows = kernels(step, options.profile)
                report.table(f"Kernels of {name}: {total}", ["ms", "share", "calls"], rows)
        if options.report is not None:  # after each way: compiling takes long
            options.report.write_text("\n".join(report.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
