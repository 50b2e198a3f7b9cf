"""GLUE's files, and how `benchmarks/kl_weight.py` chooses."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import overt
from overt.data.glue import Row, load

# --- Reading ---


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_quotation_marks_do_not_join_rows(tmp_path: Path) -> None:
    rows = 'sentence\tlabel\n" a good film\t1\nno " end\t0\n'
    written(tmp_path / "SST-2", train__tsv=rows, dev__tsv=rows)
    train, dev = load(tmp_path, "SST-2")
    assert train == dev == [Row(('" a good film',), 1), Row(('no " end',), 0)]


def test_cola_has_no_header_and_may_be_gzipped(tmp_path: Path) -> None:
    rows = "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tThe sailors rode the.\n"
    folder = tmp_path / "glue" / "CoLA"
    folder.mkdir(parents=True)
    for part in ("train", "dev"):
        (folder / f"{part}.tsv.gz").write_bytes(gzip.compress(rows.encode()))
    train, _ = load(tmp_path, "CoLA")
    assert train == [Row(("The sailors rode.",), 1), Row(("The sailors rode the.",), 0)]


def test_mrpc_is_microsofts_file_without_the_rows_of_dev(tmp_path: Path) -> None:
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = "1\t10\t11\ta\tb\n0\t12\t13\tc\td\n1\t11\t10\te\tf\n"
    folder = written(
        tmp_path / "MRPC",
        msr_paraphrase_train__txt=head + rows,
        dev_ids__tsv="10\t11\n",
        dev__tsv=head + "1\t10\t11\ta\tb\n",
    )
    train, dev = load(tmp_path, "MRPC")
    assert train == [Row(("c", "d"), 0), Row(("e", "f"), 1)]
    assert dev == [Row(("a", "b"), 1)]
    (folder / "dev_ids.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev_ids\.tsv, which lists them, is missing"):
        load(tmp_path, "MRPC")


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    written(tmp_path / "SST-2", train__tsv="sentence\tlabel\nfine\t1\nbad\t2\n", dev__tsv="")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: the label must be 0 or 1, got '2'"):
        load(tmp_path, "SST-2")
    written(tmp_path / "SST-2", train__tsv="sentence\tlabel\nfine\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: SST-2 needs at least 2 columns, got 1"):
        load(tmp_path, "SST-2")
    with pytest.raises(ValueError, match="must be one of CoLA, MRPC, SST-2, got 'RTE'"):
        load(tmp_path, "RTE")
    with pytest.raises(FileNotFoundError, match=r"has no CoLA data: put train\.tsv and dev\.tsv"):
        load(tmp_path, "CoLA")


# --- Choosing ---


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield importlib.import_module("kl_weight")


def runs(bench: ModuleType, drops: dict[str, dict[str, float]], collapsed: str | None = None) -> list[Any]:
    """Three seeds of every form; `drops` has points lost by task and weight."""
    made = []
    for task in bench.TASKS:
        for form in ["plain", *(f"{weight:g}" for weight in bench.WEIGHTS)]:
            for seed in bench.CHOOSING:
                score = 80.0 + seed - drops.get(task, {}).get(form, 0.0)
                row = {"stage": "choose", "task": task, "form": form, "seed": seed, "score": score}
                made.append({**row, "collapsed": form == collapsed and seed == 1})
    return made


def test_the_largest_weight_that_does_no_harm_is_chosen(bench: ModuleType) -> None:
    tasks = list(bench.TASKS)
    assert bench.choose(runs(bench, {}), tasks) == (1.0, True)
    hurt = {"CoLA": {"1": 5.0, "0.1": 1.01, "0.03": 1.0, "0": 9.0}}
    assert bench.choose(runs(bench, hurt), tasks) == (0.03, True)
    assert bench.choose(runs(bench, hurt, collapsed="0.03"), tasks) == (0.01, True)
    # One that passes above one that does not is still the largest.
    assert bench.choose(runs(bench, {"MRPC": {"0.01": 2.0, "1": 2.0}}), tasks) == (0.1, True)


def test_where_none_passes_the_smallest_is_taken_and_said_to_fail(bench: ModuleType) -> None:
    hurt = {"SST-2": {f"{weight:g}": 1.5 for weight in bench.WEIGHTS}}
    assert bench.choose(runs(bench, hurt), list(bench.TASKS)) == (0.003, False)


def test_the_default_is_what_the_stored_result_chooses(bench: ModuleType) -> None:
    stored = json.loads((bench.RESULTS / "kl_weight.json").read_text())
    chosen, passed = bench.choose(stored["runs"], list(bench.TASKS))
    assert passed
    assert chosen == overt.Bayesian().kl_weight
    done = {(row["stage"], row["task"], row["form"], row["seed"]) for row in stored["runs"]}
    wanted = bench.jobs_of("choose", list(bench.TASKS), None)
    assert done == {*wanted, *bench.jobs_of("report", list(bench.TASKS), chosen)}


def test_the_report_is_what_the_stored_result_says(bench: ModuleType, tmp_path: Path) -> None:
    stored = json.loads((bench.RESULTS / "kl_weight.json").read_text())
    bench.report(stored, list(bench.TASKS), tmp_path)
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
