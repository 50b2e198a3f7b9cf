"""How `benchmarks/kl_weight.py` chooses."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import overt


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield importlib.import_module("kl_weight")


def runs(bench: ModuleType, drops: dict[str, dict[str, float]], collapsed: str | None = None) -> list[Any]:
    """Three seeds of every form; `drops` has points lost by task and weight."""
    made = []
    for task in bench.STEPS:
        for form in ["plain", *(f"{weight:g}" for weight in bench.WEIGHTS)]:
            for seed in bench.CHOOSING:
                score = 80.0 + seed - drops.get(task, {}).get(form, 0.0)
                row = {"stage": "choose", "task": task, "form": form, "seed": seed, "score": score}
                made.append({**row, "collapsed": form == collapsed and seed == 1})
    return made


def test_the_largest_weight_that_does_no_harm_is_chosen(bench: ModuleType) -> None:
    tasks = list(bench.STEPS)
    assert bench.choose(runs(bench, {}), tasks) == (1.0, True)
    hurt = {"CoLA": {"1": 5.0, "0.1": 1.01, "0.03": 1.0, "0": 9.0}}
    assert bench.choose(runs(bench, hurt), tasks) == (0.03, True)
    assert bench.choose(runs(bench, hurt, collapsed="0.03"), tasks) == (0.01, True)
    # One that passes above one that does not is still the largest.
    assert bench.choose(runs(bench, {"MRPC": {"0.01": 2.0, "1": 2.0}}), tasks) == (0.1, True)


def test_where_none_passes_the_smallest_is_taken_and_said_to_fail(bench: ModuleType) -> None:
    hurt = {"SST-2": {f"{weight:g}": 1.5 for weight in bench.WEIGHTS}}
    assert bench.choose(runs(bench, hurt), list(bench.STEPS)) == (0.003, False)


def test_the_default_is_what_the_stored_result_chooses(bench: ModuleType) -> None:
    stored = json.loads((bench.RESULTS / "kl_weight.json").read_text())
    chosen, passed = bench.choose(stored["runs"], list(bench.STEPS))
    assert passed
    assert chosen == overt.Bayesian().kl_weight
    done = {(row["stage"], row["task"], row["form"], row["seed"]) for row in stored["runs"]}
    wanted = bench.jobs_of("choose", list(bench.STEPS), None)
    assert done == {*wanted, *bench.jobs_of("report", list(bench.STEPS), chosen)}


def test_the_report_is_what_the_stored_result_says(bench: ModuleType, tmp_path: Path) -> None:
    stored = json.loads((bench.RESULTS / "kl_weight.json").read_text())
    bench.report(stored, list(bench.STEPS), tmp_path)
    assert (tmp_path / "kl_weight.md").read_text() == (bench.RESULTS / "kl_weight.md").read_text()


def test_the_scores_of_the_benchmark(bench: ModuleType) -> None:
    labels, predicted = [1, 1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 0, 1, 1, 0, 1]
    assert bench.accuracy(labels, predicted) == 6 / 8
    right, wrong = (4 * 2 - 1 * 1), ((4 + 1) * (4 + 1) * (2 + 1) * (2 + 1)) ** 0.5
    assert bench.matthews(labels, predicted) == pytest.approx(right / wrong)
    assert bench.matthews(labels, [1] * 8) == 0.0


def test_flatness_is_1_for_uniform_rows_and_0_for_sharp_ones(bench: ModuleType) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    uniform = (mask / mask.sum(dim=1, keepdim=True)).view(1, 2, 1, 1, 4).expand(2, 2, 3, 4, 4)
    torch.testing.assert_close(bench.flatness(uniform, mask), torch.ones(2, dtype=torch.float64))
    sharp = torch.zeros(2, 2, 3, 4, 4)
    sharp[..., 0] = 1.0
    torch.testing.assert_close(bench.flatness(sharp, mask), torch.zeros(2, dtype=torch.float64))


def test_held_out_rows_are_a_tenth_and_not_trained_on(bench: ModuleType, tmp_path: Path) -> None:
    rows = "sentence\tlabel\n" + "".join(f"s{n}\t{n % 2}\n" for n in range(40))
    written(tmp_path / "SST-2", train__tsv=rows, dev__tsv=rows)
    train, held = bench.parts_of(tmp_path, bench.Job("choose", "SST-2", "plain", 3))
    other, _ = bench.parts_of(tmp_path, bench.Job("choose", "SST-2", "plain", 4))
    assert (len(train), len(held)) == (36, 4)
    assert not set(train) & set(held)
    assert train != other
    whole, dev = bench.parts_of(tmp_path, bench.Job("report", "SST-2", "plain", 10))
    assert len(whole) == len(dev) == 40
