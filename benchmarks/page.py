"""Size and opening time of the page of a BERT-base-sized trace, against JSON of every weight.

    python benchmarks/page.py --model FOLDER   # a BERT-like encoder, such as all-MiniLM-L6-v2
    python benchmarks/page.py                  # random weights only

The model's maps at 512 tokens are repeated to 12 layers of 12 heads. Random weights are those of an untrained
BERT-base: their maps are nearly uniform, the worst case for storing few weights. The baseline is what BertViz
puts into its pages: every weight as JSON, here measured on one layer and multiplied by twelve.

    python benchmarks/page.py --long                          # rows of a long text, in place of maps
    python benchmarks/page.py --long --rows trace.safetensors # and those of a trace of states that was saved

Rows that are made up have weights between which lie six powers of ten, and half of each row in the first
token; the text is this project's documentation, over and over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import overt
from overt.cli.inputs import open_model
from overt.tracing.kept_rows import METHODS, KeptRows

TOKENS, LAYERS, HEADS = 512, 12, 12
LONG = (32_768, 32)  # tokens and layers
ROOT = Path(__file__).parent.parent


def words() -> str:
    """A long text: this project's documentation."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def real(folder: str) -> overt.Trace:
    from transformers import AutoTokenizer

    coded = AutoTokenizer.from_pretrained(folder)(
        words(), truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    traced = overt.trace(open_model(folder), dict(coded), heads=True)
    heads = traced.maps[0].shape[1]
    if HEADS % heads:
        raise SystemExit(f"the model has {heads} heads, which do not repeat to {HEADS}")
    maps = [cells.repeat(1, HEADS // heads, 1, 1) for cells in traced.maps]
    return replace(traced, maps=(maps * LAYERS)[:LAYERS], visible=[None] * LAYERS, subject=None)


def random() -> overt.Trace:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model: Any = BertModel(BertConfig())  # type: ignore[no-untyped-call]
    ids = torch.randint(0, 30000, (1, TOKENS))
    return replace(overt.trace(model.eval(), {"input_ids": ids}, heads=True), subject=None)


def json_bytes(trace: overt.Trace) -> float:
    return float(len(json.dumps(trace.maps[0].tolist())) * len(trace.maps))


def opening(path: Path, view: str, times: int = 5) -> float | None:
    """Median seconds from navigation until the view is drawn, in a headless Chromium."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from playwright.sync_api import sync_playwright

        from browser import QUIET, found  # type: ignore[import-not-found]
    except ImportError:
        return None
    program = found()
    if program is None:
        return None
    args = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=args)
        taken = []
        for _ in range(times):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            start = time.perf_counter()
            page.goto(f"{path.as_uri()}#view={view}&beside=none")
            page.wait_for_function("globalThis.overt")
            page.evaluate("overt.settled()")
            taken.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return statistics.median(taken)


def measure(name: str, trace: overt.Trace, folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    page = overt.page(trace, title=name)
    path = folder / f"{name.replace(' ', '-')}.html"
    page.save(path)
    seconds = time.perf_counter() - start
    stored = [block["kept"] for block in page.index["traces"][0]["fields"]["heads"]]
    return {
        "maps": name,
        "page MB": path.stat().st_size / 1e6,
        "JSON MB": json_bytes(trace) / 1e6,
        "kept %": 100.0 * sum(stored) / (LAYERS * HEADS * TOKENS**2),
        "made in s": seconds,
        "opens in s": opening(path, "graph"),
        "all heads in s": opening(path, "heads"),
    }


def made_up() -> overt.Trace:
    """A trace of random rows over a long text."""
    tokens, layers = LONG
    generator = torch.Generator().manual_seed(0)

    def rows() -> torch.Tensor:
        cells = (3.0 * torch.randn(1, layers, 1, tokens, generator=generator, dtype=torch.float64)).softmax(
            -1
        )
        cells[..., 0] += 1.0
        return cells / 2.0

    text = words().split()
    return overt.Trace(
        kind="causal",
        maps=[],
        mask=torch.ones(1, tokens, dtype=torch.bool),
        tokens=[(text * (1 + tokens // len(text)))[:tokens]],
        special=torch.zeros(1, tokens, dtype=torch.bool),
        rows=KeptRows([tokens - 1], tokens, {method: rows() for method in METHODS}),
    )


def measure_rows(name: str, trace: overt.Trace, folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    path = folder / f"{name.replace(' ', '-')}.html"
    page = overt.page(trace, title=name).save(path)
    seconds = time.perf_counter() - start
    entry = page.index["traces"][0]
    return {
        "rows": name,
        "tokens": f"{len(entry['tokens']):,}",
        "layers": str(entry["layers"]),
        "bytes of a weight": str(entry["fields"]["raw"][0]["bytes"]),
        "page MB": path.stat().st_size / 1e6,
        "made in s": seconds,
        "opens in s": opening(path, "text"),
        "top tokens in s": opening(path, "top"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a BERT-like encoder")
    parser.add_argument("--long", action="store_true", help="measure pages of rows")
    parser.add_argument("--rows", help="a saved trace of rows, for --long")
    options = parser.parse_args()
    if options.rows and not options.long:
        parser.error(f"--rows is for --long, got {options.rows} without it")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.long:
            if options.rows:
                trace = overt.Trace.load(options.rows)
                rows.append(measure_rows("saved", trace, Path(folder)))
            rows.append(measure_rows("made up", made_up(), Path(folder)))
        else:
            if options.model:
                rows.append(measure("real weights", real(options.model), Path(folder)))
            rows.append(measure("random weights", random(), Path(folder)))
    size = "rows" if options.long else f"{LAYERS} layers × {HEADS} heads × {TOKENS} tokens"
    print(f"{size}; {platform.machine()}, torch {torch.__version__}")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        cells = ["–" if v is None else v if isinstance(v, str) else f"{v:.1f}" for v in row.values()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
