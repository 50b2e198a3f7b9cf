"""Traces of long inputs: the last token's raw and rollout rows at every layer, beside a plain forward pass.

Each length is measured in a process of its own, the forward pass and the trace one after the other: the pass
with torch's own choice of attention, without a cache, with the last position's logits alone. Times are the
medians of --repeats runs after one that is not counted, or of one where that took longer than 10 s. The
baseline is eager attention with `output_attentions=True`, beside the same pass; where it fails, the table
says how, and longer inputs are not tried. Weights are random unless --model names a folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import overt
from overt._files import written_whole

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
    },
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
WAYS = ("trace", "eager", "gradients")
GIB = 2**30
LONG = 10.0  # seconds of a run that is not repeated


def model_of(options: argparse.Namespace, length: int) -> Any:
    """The model, on the GPU in bfloat16 where there is one."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    cuda = torch.cuda.is_available()
    kind = torch.bfloat16 if cuda else torch.float32
    if options.model is not None:
        loaded: Any = AutoModelForCausalLM
        model = loaded.from_pretrained(options.model, dtype=kind, attn_implementation="sdpa").eval()
        return model.to("cuda") if cuda else model
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=length)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device("cuda" if cuda else "cpu"):
            made: Any = LlamaForCausalLM
            return made(config).eval()
    finally:
        torch.set_default_dtype(before)


def measured(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds after a first run, and the peak of memory in GiB: the GPU's, or the process's so far."""
    cuda = torch.cuda.is_available()
    seconds = []
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) > 1 and seconds[0] > LONG:
            break
    if cuda:
        return statistics.median(seconds[1:]), torch.cuda.max_memory_allocated() / GIB
    return statistics.median(seconds[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One way at one length, after a short run of it that compiles kernels."""
    length = options.tokens[0]
    model = model_of(options, length)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(model.device)

    def forward(ids: torch.Tensor, **more: Any) -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1, **more)

    def rows(ids: torch.Tensor, memory: int) -> None:
        trace = overt.trace(model, ids, memory=memory)
        trace.raw()
        trace.rollout()

    short = ids[:, :256]
    forward(short)
    if options.way == "eager":  # where it fails, it does so before anything is timed
        model.set_attn_implementation("eager")
        forward(ids, output_attentions=True)
        model.set_attn_implementation("sdpa")
    seconds, gib = measured(lambda: forward(ids), options.repeats)
    found = {"forward seconds": seconds, "forward GiB": gib}
    if options.way == "eager":
        model.set_attn_implementation("eager")
        seconds, gib = measured(lambda: forward(ids, output_attentions=True), options.repeats)
    elif options.way == "trace":
        rows(short, 2**16)
        seconds, gib = measured(lambda: rows(ids, options.memory), options.repeats)
    else:
        overt.trace(model, short, memory=2**16).gradients()
        trace = overt.trace(model, ids, memory=options.memory)
        trace.maps = trace.maps[:1]  # what gradients need is the model
        seconds, gib = measured(trace.gradients, options.repeats)
    return {**found, "seconds": seconds, "GiB": gib}


def in_a_process(way: str, length: int, options: argparse.Namespace) -> dict[str, float] | str:
    """What one way takes, or why it failed."""
    command = [sys.executable, __file__, "--way", way, "--tokens", str(length), "--shape", options.shape]
    command += ["--memory", str(options.memory), "--repeats", str(options.repeats)]
    command += ["--model", options.model] if options.model else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1][:100] if lines else f"ended by signal {-done.returncode}"
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2", help="of random weights")
    parser.add_argument("--model", help="folder of a model, in place of random weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8000], help="lengths of the input")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["trace", "eager"])
    parser.add_argument("--gradients", type=int, nargs="+", default=[], help="further lengths, for these")
    parser.add_argument("--memory", type=int, default=2**30, help="of overt.trace")
    parser.add_argument("--repeats", type=int, default=3, help="runs that are timed, after one that is not")
    parser.add_argument("--report", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    title = f"{options.model or options.shape}, {device}, torch {torch.__version__}"
    names = ["way", "tokens", "forward, s", "forward, GiB", "s", "GiB", "times the forward"]
    lines: list[list[str]] = []
    pairs = [(way, length) for length in options.tokens for way in options.ways]
    failed: set[str] = set()
    for way, length in [*pairs, *(("gradients", length) for length in options.gradients)]:
        found = "not tried" if way in failed else in_a_process(way, length, options)
        if isinstance(found, str):
            failed.add(way)
            lines.append([way, f"{length:,}", found, "", "", "", ""])
        else:
            numbers = [found[name] for name in ("forward seconds", "forward GiB", "seconds", "GiB")]
            ratio = found["seconds"] / found["forward seconds"]
            lines.append([way, f"{length:,}", *(f"{number:.2f}" for number in numbers), f"{ratio:.2f}"])
        print(*lines[-1], sep="  ", flush=True)
    table = Table(*names, title=title)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if options.report is not None:
        rows = [names, ["---"] * len(names), *lines]
        text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        with written_whole(options.report) as part:
            Path(part).write_text(f"# Traces of long inputs\n\n{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
