"""The faithfulness recipe: nothing is missing, ground truth is what decides, methods share their texts."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from overt.data import eraser, planted
from overt.data.agreement import VOCABULARY, WORD_CLASSES, flipped, generate
from overt.judge.rationales import evaluate, every_method
from overt.judge.rationales.methods import Scorer
from overt.judge.rationales.randomising import AfterShuffling
from overt.judge.rationales.words import WordClassifier
from overt.recipes import ea_rationales, faithfulness, faithfulness_models, rationale_training, reproduce
from overt.recipes import faithfulness_report as report
from overt.recipes import faithfulness_time as expected
from overt.recipes._recipe import Outcome, Request
from overt.recipes.faithfulness_models import VERBS, VerbNumber, grammar_tokenizer
from overt.recipes.paired import mean_interval
from overt.tracing.methods.method import methods as registered
from overt.tracing.mixing.mixing import mixings

pytest.importorskip("lime", reason="needs the extra rationales")
pytest.importorskip("captum", reason="needs the extra rationales")


def test_no_method_and_no_mixing_of_the_package_is_missing() -> None:
    for quick in (False, True):
        for name, row in faithfulness.rows_of(quick).items():
            assert row.methods == every_method(), name
            parts = {part for method in row.methods for part in method.split("/")}
            assert set(registered()) <= parts
            assert set(mixings()) - {"attention"} <= parts
    full = faithfulness.rows_of(False).values()
    assert {row.data for row in full} == {"agreement", "SST-2", "movie reviews", "language model"}
    assert all(row.texts >= (100 if row.data == "movie reviews" else 300) for row in full)
    # Some are left out of a column: sentences not decided by the subject, or of more than 30 words.
    assert all(0.85 * row.texts >= 300 for row in full if row.data in ("agreement", "SST-2"))


# --- Ground truth ---


def test_a_flipped_sentence_differs_in_its_subjects_number_alone() -> None:
    for sentence in generate(300, seed=0):
        if len(sentence.subject) > 1:
            with pytest.raises(ValueError, match="a subject with one head"):
                flipped(sentence)
            continue
        other = flipped(sentence)
        [head] = sentence.subject
        differ = [
            n for n, pair in enumerate(zip(sentence.tokens, other.tokens, strict=True)) if len({*pair}) > 1
        ]
        assert differ == [head]
        assert other.plural != sentence.plural
        assert other.tokens[head] in WORD_CLASSES["noun"]
        assert flipped(other) == sentence, "the count of attractors, too, is the grammar's again"


class LastNoun(nn.Module):
    """Says the number of the last noun, as a rule without grammar does."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=2)
        self.numbers = nn.Embedding(len(VOCABULARY), 1)
        plural = {
            word for s in generate(2000, 1) for place, many in s.nouns if many for word in [s.tokens[place]]
        }
        nouns = WORD_CLASSES["noun"]
        values = [[(1.0 if word in plural else -1.0) if word in nouns else 0.0] for word in VOCABULARY]
        self.numbers.weight = nn.Parameter(torch.tensor(values))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        numbers = self.numbers(input_ids).squeeze(-1) * attention_mask
        places = torch.arange(input_ids.shape[1]) * (numbers != 0)
        last = numbers.gather(1, places.argmax(dim=1, keepdim=True))
        return {"logits": torch.cat([-3 * last, 3 * last], dim=1)}


def test_a_word_is_ground_truth_where_the_model_goes_by_it() -> None:
    sentences = [sentence for sentence in generate(200, seed=2) if len(sentence.subject) == 1]
    truth = faithfulness.subjects_of(LastNoun(), grammar_tokenizer(), sentences)
    expected = [
        sentence.subject[0] if sentence.nouns[-1][0] == sentence.subject[0] else None
        for sentence in sentences
    ]
    assert truth == expected
    assert None in truth
    assert any(place is not None for place in truth)


@pytest.mark.parametrize("most", [3, 20, 500])
def test_a_language_model_is_judged_on_what_it_decides_by_the_subject(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faithfulness, "TRIED", 40)
    sentences = [sentence for sentence in generate(200, seed=2) if len(sentence.subject) == 1]
    right = [
        place for place, sentence in enumerate(sentences) if sentence.nouns[-1][0] == sentence.subject[0]
    ]
    assert 20 < len(right) < 500
    found = faithfulness.deciding(LastNoun(), grammar_tokenizer(), sentences, most)
    assert found["chosen"] == right[:most]
    assert found["tried"] == (right[most - 1] + 1 if most < len(right) else len(sentences))
    never = [sentence for place, sentence in enumerate(sentences) if place not in right]
    with pytest.raises(ValueError, match=r"must decide at least 2 sentences by their subject, got 0 of \d+"):
        faithfulness.deciding(LastNoun(), grammar_tokenizer(), never, most)


def test_the_subject_is_first_where_no_word_scores_higher() -> None:
    scores = [np.array(row) for row in ([0.1, 0.9, 0.3], [0.9, 0.1, 0.3], [0.5, 0.5, 0.2], [1.0, 2.0, 3.0])]
    found = faithfulness.subject_first([0, 1, 2, 3], scores, [1, 1, 1, None])
    np.testing.assert_array_equal(found, [1.0, 0.0, 0.5, math.nan])


