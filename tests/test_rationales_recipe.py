"""`overt reproduce ea-table-8` on generated reviews, and its report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pools
from overt._workers import side_by_side
from overt.data import planted
from overt.data.eraser import Example, Prediction, write_predictions
from overt.recipes import ea_rationales, rationale_training, reproduce
from overt.recipes._recipe import Outcome
from overt.recipes._training import one_thread
from overt.recipes.ea_rationales import MOVIES, PUBLISHED, by_method, plan, report_table_8, row_of, rows_of
from overt.recipes.rationale_training import RationaleTraining, Reviews

pytest.importorskip("lime", reason="needs the extra rationales")
pytest.importorskip("captum", reason="needs the extra rationales")
pytest.importorskip("accelerate", reason="needs the extra rationales")


def test_the_passage_decides_generated_reviews_and_is_their_rationale() -> None:
    splits = planted.planted_reviews({"train": 40, "test": 10})
    assert splits == planted.planted_reviews({"train": 40, "test": 10})
    for example in splits["train"]:
        (start, end) = example.evidence[0]
        assert set(example.words[start:end]) <= set(planted.SENTIMENT[example.label])
        counts = [sum(word in side for word in example.words) for side in planted.SENTIMENT]
        assert counts[example.label] == 3
        assert counts[1 - example.label] == 1
        assert len(example.words) > 30
    assert {*splits["train"][0].words} <= {*planted.vocabulary()}
    assert [example.label for example in splits["test"]] == [0, 1] * 5


def test_predictions_for_generated_reviews_can_be_written(tmp_path: Path) -> None:
    (example,) = planted.planted_reviews({"test": 1})["test"]
    prediction = Prediction(np.zeros(len(example.words)), example.evidence, [0.5, 0.5])
    write_predictions(tmp_path / "out.jsonl", "movies", [example], [prediction])
    (written,) = json.loads((tmp_path / "out.jsonl").read_text())["rationales"]
    ((start, end),) = example.evidence
    assert written["hard_rationale_predictions"] == [{"start_token": start, "end_token": end}]


def test_settings_are_those_of_the_benchmark_and_the_top_layers_train(tmp_path: Path) -> None:
    splits = {split: [Example("a", ("good",), 1, ((0, 1),))] * 1600 for split in ("train", "val", "test")}
    training = plan(Reviews("movie reviews", splits, ("negative", "positive"), False), False, None)
    assert (training.updates, training.batch, training.learning_rate) == (8000, 4, 2e-5)
    assert (training.clip, training.patience, training.window, training.hidden) == (10, 5, 512, 128)
    path = rationale_training.small_encoder(tmp_path, planted.vocabulary())
    one = RationaleTraining(1, layers=1, window=32, hidden=4)
    model = rationale_training.network(path, 2, rows_of()["Evolving"].mechanisms, one, 0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("embeddings" in name or ".layer.0.output" in name for name in trained)
    assert any("encoder.encoder.layer.1.output" in name for name in trained)
    assert any(".overt." in name for name in trained)
    assert {"lstm.onward.weight_ih_l0", "lstm.back.weight_ih_l0", "query"} <= trained
    with pytest.raises(ValueError, match="the encoder must have at least 3 layers to train, got 2"):
        rationale_training.network(path, 2, (), RationaleTraining(1, layers=3, window=32), 0)


def test_models_with_the_same_seed_start_alike_and_see_the_same_batches(tmp_path: Path) -> None:
    path = rationale_training.small_encoder(tmp_path, planted.vocabulary())
    training = RationaleTraining(1, layers=0, window=32, hidden=4)
    plain, evolving = (
        rationale_training.network(path, 2, rows_of()[form].mechanisms, training, 3).state_dict()
        for form in ("plain", "Evolving")
    )
    for name, value in plain.items():
        torch.testing.assert_close(evolving[name], value, msg=name)


def numbers(auprc: float, refused: bool = False) -> dict[str, Any]:
    measures = {
        "auprc": auprc,
        "comprehensiveness": auprc / 2,
        "sufficiency": 0.1,
        "morf": [1.0],
        "lerf": [1.0],
    }
    methods = {method: {"texts": 199, **measures} for method in ("pooling", "lime", "value-zeroing")}
    methods["random"] = {"texts": 199, **measures, "auprc": 0.3}
    if refused:
        del methods["value-zeroing"]
    return {
        "accuracy": 0.9,
        "macro F1": 0.9,
        "valid_accuracy": 0.9,
        "parameters": 10,
        "added": 1,
        "methods": methods,
        "refused": {"value-zeroing": "it runs layers alone"} if refused else {},
        "run": {"date": "2026-01-01"},
    }


def outcome() -> Outcome:
    config = {
        "data": {
            "name": "movie reviews",
            "sizes": {"train": 1600, "val": 200, "test": 199},
            "shares": {"train": 0.0935, "val": 0.072, "test": 0.314},
        },
        "model": "encoder",
        "training": RationaleTraining(8000).settings(),
        "epochs": 20,
        "lime_samples": 1000,
        "some": 60,
        "rows": {name: row.settings() for name, row in rows_of().items()},
    }
    per_seed = {
        seed: {
            "plain": numbers(0.30 + seed / 100),
            "Evolving": numbers(0.32 + seed / 100 + seed / 1000, True),
        }
        for seed in range(5)
    }
    return Outcome(config, per_seed)


def test_the_report_has_paired_differences_published_numbers_and_reasons() -> None:
    report = report_table_8(outcome())
    measured = dict(report.grids[1].rows)
    assert measured["plain, LIME, published"][2] == "0.280"
    assert measured["plain, attention, published"][2] == "0.417"
    assert measured["plain, EA-attention, published"][2] == "0.435"
    assert measured["Evolving, LIME, published"][2] == "0.313"
    assert measured["Evolving, value zeroing"][:3] == ["–", "–", "–"]
    assert measured["plain, LIME"][:3] == ["5", "199", "0.320±0.016"]
    gains = next(grid for grid in report.grids if grid.title.startswith("AUPRC"))
    rows = dict(gains.rows)
    assert set(rows) == {
        "Evolving, LIME − plain, LIME",
        "Evolving, pooling attention − plain, pooling attention",
    }
    lime = dict(zip(gains.columns, rows["Evolving, LIME − plain, LIME"], strict=True))
    assert lime["× 100"] == "2.20"
    assert lime["published, LIME"] == "3.30"
    faithful = next(grid for grid in report.grids if grid.title.startswith("Comprehensiveness"))
    assert "Evolving, random − plain, random" in dict(faithful.rows), "a control, where it can differ"
    told = " ".join(report.notes)
    assert "Evolving, value zeroing: it runs layers alone" in told
    assert "a constant scorer gets 0.66 here" in told
    assert "31.4 %" in told
    assert "the class does not depend on what this token draws on" in told, (
        "test_rationales_evaluate.py shows it"
    )


def test_published_rows_are_those_of_both_tables() -> None:
    assert len(PUBLISHED) == 5
    assert all(len(rows) == 4 for rows in PUBLISHED.values())
    assert MOVIES["Evolving, LIME"] == (0.975, 0.313, 0.194, 0.089)
    assert PUBLISHED["e-SNLI"]["plain, LIME"] == (0.960, 0.513, 0.437, 0.389), "not Table 8's misprint"


def test_bayesian_attention_goes_without_lime() -> None:
    assert [name for name, row in rows_of().items() if "lime" in row.methods] == ["plain", "Evolving"]


OPTIONS = ["--epochs", "1", "--lime-samples", "10", "--forms", "plain,Evolving"]


@pytest.mark.slow
def test_it_runs_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(planted, "SIZES", {"train": 32, "val": 8, "test": 1})
    few = ("pooling", "value-zeroing", "lime")
    monkeypatch.setattr(ea_rationales, "METHODS", few)
    monkeypatch.chdir(tmp_path)
    arguments = {"seeds": 1, "device": "cpu", "extra": OPTIONS}
    result = reproduce.run("ea-table-8", **arguments)  # type: ignore[arg-type]
    rows = result["per_seed"]["0"]
    assert set(rows) == {"plain", "Evolving"}
    assert set(rows["plain"]["methods"]) == set(few)
    assert "value-zeroing" in rows["Evolving"]["refused"]
    run = tmp_path / "runs" / "rationales" / "planted-reviews"
    assert (run / "plain" / "seed-0" / "model" / "config.json").is_file()
    assert not (run / "plain" / "seed-0" / "weights").exists()
    assert not (run / "plain" / "seed-0" / "checkpoints").exists()
    long = by_method(Outcome({}, {0: rows}))
    assert np.isfinite(long.per_seed[0][row_of("plain", "pooling")]["comprehensiveness"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "Evolving"])
def test_a_run_that_is_interrupted_while_it_measures_goes_on_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(planted, "SIZES", {"train": 32, "val": 8, "test": 2})
    monkeypatch.setattr(ea_rationales, "METHODS", ("pooling", "random"))
    monkeypatch.chdir(tmp_path)
    extra = ["--epochs", "1", "--lime-samples", "10", "--forms", form]
    arguments = {"seeds": 1, "device": "cpu", "extra": extra}
    evaluate, seen = ea_rationales.evaluate, []

    def interrupted_once(
        model: Any, tokenizer: Any, texts: Any, marked: Any, methods: Any, **how: Any
    ) -> Any:
        seen.append((list(methods), {name: value.clone() for name, value in model.state_dict().items()}))
        keep, first = how.pop("done"), len(seen) == 1

        def done(method: str, found: Any) -> None:
            keep(method, found)
            if first:
                raise KeyboardInterrupt

        return evaluate(model, tokenizer, texts, marked, methods, **how, done=done)

    monkeypatch.setattr(ea_rationales, "evaluate", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run("ea-table-8", **arguments)  # type: ignore[arg-type]
    folder = tmp_path / "runs" / "rationales" / "planted-reviews" / form / "seed-0"
    assert (folder / "pooling.json").is_file()
    assert not (folder / "random.json").exists()

    def train_again(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patched:
        patched.setattr(rationale_training, "fit", train_again)
        numbers = reproduce.run("ea-table-8", **arguments)["per_seed"]["0"][form]  # type: ignore[arg-type]
    assert [methods for methods, _ in seen] == [["pooling", "random"], ["random"]]
    for name, value in seen[0][1].items():
        assert torch.equal(seen[1][1][name], value), name
    assert set(numbers["methods"]) == {"pooling", "random"}
    assert numbers["updates"] == 2
    assert 0 <= numbers["accuracy"] <= 1
    # Of a model that is trained anew, everything is measured anew.
    (folder / "result.json").unlink()
    (folder / "trained.json").unlink()
    (tmp_path / "runs" / "rationales" / "results" / "ea-table-8.json").unlink()
    reproduce.run("ea-table-8", **arguments)  # type: ignore[arg-type]
    assert [methods for methods, _ in seen[2:]] == [["pooling", "random"]]


def test_progress_of_measuring_is_told_to_the_last_step(tmp_path: Path) -> None:
    """The bar's steps are updates, and as many as take about as long as the measures."""
    from overt.recipes._rows import Task

    splits = planted.planted_reviews({"train": 16, "val": 4, "test": 3})
    reviews = Reviews("planted reviews", splits, ("negative", "positive"), True)
    path = rationale_training.small_encoder(tmp_path / "encoder", planted.vocabulary())
    from transformers import AutoTokenizer

    shared = ea_rationales.Shared(reviews, AutoTokenizer.from_pretrained(path), path, 80, False)
    row = rationale_training.RationaleRow("plain", (), ("pooling", "lime", "random"))
    training = plan(reviews, True, 1)
    task = Task("plain", 0, row, training, tmp_path / "run", "cpu", {"row": row.settings()})
    told: list[int] = []
    ea_rationales.perform(task, shared, told.append)
    steps = ea_rationales.steps_of(task, shared)
    assert sum(told) == training.updates + sum(steps.values())
    assert steps["lime"] > steps["random"]
    assert len(told) > len(steps)
    assert not (tmp_path / "run" / "model").exists()


