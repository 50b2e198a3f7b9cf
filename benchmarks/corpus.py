"""A run over a corpus, reading and writing included, against plain forward passes with the same batches.

Plain passes use torch's attention (sdpa) in inference mode, with ids that are tokenised already. Both compute
with one thread. Shares are of processor time, which other work on the machine changes little; times by the
clock stand beside them. Weights are random, in MiniLM's shape, unless --model names a folder; texts are
random words, unless --input names a file. Two workers are compared with one by the clock, over the middle of
each run, when all processes are at work: this needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from overt.corpus import plan
from overt.corpus.running import prepare_worker, run
from overt.corpus.tracer import Tracer

TARGETS = {("raw", "rollout"): 0.85, ("raw", "rollout", "flow"): 0.75}
WORDS = 2000


def random_model(folder: Path) -> str:
    """A model in MiniLM's shape with random weights, and a tokenizer of whole words."""
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(WORDS))]
    tokenizer: Any = BertTokenizer
    tokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    network: Any = BertModel
    network(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    return str(folder)


def texts_of(options: argparse.Namespace) -> list[str]:
    """The corpus."""
    if options.input is not None:
        lines: list[str] = options.input.read_text(encoding="utf-8").splitlines()[: options.sentences]
        return [line for line in lines if line.strip()]
    generator = random.Random(0)
    count = options.tokens - 2
    return [
        " ".join(f"w{generator.randrange(WORDS)}" for _ in range(count)) for _ in range(options.sentences)
    ]


def plain(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Seconds of processor time, and by the clock, of forward passes."""
    clock, busy = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        for batch in batches:
            model(**batch)
    return time.process_time() - busy, time.perf_counter() - clock


class Ticks:
    """Notes when rows are done."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []

    def begin(self, total: int, done: int) -> None:
        """Nothing is done yet."""
        assert total > done == 0

    def advance(self, rows: int) -> None:
        """Note it."""
        self.times.append((time.perf_counter(), rows))

    def rate(self) -> float:
        """Rows a second between a third and nine tenths of the run."""
        count = sum(rows for _, rows in self.times)
        done, inside = 0, []
        for when, rows in self.times:
            done += rows
            if count / 3 <= done <= 0.9 * count:
                inside.append((when, done))
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model")
    parser.add_argument("--input", type=Path, help="text, a sentence per line")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32, help="of random texts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", action="store_true", help="compare two workers with one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.model or random_model(folder / "model")
        texts = texts_of(options)
        corpus = folder / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        if options.workers:
            compare_workers(folder, corpus, path, len(texts))
        else:
            compare_forwards(folder, corpus, path, texts, options.repeats)


def compare_forwards(folder: Path, corpus: Path, path: str, texts: list[str], repeats: int) -> None:
    prepare_worker()
    opened = Tracer(path).open()
    coded = opened.tokenizer(texts, truncation=True, max_length=opened.length)
    cut = plan.batches([len(ids) for ids in coded["input_ids"]], plan.BATCH)
    batches = [
        dict(opened.tokenizer.pad({k: [v[n] for n in places] for k, v in coded.items()}, return_tensors="pt"))
        for places in cut
    ]
    model: Any = opened.model
    model.set_attn_implementation("sdpa")
    tokens = sum(len(ids) for ids in coded["input_ids"]) / len(texts)
    print(f"{len(texts)} texts of {tokens:.1f} tokens, {len(batches)} batches, {repeats} times, one thread")
    seen: dict[Any, list[tuple[float, float]]] = {"plain": [], **{methods: [] for methods in TARGETS}}
    plain(model, batches[:1])
    for methods in TARGETS:  # compiles the solver, once
        run(corpus, path, folder / f"first {len(methods)}", methods=methods, workers=1)
    for number in range(repeats):
        seen["plain"].append(plain(model, batches))
        for methods in TARGETS:
            busy = time.process_time()
            done = run(corpus, path, folder / f"{number} {len(methods)}", methods=methods, workers=1)
            assert done.errors == 0
            seen[methods].append((time.process_time() - busy, done.seconds))
    best = [statistics.median(entry) for entry in zip(*seen["plain"], strict=True)]
    print(f"plain forward passes: {best[0]:.1f} s of processor time, {best[1]:.1f} s by the clock")
    for methods, target in TARGETS.items():
        mid = [statistics.median(entry) for entry in zip(*seen[methods], strict=True)]
        shares = [before[0] / after[0] for before, after in zip(seen["plain"], seen[methods], strict=True)]
        share = statistics.median(shares)
        verdict = "met" if share >= target else "missed"
        print(
            f"{' + '.join(methods)}: {mid[0]:.1f} s, {mid[1]:.1f} s by the clock; share of plain passes "
            f"{share:.2f} ({min(shares):.2f}–{max(shares):.2f}; by the clock {best[1] / mid[1]:.2f}); "
            f"≥ {target}: {verdict}"
        )


def compare_workers(folder: Path, corpus: Path, path: str, rows: int) -> None:
    rates = []
    for workers in (1, 2):
        ticks = Ticks()
        shard = max(32, rows // 16)
        run(corpus, path, folder / f"workers {workers}", shard=shard, workers=workers, progress=ticks)
        rates.append(ticks.rate())
        print(f"{workers} workers: {rates[-1]:.1f} sentences a second")
    print(
        f"two workers: {rates[1] / rates[0]:.2f} times one; ≥ 1.8: "
        f"{'met' if rates[1] >= 1.8 * rates[0] else 'missed'}"
    )


if __name__ == "__main__":
    main()