def test_a_language_model_chooses_a_verb_by_its_probability() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {verb: [number] for number, verb in enumerate((*VERBS[0], *VERBS[1]), start=3)}
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval()
    verbs = VerbNumber(model, lambda verb, **_: {"input_ids": ids[verb]}).eval()
    inputs = torch.randint(0, 40, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        p = verbs(inputs, mask).logits.softmax(dim=-1)
        for row, length in enumerate((5, 3)):
            every = model(inputs[row : row + 1, :length]).logits[0, -1].softmax(dim=-1)
            both = torch.stack([every[3:6].sum(), every[6:9].sum()])
            torch.testing.assert_close(p[row], both / both.sum())
    with pytest.raises(ValueError, match="must have a token for ' is', got 2 pieces"):
        VerbNumber(model, lambda _verb, **_: {"input_ids": [1, 2]})


# --- Comparison ---


def numbers_of(
    methods: dict[str, list[float | None]], texts: int = 4, key: str = "correlation"
) -> dict[str, Any]:
    return {
        "texts": texts,
        "methods": {
            name: {"seconds": 1.0, "texts": list(range(len(values))), "by_text": {key: values}}
            for name, values in methods.items()
        },
        "refused": {},
    }


def test_methods_are_compared_on_the_texts_that_all_of_them_have() -> None:
    found = {
        0: numbers_of({"raw": [1.0, 2.0, None, 4.0], "rollout": [0.0, 0.0, 9.0, 1.0], "random": [0.0] * 4}),
        1: numbers_of({"raw": [3.0, None, 5.0, 6.0], "rollout": [1.0, 9.0, 2.0, 3.0], "random": [0.0] * 4}),
    }
    cells = report.cells_of(found)["correlation"]
    assert cells["raw"][0] == pytest.approx(np.mean([7 / 3, 14 / 3]))
    assert cells["rollout"][0] == pytest.approx(np.mean([1 / 3, 6 / 3]))
    assert cells["raw"][3:6] == [3, 3, 2], "texts of each model, and models"
    pairs = report.pairs_of(found)["correlation"]
    assert pairs["rollout − raw"][0] == pytest.approx(cells["rollout"][0] - cells["raw"][0])
    assert "flow − rollout" not in pairs, "one was not measured"


def test_what_leads_and_what_beats_chance_is_told_by_differences_on_the_same_texts() -> None:
    draw = np.random.default_rng(0)
    text = draw.normal(size=40)  # texts differ far more than methods do
    values = {
        "random": text,
        "raw": text + 0.01 * draw.normal(size=40),
        "flow": text + 0.3,
        "rollout": text + 0.31,
    }
    values["rollout"] = values["rollout"] + 0.2 * draw.normal(size=40)
    for key, sign in (("between", 1), ("sufficiency", -1)):
        listed: dict[str, Any] = {name: (sign * each).tolist() for name, each in values.items()}
        cells = report.cells_of({0: numbers_of(listed, 40, key)})[key]
        assert {name for name, each in cells.items() if each[6]} == {"flow", "rollout"}
        assert {name for name, each in cells.items() if each[7]} == {"flow", "rollout"}
        assert cells["flow"][1] < cells["random"][2], "their intervals overlap"
    cells = report.cells_of({0: numbers_of(listed, 40, "randomised")})["randomised"]
    assert not any(each[6] or each[7] for each in cells.values())


def test_a_method_that_ranks_few_texts_does_not_take_them_from_others() -> None:
    found = {0: numbers_of({"raw": [1.0] * 4, "lime": [1.0, None, None, None], "random": [0.5] * 4})}
    cells = report.cells_of(found)["correlation"]
    assert "lime" not in cells
    assert cells["raw"][3] == 4


def test_a_method_beats_those_that_are_worse_whether_more_or_less_is_better() -> None:
    values = {"raw": [0.5], "flow": [-0.9], "rollout": [0.1], "random": [9.0]}
    found = report.beaten_of({"between": values, "sufficiency": values, "randomised": values})
    assert found["between"] == {"raw": 1, "rollout": 0.5, "flow": 0}
    assert found["sufficiency"] == {"flow": 1, "rollout": 0.5, "raw": 0}
    assert found["randomised"] == {"rollout": 1, "raw": 0.5, "flow": 0}, "near 0 is good"


def test_blankout_beats_no_method_by_agreeing_with_itself() -> None:
    values = {"raw": [0.5], "flow": [0.5], "blankout": [1.0], "blankout-absolute": [1.0], "random": [0.0]}
    found = report.beaten_of({"correlation": values, "between": values})
    assert found["correlation"] == {"raw": 0.5, "flow": 0.5}
    assert found["between"]["blankout"] > 0.5


def test_methods_are_ordered_by_protocols_that_all_of_them_have() -> None:
    values = {"rollout": [0.9], "blankout": [0.8], "raw": [0.1], "flow": [0.2]}
    agreeing = {"rollout": [0.1], "raw": [0.5], "flow": [0.3]}  # with blank-out, which has no part in it
    cells = {"a plain": {"between": values, "correlation": agreeing}}
    order = report.order_of({"cells": cells, "rows": {"a plain": {"form": "plain"}}})
    assert {method: share for method, (share, _) in order.items()} == pytest.approx(
        {"rollout": 1, "blankout": 2 / 3, "flow": 1 / 3, "raw": 0}
    )


def test_the_texts_of_each_model_are_counted_and_not_those_of_any() -> None:
    found = {
        0: numbers_of({"raw": [1.0, None, None, 2.0], "random": [0.0] * 4}),
        1: numbers_of({"raw": [None, 1.0, 2.0, 3.0], "random": [0.0] * 4}),
    }
    config = {
        "cells": {"a plain": report.cells_of(found)},
        "seconds": {"a plain": {}},
        "refused": {"a plain": {}},
        "rows": {"a plain": {"texts": 4, "form": "plain"}},
    }
    counted = dict(report.row_grid(config, "a plain").rows)["texts of a model (skipped)"]
    assert counted[0] == "2 to 3 (1 to 2)"


def test_a_method_is_no_better_for_few_rivals_few_models_or_what_people_mark() -> None:
    many = {"raw": [0.5], "rollout": [0.1], "flow": [0.3], "gradients": [0.2], "integrated": [0.0]}
    few = {"pooling": [0.9], "raw": [0.5], "flow": [0.3]}
    cells: dict[str, Any] = {"a x": {"between": many}, "b x": {"between": many}, "c x": {"between": few}}
    cells["c x"]["average_precision"] = {"flow": [0.9], "raw": [0.1], "pooling": [0.2]}
    order = report.order_of({"cells": cells, "rows": {name: {"form": "x"} for name in cells}})
    assert list(order)[-1] == "pooling", "of one model out of three"
    assert order["pooling"][0] == 1
    assert order["raw"][0] == pytest.approx((1 + 1 + 0.5) / 3), "the second of three beats one of two"
    assert order["flow"][0] == pytest.approx((0.75 + 0.75 + 0) / 3), "plausibility does not count"


def test_the_overview_has_each_data_alone_where_there_are_several() -> None:
    def cells(*order: str) -> dict[str, Any]:
        return {"between": {name: [-float(place)] for place, name in enumerate(order)}}

    found = {"one two plain": cells("raw", "flow", "lime"), "one two evolving": cells("raw", "flow", "lime")}
    found["three plain"] = cells("lime", "flow")
    config = {
        "cells": found,
        "rows": {name: {"form": name.split()[-1]} for name in found},
        "seconds": {name: {"lime": 0.001 * len(name)} for name in found},
    }
    grid = report.overview(config)
    assert grid.columns[:3] == ["faithfulness", "one two", "three"]
    assert grid.columns[-3:] == ["ms a text, one two", "ms a text, three", "rows"]
    rows = {name: list(row[:3] + row[-3:]) for name, row in grid.rows}
    assert rows["raw"] == ["100", "100", "–", "–", "–", "2"]
    assert rows["LIME"] == ["50", "0", "100", "13", "11", "3"], "either data weighs the same"
    alone = report.overview(config | {"cells": {"three plain": found["three plain"]}})
    assert alone.columns == ["faithfulness", "LeRF − MoRF", "ms a text", "rows"]


def test_a_method_is_as_fast_as_where_no_other_work_slowed_it() -> None:
    def timed(**seconds: float) -> dict[str, Any]:
        return {"methods": {name: {"seconds": value} for name, value in seconds.items()}}

    found = report.seconds_of({0: timed(raw=0.2, flow=0.1), 1: timed(raw=0.02, flow=0.3), 2: timed(raw=0.4)})
    assert found == {"raw": 0.02}, "of methods that all models have"


def test_the_picture_says_what_its_marks_are_and_orders_methods_as_the_table_does(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra view")
    values = {
        name: [0.1 * place, 0.0, 0.2, 9, 0, 1, 1, 0] for place, name in enumerate(("raw", "flow", "random"))
    }
    cells = {"agreement plain": {"between": values}, "agreement evolving": {"between": values}}
    cells["SST-2 Evolving"] = {"between": values}
    config = {
        "cells": cells,
        "rows": {name: {"form": name.split()[1]} for name in cells},
        "seconds": {name: {"raw": 0.01, "flow": 0.02} for name in cells},
    }
    report.draw(Outcome(config, {}), tmp_path / "found.svg")
    drawn = (tmp_path / "found.svg").read_text()
    words = re.findall(r"<!-- (.*?) -->", drawn)  # text is drawn as paths
    for mark in (
        "plain attention",
        "evolving attention",
        "line: 95 % interval",
        "random scores",
        "ms a text",
    ):
        assert mark in words
    assert "Evolving attention" not in words, "the same form by another spelling"
    assert words.index("flow") < words.index("raw"), "the better one is above"


# --- The whole recipe, small ---

FEW = ("pooling", "raw", "rollout", "value-zeroing", "gradients", "random", "oracle")


def test_stripes_and_lines_are_one_shape_each_and_lie_where_they_should() -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="needs the extra view").Figure()
    axis = figure.subplots()
    report.draw_stripes(axis, 5)
    (stripes,) = axis.patches
    inside = [row for row in range(5) if stripes.get_path().contains_point((0.9, row + 0.4))]
    assert inside == [0, 2, 4]
    report.draw_lines(axis, [(1.0, 10.0, 20.0), (3.0, -5.0, 6.0)], color="black")
    (line,) = axis.lines
    np.testing.assert_array_equal(line.get_xdata(), [10, 20, math.nan, -5, 6, math.nan])
    np.testing.assert_array_equal(line.get_ydata(), [1, 1, math.nan, 3, 3, math.nan])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithfulness, "every_method", lambda: FEW)
    for name, value in {
        "QUICK_STEPS": 2,
        "TRAIN": 64,
        "TEST": 200,
        "QUICK_TEXTS": {"agreement": 3},
        "QUICK_FORMS": {"agreement": ("plain", "evolving")},
        "QUICK_WORDS": 6,
    }.items():
        monkeypatch.setattr(faithfulness, name, value)
    network = partial(faithfulness_models.AgreementClassifier, layers=2, heads=2, width=16)
    monkeypatch.setattr(faithfulness_models, "AgreementClassifier", network)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the picture, which takes longer than judging a small network."""
    recipe = replace(reproduce.RECIPES["faithfulness"], draw=None)
    monkeypatch.setitem(reproduce.RECIPES, "faithfulness", recipe)


def test_a_trial_runs_and_resumes(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del small
    monkeypatch.delenv("OVERT_DATA", raising=False)
    begin = {"out": tmp_path / "run", "results": tmp_path / "results", "device": "cpu"}
    result = reproduce.run("faithfulness", extra=["--quick", "--workers", "1"], **begin)
    cells = result["config"]["cells"]
    assert list(cells) == ["agreement plain", "agreement evolving"]
    for name, by_protocol in cells.items():
        judged = {"raw", "rollout", "gradients", "random"} | ({"value-zeroing"} if "plain" in name else set())
        assert set(by_protocol["comprehensiveness"]) == judged | {"oracle"}
        assert set(by_protocol["randomised"]) <= judged, "the best order is not compared"
        assert by_protocol["normalised_comprehensiveness"]["oracle"][0] == pytest.approx(1.0)
    tables = {table["title"]: dict(table["rows"]) for table in result["tables"]}
    evolving = next(rows for title, rows in tables.items() if title.startswith("agreement evolving: 3 texts"))
    assert set(evolving["value zeroing"]) == {"–"}
    assert "Evolving reads the layer below it" in " ".join(result["notes"])
    assert "value zeroing" not in " ".join(result["config"]["pairs"]["agreement evolving"]["correlation"])
    assert (tmp_path / "results" / "faithfulness.svg").read_text().count("<svg") == 1

    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(faithfulness, "perform", never)
    again = reproduce.run("faithfulness", extra=["--quick", "--rows", "agreement plain"], **begin)
    assert json.dumps(again["config"]["cells"]) == json.dumps(cells)


def test_the_table_is_filled_a_few_models_at_a_time(
    small: None, undrawn: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del small, undrawn
    monkeypatch.delenv("OVERT_DATA", raising=False)
    few = {"agreement": 2, "language model": 2}
    for name, value in {"TEXTS": few, "STEPS": 2, "every_method": lambda: ("gradients", "random")}.items():
        monkeypatch.setattr(faithfulness, name, value)

    def measure(out: str, *extra: str, fresh: bool = False) -> dict[str, Any]:
        begin = {"results": tmp_path / "results", "device": "cpu", "seeds": 1, "fresh": fresh}
        return reproduce.run("faithfulness", out=tmp_path / out, extra=[*extra, "--workers", "1"], **begin)

    first = measure("one", "--rows", "agreement plain")
    assert set(first["config"]["cells"]) == {"agreement plain"}
    assert any(
        note == "Not measured yet: agreement evolving (1 model), agreement Bayesian (1 model), "
        "language model plain (1 model)."
        for note in first["notes"]
    )
    beside = tmp_path / "results" / "faithfulness"
    assert [path.name for path in beside.iterdir()] == ["agreement-plain-0.json.gz"]

    # Another folder, as on another machine: what is stored is not judged again.
    judged, perform = [], faithfulness.perform

    def spied(task: Any, *rest: Any) -> Any:
        judged.append(task.name)
        return perform(task, *rest)

    monkeypatch.setattr(faithfulness, "perform", spied)
    second = measure("two", "--rows", "agreement plain,agreement evolving")
    assert judged == ["agreement evolving"]
    assert set(second["config"]["cells"]) == {"agreement plain", "agreement evolving"}
    assert second["config"]["cells"]["agreement plain"] == first["config"]["cells"]["agreement plain"]
    whole = measure("three", "--rows", "agreement plain,agreement evolving", fresh=True)
    assert set(judged[1:]) == {"agreement plain", "agreement evolving"}
    assert json.dumps(whole["config"]["cells"]) == json.dumps(second["config"]["cells"])

    # A row that this command cannot measure, having no language model, stays.
    found = json.loads(gzip.decompress((beside / "agreement-plain-0.json.gz").read_bytes()))
    found["run"]["settings"]["row"] |= {"data": "language model", "form": "plain"}
    found["tried"], stays = 5, beside / "language-model-plain-0.json.gz"
    stays.write_bytes(gzip.compress(json.dumps(found).encode()))
    third = measure("two", "--rows", "agreement plain")
    assert "language model plain" in third["config"]["cells"]
    assert len(judged) == 3
    # But numbers by other definitions do not.
    found["run"]["settings"]["points"] += 1
    stays.write_bytes(gzip.compress(json.dumps(found).encode()))
    assert "language model plain" not in measure("two", "--rows", "agreement plain")["config"]["cells"]
    measure("four", "--rows", "agreement plain", "--steps", "3")
    assert judged[3:] == ["agreement plain"], "another training"
    stays.write_bytes(b"not gzip")
    with pytest.raises(ValueError, match=r"language-model-plain-0\.json\.gz must be text"):
        measure("two", "--rows", "agreement plain")


def trial(place: Path, *extra: str) -> dict[str, Any]:
    """The recipe's trial on one model; the same again goes on."""
    options = ["--quick", "--workers", "1", "--rows", "agreement plain", *extra]
    begin = {"out": place / "run", "results": place / "results", "device": "cpu"}
    return reproduce.run("faithfulness", extra=options, **begin)