def test_processes_side_by_side_keep_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIME's regression would take as many threads as there are cores in each of them, beside PyTorch's."""
    pytest.importorskip("sklearn", reason="needs the extra rationales")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    ((_, found),) = side_by_side([0], pools.threads, None, 1, one_thread)
    assert found == {"OpenMP": [1], "BLAS": [1]}
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_movies_need_a_pretrained_encoder(tmp_path: Path) -> None:
    folder = tmp_path / "eraser" / "movies"
    folder.mkdir(parents=True)
    (folder / "docs.json").write_text(json.dumps({"a": "good film"}))
    line = {"annotation_id": "a", "classification": "POS", "evidences": []}
    for split in ("train", "val", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(line))
    with pytest.raises(ValueError, match="fine-tunes a pretrained model: give --model"):
        reproduce.run("ea-table-8", data=tmp_path, out=tmp_path / "out", device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no movies of ERASER"):
        reproduce.run("ea-table-8", data=tmp_path / "empty", out=tmp_path / "out", device="cpu")


def test_the_guide_says_what_was_measured() -> None:
    root = Path(__file__).parents[1]
    guide, remark, readme = (
        " ".join((root / name).read_text().split())
        for name in ("docs/rationales.md", "results/ea-table-8.remark.md", "README.md")
    )
    stored = json.loads((root / "results" / "ea-table-8.json").read_text())
    tables = {table["title"]: table for table in stored["tables"]}
    means = tables["Rationales of the test texts"]
    seeds = [sum(form in rows for rows in stored["per_seed"].values()) for form in rows_of()]
    assert seeds == [5, 5, 3]
    assert "five seeds of plain and of evolving attention, three of Bayesian" in guide
    assert "All 13 models give this order of methods; numbers are means by form of attention" in guide
    assert "All 13 models give this order of methods, as far as" in remark
    assert "movie reviews, five seeds, H200" in readme

    def span(key: str, method: str) -> str:
        column = means["columns"].index(key)
        cells = dict(means["rows"])
        shown = [cells[row_of(form, method)][column] for form in rows_of() if row_of(form, method) in cells]
        found = sorted({f"{float(each.split('±')[0]):.2f}" for each in shown if each != "–"})
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"

    ap, comp = "AP ↑", "comp. ↑"
    assert f"the attention that pools (average precision {span(ap, 'pooling')}; random scores" in guide
    assert f"random scores {span(ap, 'random')})" in guide
    assert span(ap, "lime") == span(ap, "raw")
    assert (
        f"LIME and raw attention of the last layer are hardly above random scores ({span(ap, 'raw')})"
        in guide
    )
    assert f"blank-out names matters most (comprehensiveness {span(comp, 'blankout')})" in guide
    assert f"integrated gradients ({span(comp, 'integrated')}), then, in no fixed order" in guide
    assert f"in no fixed order, those of LIME ({span(comp, 'lime')}) and of" in guide
    assert f"of the attention that pools ({span(comp, 'pooling')}); random scores" in guide
    assert f"random scores have {span(comp, 'random')}" in guide
    assert f"what people marked (AP {span(ap, 'pooling')}; random scores {span(ap, 'random')})" in remark
    assert (
        f"blank-out ({span(ap, 'blankout')}) and the norm of the gradient ({span(ap, 'gradients')}),"
        in remark
    )
    assert f"then by blank-out and the norm of the gradient ({span(ap, 'gradients')})" in guide
    assert f"({span(ap, 'lime')}), rollout and flow are below ({span(ap, 'rollout')})" in remark
    assert span(ap, "rollout") == span(ap, "flow")
    assert (span(ap, "value-zeroing"), span(ap, "integrated")) == ("0.36 to 0.37", "0.38")
    assert "integrated gradients and value zeroing (0.36 to 0.38)" in remark
    # What is said of all seeds and forms holds in each.
    for rows in stored["per_seed"].values():
        for form, numbers in rows.items():
            found = numbers["methods"]
            by_people = {name: each["average_precision"] for name, each in found.items()}
            ranked = sorted(by_people, key=by_people.__getitem__, reverse=True)
            assert ranked[0] == "pooling"
            assert {*ranked[1:3]} == {"blankout", "gradients"}, form
            assert ranked[3] in ("integrated", "value-zeroing")
            assert {*ranked[-2:]} == {"rollout", "flow"}
            assert by_people["raw"] > by_people["random"]
            assert ("lime" in found) == (form != "Bayesian")
            if "lime" in found:
                assert 0.005 < by_people["lime"] - by_people["random"] < 0.02
            assert {name: each["texts"] for name, each in found.items()} == {
                name: 60 if name in ea_rationales.SLOW else 199 for name in found
            }
            deleted = {name: each["comprehensiveness"] for name, each in found.items()}
            order = ["blankout", "integrated", *(["lime"] if "lime" in found else []), "pooling"]
            most = sorted(deleted, key=deleted.__getitem__, reverse=True)[: len(order)]
            assert most[:2] == order[:2]
            assert {*most} == {*order}
            assert deleted["gradient-input"] < deleted["random"]
            for name in ("rollout", "flow"):
                assert abs(deleted[name] - deleted["random"]) < 0.02
    # The paper's claim.
    for title in ("AUPRC", "Comprehensiveness", "Sufficiency"):
        rows_shown = dict(tables[f"{title}, × 100: differences with the same seed"]["rows"])
        for method, column in (("LIME", 4), ("pooling attention", 5)):
            cells = rows_shown[f"Evolving, {method} − plain, {method}"]
            assert cells[0] == "5"
            assert f"{cells[1]} ({cells[2]}; {cells[column]})" in guide
            assert cells[1] in remark
            assert cells[column] in remark
            low, high = (float(each.replace("−", "-")) for each in cells[2].split(" … "))
            mean, published = (float(each.replace("−", "-")) for each in (cells[1], cells[column]))
            assert mean * published > 0
            assert low < 0 < high
            assert (high < published) == (title == "AUPRC")
    compared = [row for name, table in tables.items() if "differences" in name for row in table["rows"]]
    assert f"Of all {len(compared)} comparisons" in remark
    told = [(name, cells[1]) for name, cells in compared if float(cells[3].split("(")[1].strip("< )")) < 0.05]
    flow = "Evolving, flow − plain, flow"
    assert told == [(flow, "0.05"), (flow, "0.06")]
    assert "better by 0.0005 (AUPRC) and 0.0006 (AP), and still less than random scores" in remark
    shown = dict(tables["Classifiers, movie reviews"]["rows"])
    column = tables["Classifiers, movie reviews"]["columns"].index("test macro F1")
    f1 = [f"{float(shown[form][column].split('±')[0]):.2f}" for form in ("plain", "Evolving", "Bayesian")]
    assert f1 == ["0.90", "0.89", "0.89"]
    assert "Macro F1 is 0.90 and 0.89 (published 0.97 and 0.98)" in guide
    assert "macro F1 0.89 to 0.90, against 0.97 and 0.98" in remark
    auprc = dict(tables["AUPRC, × 100: differences with the same seed"]["rows"])
    for method, said in (("pooling attention", "the former"), ("LIME", "LIME")):
        cells = auprc[f"Evolving, {method} − plain, {method}"]
        column = 4 if method == "LIME" else 5
        interval = cells[2].replace(" … ", " to ")
        assert f"by {cells[1]} for {said} ({interval}, published {cells[column]})" in readme
    assert f"(average precision {span(ap, 'pooling')} and {span(ap, 'lime')}" in readme