def test_an_interrupted_run_goes_on_with_the_methods_that_are_left(
    small: None, undrawn: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del small, undrawn
    monkeypatch.delenv("OVERT_DATA", raising=False)
    correlations = AfterShuffling.correlations

    def interrupted(self: Any, own: Any, *rest: Any, **named: Any) -> Any:
        if own.method == "value-zeroing":
            raise KeyboardInterrupt
        return correlations(self, own, *rest, **named)

    monkeypatch.setattr(AfterShuffling, "correlations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial(tmp_path)
    folder = tmp_path / "run" / "quick" / "agreement-plain" / "seed-0"
    done = ["pooling", "raw", "rollout"]
    assert sorted(path.stem for path in (folder / "parts").iterdir()) == done
    weights = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(AfterShuffling, "correlations", correlations)
    with pytest.raises(ValueError, match="lime_samples 100, but 20 was requested: delete it with --fresh"):
        trial(tmp_path, "--lime-samples", "20")

    asked: list[list[str]] = []

    def spied(*arguments: Any, **named: Any) -> Any:
        asked.append(arguments[4])
        return evaluate(*arguments, **named)

    monkeypatch.setattr(faithfulness, "evaluate", spied)
    found = trial(tmp_path)
    assert asked == [[method for method in FEW if method not in done]]
    assert (folder / "model.safetensors").read_bytes() == weights, "the model is the same"
    assert not (folder / "parts").exists()
    whole = trial(tmp_path / "other")
    assert asked[1] == list(FEW)
    assert json.dumps(found["config"]["cells"]) == json.dumps(whole["config"]["cells"])
    assert found["config"]["refused"] == whole["config"]["refused"]


def test_a_run_that_was_interrupted_after_its_last_method_goes_on(
    small: None, undrawn: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del small, undrawn
    monkeypatch.delenv("OVERT_DATA", raising=False)
    accuracy_of = faithfulness.accuracy_of

    def interrupted(*_arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(faithfulness, "accuracy_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial(tmp_path)
    monkeypatch.setattr(faithfulness, "accuracy_of", accuracy_of)
    monkeypatch.setattr(faithfulness, "evaluate", interrupted)  # nothing is left to judge
    found = trial(tmp_path)
    assert set(found["config"]["cells"]["agreement plain"]["comprehensiveness"]) >= {"raw", "random"}


def test_a_models_numbers_do_not_depend_on_which_others_are_measured(tmp_path: Path) -> None:
    options = {"quick": False, "lime-samples": None, "steps": None, "examples": None, "language-model": None}
    request = Request(tmp_path, None, None, 3, "cpu", False, options, Console())
    alone = faithfulness.shared_by(request, {"agreement"})
    row = faithfulness.rows_of(False)["agreement plain"]
    assert set(faithfulness.source_of(row, alone)) == {"training"}
    other = alone._replace(model="another", samples=5)
    assert faithfulness.source_of(row, other) == faithfulness.source_of(row, alone)
    with_steps = faithfulness.shared_by(replace(request, options={**options, "steps": 7}), {"agreement"})
    assert faithfulness.source_of(row, with_steps)["training"]["updates"] == 7


class Counting(LastNoun):
    """Counts the tokens that it reads, without padding."""

    read = 0

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        self.read += int(attention_mask.sum())
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("words", [8, 16], ids=["all orders", "a beam"])
def test_passes_are_counted_before_they_are_made(words: int) -> None:
    model = Counting()
    classifier = WordClassifier(model, grammar_tokenizer())
    nouns = sorted(WORD_CLASSES["noun"])
    text = classifier.read([nouns[place % len(nouns)] for place in range(words)])
    tokens = expected.tokens_of(classifier, text)
    scorer = Scorer(classifier, 0.2, samples=300)
    counted = {
        "lime": expected.scores_of("lime", ["lime"], words, tokens, 300),
        "blankout": expected.scores_of("blankout", ["blankout"], words, tokens, 300),
        "oracle": expected.once_of(words, tokens),
    }
    for method, work in counted.items():
        before = model.read
        scorer.scores(method, text)
        read = model.read - before
        # Equal sets of both beams run once.
        assert 0.6 * work.tokens < read < 1.5 * work.tokens, method
    methods = ["pooling", "blankout", "lime", "random"]
    assert expected.refusing(classifier, text, methods) == {"pooling"}
    seconds = expected.expected_seconds(classifier, [text], methods, 300, 6)
    assert seconds["pooling"] == 0.0
    assert seconds["random"] < seconds["blankout"] < seconds["lime"]
    speed = expected.Speed(call=1.0, token=0.01)
    assert expected.Work(2.0, 50.0).seconds(speed) == pytest.approx(2.5)


def test_compilation_is_no_part_of_a_models_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [0.0], set[int]()

    class Compiling(WordClassifier):
        def probabilities(self, text: Any, kept: Any) -> Any:
            clock[0] += 0.5 + 0.001 * sum(len(self.code(text, row).places) for row in np.unique(kept, axis=0))
            clock[0] += 0.0 if len(kept) in seen else 100.0  # compiled for each shape once
            seen.add(len(kept))
            return super().probabilities(text, kept)

    monkeypatch.setattr(expected, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    classifier = Compiling(LastNoun(), grammar_tokenizer())
    speed = expected.speed_of(classifier, [classifier.read(sorted(WORD_CLASSES["noun"])[:9])])
    assert speed.call == pytest.approx(0.5, abs=0.02)
    assert 0.001 < speed.token < 0.0025  # a pass over many texts has its call, too
    assert len(seen) == 2


@pytest.mark.parametrize("words", [1, 2, 6, 9, 20])
def test_the_samples_of_lime_that_differ_are_counted(words: int) -> None:
    text = WordClassifier(LastNoun(), grammar_tokenizer()).read(sorted(WORD_CLASSES["noun"])[:words])
    asked: list[int] = []

    class Asked(WordClassifier):
        def probabilities(self, text: Any, kept: Any) -> Any:
            asked.append(len(np.unique(kept, axis=0)))
            return super().probabilities(text, kept)

    Scorer(Asked(LastNoun(), grammar_tokenizer()), 0.2, samples=300).scores("lime", text)
    assert asked[0] == pytest.approx(expected.different(words, 300), rel=0.1, abs=1)


@pytest.mark.parametrize("words", [1030, 5000])
def test_the_samples_of_a_long_text_differ(words: int) -> None:
    """There are more sets of a thousand words than a float can hold."""
    assert expected.different(words, 300) == pytest.approx(300, abs=1)


def test_what_a_full_run_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises(ValueError, match=r"--rows .* cannot be measured: it needs --language-model"):
        reproduce.run("faithfulness", extra=["--rows", "language model plain"], out=tmp_path)
    gone = ["--rows", "language model plain", "--language-model", str(tmp_path / "gone")]
    with pytest.raises(
        ValueError, match=r"^--language-model .*gone must be a causal language model, a folder"
    ):
        reproduce.run("faithfulness", extra=gone, out=tmp_path / "without")
    with pytest.raises(ValueError, match=r"--rows SST-2 plain cannot be measured: .* has no train\.tsv"):
        reproduce.run(
            "faithfulness", data=tmp_path, model="a", extra=["--rows", "SST-2 plain"], out=tmp_path / "run"
        )


@pytest.mark.slow
def test_classifiers_that_table_8_has_trained_are_judged_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviews = planted.planted_reviews({"train": 32, "val": 8, "test": 2})
    monkeypatch.setattr(eraser, "load_movies", lambda _: reviews)
    monkeypatch.setattr(ea_rationales, "METHODS", ("pooling", "random"))
    monkeypatch.setattr(ea_rationales, "plan", lambda *_: replace(ea_rationales.STAND_IN, updates=2))
    monkeypatch.setattr(faithfulness, "every_method", lambda: ("pooling", "random"))
    (tmp_path / "data").mkdir()
    encoder = rationale_training.small_encoder(tmp_path / "encoder", planted.vocabulary())
    given: dict[str, Any] = {"data": tmp_path / "data", "model": encoder, "device": "cpu", "seeds": 1}
    runs, results = tmp_path / "table-8", tmp_path / "results"
    forms = ["--forms", "plain", "--lime-samples", "10"]
    reproduce.run("ea-table-8", out=runs, results=results, extra=forms, **given)

    def judged(place: str, *options: str, fresh: bool = False) -> dict[str, Any]:
        extra = [
            "--rows",
            "movie reviews plain",
            "--examples",
            "2",
            "--lime-samples",
            "10",
            "--workers",
            "1",
            *options,
        ]
        return reproduce.run(
            "faithfulness", out=tmp_path / place, results=results, extra=extra, fresh=fresh, **given
        )

    by_itself = judged("alone")["per_seed"]["0"]

    def train_again(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patched:
        patched.setattr(rationale_training, "fit", train_again)
        taken = judged("taken", "--trained", str(runs), fresh=True)["per_seed"]["0"]
    (means,), (wanted,) = ([numbers["means"] for numbers in rows.values()] for rows in (taken, by_itself))
    assert means == wanted, "as if it had been trained here"
    again = judged("taken", "--trained", str(tmp_path / "gone"))["per_seed"]["0"]
    assert again == taken, "what is judged needs no classifier"
    judged_in = next((tmp_path / "taken").glob("**/result.json"))
    with pytest.raises(FileNotFoundError, match="must be a folder in which ea-table-8 has run"):
        judged("taken", "--trained", str(tmp_path / "data"), fresh=True)
    assert judged_in.is_file(), "what was finished is not discarded for a folder that is refused"
    kept = runs / f"{Path(encoder).name}.sha256"
    before = kept.read_text()
    kept.write_text(f"{before.split()[0]} other\n")
    with pytest.raises(ValueError, match=r"--trained .* has runs that began with other weights than --model"):
        judged("other", "--trained", str(runs), fresh=True)
    assert not (tmp_path / "other").exists(), "not even that this model's weights are those of its runs"
    assert kept.read_text().split()[1] == "other", "nothing is changed there"
    kept.unlink()
    with pytest.raises(ValueError, match=r"does not say with which weights its runs began: encoder\.sha256"):
        judged("other", "--trained", str(runs), fresh=True)
    assert not kept.exists()
    kept.write_text(before)
    with monkeypatch.context() as patched:
        patched.setattr(faithfulness, "precision_of_products", lambda _: "tf32")
        with pytest.raises(ValueError, match="plain/seed-0 has precision float32, but tf32 is judged here"):
            judged("other", "--trained", str(runs), fresh=True)
    place = runs / "movie-reviews" / "plain" / "seed-0"
    settings = json.loads((place / "settings.json").read_text())
    settings["training"]["updates"] = 3
    (place / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"plain/seed-0 has training .*'updates': 3.*, but .*'updates': 2"):
        judged("other", "--trained", str(runs), fresh=True)
    with pytest.raises(ValueError, match="--trained is for movie reviews, which --quick does not read"):
        judged("quick", "--trained", str(runs), "--quick")
    shutil.rmtree(place / "model")
    with monkeypatch.context() as patched:
        patched.setattr(rationale_training, "fit", train_again)
        with pytest.raises(AssertionError, match="trained again"):
            judged("lacking", "--trained", str(runs), fresh=True)


def test_the_guide_quotes_the_table_as_it_was_measured() -> None:
    root = Path(__file__).parents[1]
    stored = json.loads((root / "results" / "faithfulness.json").read_text())
    table = stored["tables"][0]
    guide = (root / "docs" / "judge.md").read_text()
    quoted = guide[guide.index("| method | faithfulness |") :].split("\n\n")[0].splitlines()
    headings = [cell.strip() for cell in quoted[0].strip("|").split("|")][1:]
    measured = {
        name: [cells[table["columns"].index(heading)] for heading in headings]
        for name, cells in table["rows"]
    }
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in quoted[2:]]
    assert {name: cells for name, *cells in shown} == measured
    assert [name for name, *_ in shown] == [name for name, _ in table["rows"]], "the best first"
    readme = (root / "README.md").read_text()
    of_last_layer = {
        "raw attention of the last layer": "raw",
        "the last layer's attention × gradient": "raw attention × gradient",
    }
    some = (
        readme[readme.index("| method | all | demo | SST-2 | language model |") :]
        .split("\n\n")[0]
        .splitlines()
    )
    for name, *cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in some[2:]):
        assert cells == measured[of_last_layer.get(name, name)][:4], name
    missing = stored["config"]["missing"]
    assert ("not been measured" in guide) == bool(missing), "what is left to measure is said while it is"


def test_the_guide_says_what_the_language_model_has_shown() -> None:
    root = Path(__file__).parents[1]
    tables = json.loads((root / "results" / "faithfulness.json").read_text())["tables"]
    (table,) = (table for table in tables if table["title"].startswith("language model plain: 300 texts"))
    rows, columns = dict(table["rows"]), table["columns"]
    ranking = [place for place, name in enumerate(columns) if name.endswith(("↑", "↓"))]
    assert len(ranking) == 6

    def beats_random(method: str) -> int:
        return sum("°" not in rows[method][place] for place in ranking)

    def mean(method: str, column: int) -> str:
        return str(rows[method][column].split(" [")[0])

    leads = [sum("*" in rows[method][place] for place in ranking) for method in ("LIME", "blank-out")]
    guide = " ".join((root / "docs" / "judge.md").read_text().split())
    assert leads == [6, 0]
    assert "LIME led or shared the lead in all six columns that rank methods, blank-out in none" in guide
    rollouts = ["rollout", "effective attention rollout", "rollout of norms", "value zeroing"]
    rollouts += ["attention × gradient rollout", "ALTI rollout", "relevance"]
    assert [beats_random(method) for method in rollouts] == [0, 0, 0, 0, 0, 4, 1]
    graphs = [
        mean(method, place) for method in ("rollout", "effective attention rollout") for place in ranking
    ]
    assert graphs[:6] == graphs[6:], "effective attention is attention here"
    assert "rollout, over four of six graphs, in none" in guide
    assert beats_random("raw") == 4
    assert "raw attention beat random scores in four columns of six" in guide
    for method in ("ALTI flow", "gradient norm", "gradient × input"):
        assert beats_random(method) == 0
    not_ranked = {table["rows"][0][0], "random", "best order"}
    best = {method for method in rows if beats_random(method) == 6} - not_ranked
    assert best == {"LIME", "integrated gradients", "blank-out", "blank-out, absolute"}
    comprehensiveness, shuffled = 0, columns.index("ρ with shuffled weights → 0")
    assert f"(ρ {mean('rollout', shuffled)} for rollout, {mean('flow', shuffled)} for flow)" in guide
    three = [mean(method, comprehensiveness) for method in ("rollout", "flow", "random")]
    assert "({} and {}, random {})".format(*three) in guide
    two = [mean(method, column) for method in rollouts[-2:] for column in (comprehensiveness, shuffled)]
    assert "Rollout over ALTI ({}; ρ shuffled {}) and of relevance ({}; {}) are not".format(*two) in guide


def test_the_guide_says_what_sentiment_has_shown() -> None:
    root = Path(__file__).parents[1]
    stored = json.loads((root / "results" / "faithfulness.json").read_text())
    forms = ("plain", "Evolving", "Bayesian")
    models = [
        rows[f"SST-2 {form}"]["means"]
        for rows in stored["per_seed"].values()
        for form in forms
        if f"SST-2 {form}" in rows
    ]
    counts = [sum(f"SST-2 {form}" in rows for rows in stored["per_seed"].values()) for form in forms]
    missing = sum(stored["config"]["missing"].get(f"SST-2 {form}", 0) for form in forms)
    assert (counts, missing) == ([2, 2, 1], 4), "tell anew what was measured"
    guide, remark = (
        " ".join((root / place).read_text().split())
        for place in ("docs/judge.md", "results/faithfulness.remark.md")
    )
    assert "five of nine models, two plain, two evolving and one Bayesian" in guide
    assert "five of nine models: two plain, two evolving, one Bayesian" in remark

    def span(first: str, second: str | None = None, protocol: str = "comprehensiveness") -> str:
        found = [
            means[protocol][first] - (means[protocol][second] if second else 0.0)
            for means in models
            if first in means[protocol]
        ]
        low, high = (f"{each:.2f}".replace("-", "−") for each in (min(found), max(found)))
        return low if low == high else f"{low} to {high}"

    assert f"(comprehensiveness {span('raw/gradient')} and {span('blankout')}; LIME {span('lime')}," in guide
    assert f"random scores {span('random')}), and relevance nearly so ({span('rollout/relevance')})" in guide
    assert f"raw attention had {span('raw')}, rollout {span('rollout')} and flow {span('flow')}" in guide
    assert f"LIME's comprehensiveness was {span('lime', 'blankout')} above blank-out's" in guide
    assert f"was {span('rollout/alti', 'rollout')} above that of rollout over attention" in guide
    assert f"({span('flow/gradient', 'rollout/gradient', 'between')})" in guide
    assert f"on SST-2 {span('flow', 'rollout')})" in guide
    assert (
        f"integrated gradients' comprehensiveness is {span('integrated', 'gradient-input')} higher" in guide
    )
    assert f"is {span('lime', 'raw/gradient')} above that of attention × gradient" in remark
    assert f"and {span('lime', 'blankout')} above blank-out's" in remark
    assert f"raw attention − rollout, comprehensiveness {span('raw', 'rollout')}" in remark
    assert f"The gradient adds {span('raw/gradient', 'raw')} to raw attention" in remark
    flows = span("rollout", "flow"), span("rollout/gradient", "flow/gradient")
    assert (
        "by {} of comprehensiveness over attention and {} over attention × gradient".format(*flows) in remark
    )
    assert f"is {span('rollout/alti', 'rollout')} above rollout over attention" in remark
    assert f"its comprehensiveness is {span('flow', 'random')} above theirs" in remark
    shuffled = [span(name, protocol="randomised") for name in ("flow", "rollout")]
    assert "(ρ {}), as rollout does ({})".format(*shuffled) in remark
    agreeing = [means["correlation"] for means in models]
    for each in agreeing:
        assert max(each, key=lambda name: 0 if name.startswith("blankout") else each[name]) == "gradients"
    assert f"agrees with it most (ρ {span('gradients', protocol='correlation')})" in guide
    level = [
        means["comprehensiveness"]["raw/alti"] - means["comprehensiveness"]["rollout/alti"]
        for means in models
    ]
    assert min(level) < 0 < max(level), "neither is better"
    free = [
        means["randomised"][name]
        for means in models
        for name in ("lime", "blankout", "integrated", "gradient-input")
    ]
    assert f"(ρ {min(free):.2f} to {max(free):.2f})".replace("-", "−") in remark
    # What is told to beat random scores.
    beats: dict[str, list[list[bool]]] = {}
    for table in stored["tables"]:
        if not re.match(r"(SST-2|agreement) .*texts, \d", table["title"]):
            continue
        data = table["title"].split()[0]
        ranking = [place for place, name in enumerate(table["columns"]) if name.endswith(("↑", "↓"))]
        rows = dict(table["rows"])
        for name in ("flow", "gradient × input", "ALTI rollout"):
            cells = [rows[name][place] for place in ranking]
            beats.setdefault(f"{data} {name}", []).append(["°" not in each for each in cells])
    assert not np.any(beats["SST-2 flow"])
    assert not np.any(np.array(beats["SST-2 gradient × input"])[:, :4])
    assert np.sum(beats["SST-2 ALTI rollout"]) == np.size(beats["SST-2 ALTI rollout"]) == 15
    assert (np.sum(beats["agreement ALTI rollout"]), np.size(beats["agreement ALTI rollout"])) == (17, 18)
    assert "in all 15 columns of SST-2 (five, three forms), in 17 of 18 of the demo's network" in guide
    table = stored["tables"][0]
    places = [table["columns"].index(each) for each in ("agreement", "SST-2", "language model")]
    shares = {name: [float(cells[place]) for place in places] for name, cells in table["rows"]}
    by_change = {"blank-out", "blank-out, absolute", "LIME", "integrated gradients"}
    assert {name for name, each in shares.items() if min(each) > 50} - by_change == {"ALTI rollout"}
    assert "({:.0f}, {:.0f} and {:.0f} %)".format(*shares["ALTI rollout"]) in guide
    order = sorted(shares, key=lambda name: -shares[name][1])
    assert order[0] == "LIME"
    assert {*order[1:4]} == {"raw attention × gradient", "blank-out", "relevance"}
    assert shares["gradient norm"][1] < 50
    for name, cells in table["rows"]:
        assert abs(float(cells[0]) - np.mean(shares[name])) <= 1, "the mean of the kinds, of rounded numbers"


def test_what_nine_models_show_of_flow_and_of_raw_attention_is_told() -> None:
    root = Path(__file__).parents[1]
    stored = json.loads((root / "results" / "faithfulness.json").read_text())
    models = [
        rows[f"agreement {form}"]["means"]
        for rows in stored["per_seed"].values()
        for form in ("plain", "evolving", "Bayesian")
    ]
    assert len(models) == 9
    guide, remark = (
        " ".join((root / place).read_text().split())
        for place in ("docs/judge.md", "results/faithfulness.remark.md")
    )

    def told(first: str, second: str, protocol: str) -> str:
        apart = [means[protocol][first] - means[protocol][second] for means in models]
        mean, low, high = (f"{each:.2f}".replace("-0.00", "0.00") for each in mean_interval(apart))
        return f"{mean} ({low} to {high}".replace("-", "−")

    assert f"comprehensiveness {told('raw', 'random', 'comprehensiveness').replace(' (', ', ')})" in remark
    first = told("raw", "random", "ground_truth").replace(" (", " more, ")
    assert f"({first}; in eight of nine)" in remark
    assert f"({first})" in guide
    above = [means["ground_truth"]["raw"] > means["ground_truth"]["random"] for means in models]
    assert sum(above) == 8
    for graph, texts in {"": (remark, guide), "/gradient": (remark,)}.items():
        told_of = told(f"flow{graph}", f"rollout{graph}", "comprehensiveness")
        assert all(f"comprehensiveness {told_of}" in text.replace("0.08, −", "0.08 (−") for text in texts)
        assert f"the subject first {told(f'flow{graph}', f'rollout{graph}', 'ground_truth')})" in remark
    for name, protocol in (("LeRF − MoRF", "between"), ("normalised AOPC", "normalised_comprehensiveness")):
        better = told("flow/gradient", "rollout/gradient", protocol)
        assert f"{name} {better})" in remark
        assert abs(float(told("flow", "rollout", protocol).split()[0].replace("−", "-"))) == 0.0
    words = told("flow/gradient", "rollout/gradient", "between").replace(" (", ", ")
    assert f"LeRF − MoRF {words}, nine models)" in guide
