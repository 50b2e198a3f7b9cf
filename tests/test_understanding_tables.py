"""Tables of language understanding from numbers: what wins, averages, seeds, and what a result file keeps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from rich.console import Console

import overt
from overt.data import glue
from overt.data.glue import TASKS, Splits
from overt.recipes import (
    ea_probe_text,
    ea_understanding,
    reproduce,
    uncertainty,
    understanding_runs,
    understanding_tables,
)
from overt.recipes._recipe import Outcome, Request
from overt.recipes._runs import SETTINGS, finish_run, run_record
from overt.recipes.text_training import Texts
from overt.recipes.understanding_forms import PLAIN, forms, row_name
from overt.recipes.understanding_runs import BAM_SCORE, HELD_OUT, RATES, Case, Parts, shared_of

MEASURES = list(uncertainty.MEASURES)


def outcome_of(numbers: dict[tuple[str, str, str, str], dict[int, float]]) -> Outcome:
    """(task, part, method, measure) → seed → number, as the recipe stores it."""
    per_seed: dict[int, dict[str, Any]] = {}
    for (task, part, method, measure), found in numbers.items():
        row = row_name(uncertainty.form_of(method), task)
        for seed, value in found.items():
            per_seed.setdefault(seed, {}).setdefault(row, {})[f"{part} | {method} | {measure}"] = value
    return Outcome({"data": {task: {} for task, *_ in numbers}}, per_seed)


def noisy(
    levels: dict[tuple[str, str, str], float], seeds: int = 5, spread: float = 0.01
) -> dict[tuple[str, str, str, str], dict[int, float]]:
    """(task, part, method) → level of all measures, with noise and with the baselines at 0."""
    rng = random.Random(0)
    places = dict.fromkeys((task, part) for task, part, _ in levels)
    baselines = (uncertainty.ONE, *uncertainty.BASELINES)
    levels = {(*place, method): 0.0 for place in places for method in baselines} | levels
    return {
        (*place, measure): {
            seed: uncertainty.MEASURES[measure] * level + rng.gauss(0, spread) for seed in range(seeds)
        }
        for place, level in levels.items()
        for measure in MEASURES
    }


def wins(outcome: Outcome) -> set[tuple[str, str, str]]:
    return {(each.task, each.rows, each.method) for each in uncertainty.verdicts(outcome) if each.wins}


def test_a_win_needs_both_baselines_and_the_right_direction() -> None:
    method = uncertainty.LAPLACE
    place = ("CoLA", "CoLA")
    for levels, won in (
        ({method: 1.0}, True),
        ({method: -1.0}, False),
        ({method: 1.0, uncertainty.DROPOUT: 2.0}, False),
        ({method: 1.0, uncertainty.TEMPERATURE: 2.0}, False),
        ({method: 1.0, uncertainty.ONE: 2.0}, True),  # which is no baseline
    ):
        judged = uncertainty.verdicts(
            outcome_of(noisy({(*place, name): level for name, level in levels.items()}))
        )
        assert {each.measure for each in judged} == set(MEASURES), "accuracy cannot be won"
        assert all(each.wins == won for each in judged), levels


def test_p_values_are_corrected_over_tasks_and_measures_of_one_method_on_one_kind_of_rows() -> None:
    method, shift = "Bayesian k=2", "10% typos"
    tasks = ("CoLA", "SST-2", "MRPC")
    levels = {(task, part, method): 0.02 for task in tasks for part in (task, shift)}
    levels |= {("CoLA", "CoLA", uncertainty.LAPLACE): 1.0}  # of another method
    numbers = noisy(levels, spread=0.02)
    judged = uncertainty.verdicts(outcome_of(numbers))
    for rows in (uncertainty.DEVELOPMENT, shift):
        family = [each for each in judged if (each.method, each.rows) == (method, rows)]
        assert [(each.task, each.measure) for each in family] == [(t, m) for t in tasks for m in MEASURES]
        for place, baseline in enumerate(uncertainty.BASELINES):
            p = []
            for each in family:
                part = each.task if rows == uncertainty.DEVELOPMENT else shift
                ours, theirs = (
                    [numbers[each.task, part, name, each.measure][seed] for seed in range(5)]
                    for name in (method, baseline)
                )
                p.append(float(scipy.stats.ttest_rel(ours, theirs).pvalue))
            ranked = sorted(range(18), key=lambda number: p[number])
            expected, most = [0.0] * 18, 0.0
            for rank, number in enumerate(ranked):  # Holm 1979
                most = max(most, min(1.0, (18 - rank) * p[number]))
                expected[number] = most
            assert [each.corrected[place] for each in family] == pytest.approx(expected)
            assert any(raw < 0.05 < corrected for raw, corrected in zip(p, expected, strict=True))


def test_five_ensembles_can_win_and_two_of_sst_2_cannot() -> None:
    numbers = noisy({(task, task, "Bayesian k=2"): -1.0 for task in ("CoLA", "SST-2")}, seeds=5)
    rng = random.Random(1)
    for task, pairs in (("CoLA", 5), ("SST-2", 2)):
        for measure, better in uncertainty.MEASURES.items():
            numbers[task, task, uncertainty.ENSEMBLE, measure] = {
                2 * pair: better + rng.gauss(0, 0.01) for pair in range(pairs)
            }
            for baseline in uncertainty.BASELINES:
                if task == "CoLA":  # five more plain models
                    more = {seed: rng.gauss(0, 0.01) for seed in range(5, 10)}
                    numbers[task, task, baseline, measure] |= more
    outcome = outcome_of(numbers)
    assert wins(outcome) == {("CoLA", uncertainty.DEVELOPMENT, uncertainty.ENSEMBLE)}
    shown = {
        (task, method): uncertainty.shown_values(outcome, task, uncertainty.Key(task, method, "NLL"))
        for task in ("CoLA", "SST-2")
        for method in (uncertainty.ENSEMBLE, uncertainty.TEMPERATURE)
    }
    assert list(shown["CoLA", uncertainty.ENSEMBLE]) == [0, 2, 4, 6, 8]
    assert list(shown["SST-2", uncertainty.ENSEMBLE]) == [0, 2]
    assert list(shown["CoLA", uncertainty.TEMPERATURE]) == list(range(5)), "the seeds that all forms have"


def test_the_default_seeds_give_five_ensembles_of_disjoint_seeds_and_two_of_sst_2(tmp_path: Path) -> None:
    from overt._files import write_tensors
    from overt.recipes._rows import folder_name

    seeds = uncertainty.UNCERTAINTY.seeds
    assert seeds == 5
    counts = {task: uncertainty.seeds_of(PLAIN, task, seeds) for task in uncertainty.TASKS}
    assert counts == {"CoLA": 10, "SST-2": 5, "MRPC": 10}
    assert {uncertainty.seeds_of(form, "CoLA", seeds) for form in uncertainty.FORMS[1:]} == {5}
    texts, numbers = {}, {}
    for task, count in counts.items():
        rows = [{"input_ids": [1], "labels": number % 2} for number in range(6)]
        texts[task] = Texts([], {HELD_OUT: rows, task: rows}, ("no", "yes"), {"some": (task, [0, 1, 4])})
        for seed in range(count):
            name = row_name(PLAIN, task)
            numbers[name, seed] = {"run": {"settings": {"seed": seed, "updates": 100}}}
            folder = tmp_path / folder_name(name) / f"seed-{seed}"
            folder.mkdir(parents=True)
            trial = (task, seed) == ("MRPC", 3)  # the numbers are of another training
            (folder / SETTINGS).write_text(json.dumps({"seed": seed, "updates": 2 if trial else 100}))
            yes = torch.linspace(0.1, 0.9, 6).roll(seed)
            write_tensors(
                folder / understanding_runs.PREDICTIONS,
                {f"{task} | {uncertainty.ONE}": torch.stack([1 - yes, yes], dim=1)},
            )
    shared: Any = understanding_runs.Shared("", None, texts, False)
    uncertainty.add_ensembles(numbers, shared, tmp_path)
    key = f"CoLA | {uncertainty.ENSEMBLE} | NLL"
    assert [seed for (name, seed), entry in numbers.items() if key in entry] == [0, 2, 4, 6, 8]
    sst = f"SST-2 | {uncertainty.ENSEMBLE} | NLL"
    assert [seed for (name, seed), entry in numbers.items() if sst in entry] == [0, 2]
    mrpc = f"MRPC | {uncertainty.ENSEMBLE} | NLL"
    assert [seed for (name, seed), entry in numbers.items() if mrpc in entry] == [0, 4, 6, 8]
    yes = torch.linspace(0.1, 0.9, 6).double()
    mean = (yes.roll(2) + yes.roll(3)) / 2
    right = torch.where(torch.arange(6) % 2 == 1, mean, 1 - mean)
    entry = numbers["plain, CoLA", 2]
    assert entry[key] == pytest.approx(-float(right.log().mean()))
    assert entry[f"some | {uncertainty.ENSEMBLE} | NLL"] == pytest.approx(
        -float(right[[0, 1, 4]].log().mean())
    )


def test_tables_and_wins_name_the_rows() -> None:
    levels = {("MRPC", part, uncertainty.LAPLACE): 1.0 for part in ("MRPC", "MRPC test", "30% typos")}
    outcome = outcome_of(noisy(levels))
    outcome.config.update(config_of(("MRPC",), (PLAIN,)), missing={"SST-2, movie reviews": "none here"})
    for rows in outcome.per_seed.values():
        for numbers in rows.values():
            numbers["run"] = {"date": "2026-01-01"}
    report = uncertainty.report(outcome)
    titles = [grid.title for grid in report.grids]
    assert titles == ["MRPC", "MRPC, test rows", "MRPC, 30% typos", "Wins"]
    won = [name for name, _ in report.grids[-1].rows]
    parts = [uncertainty.DEVELOPMENT, "test rows", "30% typos"]
    assert won == [f"MRPC, {part}: {uncertainty.LAPLACE}" for part in parts for _ in MEASURES]
    assert "wins: development rows 6 of 6, test rows 6 of 6, 30% typos 6 of 6." in report.notes[0]
    assert "Not measured, as not there: SST-2, movie reviews (none here)." in report.notes


def test_a_single_pass_is_certain_of_every_row() -> None:
    sure = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]])
    labels = torch.tensor([0, 1, 1, 0])
    once = uncertainty.measures(sure.unsqueeze(0), labels)
    often = uncertainty.measures(sure.expand(20, -1, -1), labels)
    assert once["PAvPU"] == often["PAvPU"] == once["accuracy"] == 75


def request_of(data: Path | None) -> Request:
    return Request(Path("runs"), data, None, 1, "cpu", False, {"discard-models": True}, Console(quiet=True))


def splits_of(task: str, rows: list[glue.Row]) -> Splits:
    return Splits(TASKS[task], rows, {task: rows}, {}, "here", "0" * 64)


def test_reviews_are_a_part_of_sst_2_where_they_are_and_listed_where_not(tmp_path: Path) -> None:
    splits = splits_of("SST-2", [glue.Row(("fine film",), 1), glue.Row(("poor plot",), 0)])
    shifts = ["10% typos", "10% words dropped", "30% typos", "30% words dropped"]
    without = uncertainty.shifted(request_of(tmp_path), "SST-2", splits)
    assert list(without.rows) == shifts
    assert list(without.missing) == [uncertainty.REVIEWS]
    assert "has no movies of ERASER" in without.missing[uncertainty.REVIEWS]
    folder = tmp_path / "eraser" / "movies"
    folder.mkdir(parents=True)
    (folder / "docs.json").write_text(json.dumps({"a": "a\ndull film", "b": "good ."}))
    for split, name, label in (("train", "a", "NEG"), ("val", "b", "POS"), ("test", "b", "POS")):
        line = {"annotation_id": name, "classification": label, "evidences": []}
        (folder / f"{split}.jsonl").write_text(json.dumps(line) + "\n")
    found = uncertainty.shifted(request_of(tmp_path), "SST-2", splits)
    assert list(found.rows) == [*shifts, uncertainty.REVIEWS]
    assert found.rows[uncertainty.REVIEWS] == [
        glue.Row(("a dull film",), 0),
        glue.Row(("good .",), 1),
        glue.Row(("good .",), 1),
    ]
    assert not found.missing
    assert found.digest("x") != without.digest("x"), "runs without the reviews are not taken for runs with"
    assert Parts().digest("x") == "x"


def test_reviews_are_cut_to_128_tokens_whatever_the_model_takes() -> None:
    class Tokenizer:
        def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
            assert truncation
            return {"input_ids": [[1] * min(max_length, len(text.split())) for text in texts]}

    request = request_of(None)
    object.__setattr__(request, "model", "albert-base-v2")
    long = [glue.Row(("word " * 600,), 1), glue.Row(("word",), 0)]
    case = Case(splits_of("SST-2", long), "ALBERT-base", 0.0, Parts({uncertainty.REVIEWS: long}))
    texts = shared_of(request, {"SST-2": case}, Tokenizer(), 0, None).texts["SST-2"]
    lengths = {part: max(len(row["input_ids"]) for row in rows) for part, rows in texts.parts.items()}
    assert lengths == {"SST-2": 512, uncertainty.REVIEWS: 128}


# --- The tables of the papers ---

ALL_TASKS = ("plain", "Evolving", "w/o convolution", "w/o skip", "1×1", "5×5", "RealFormer")
ALL_TASKS += ("Synthesizer random", "BAM-WC", "BAM-WC weight 1", "no KL", "both")
FEW = ("BAM-WF", "BAM-LC", "BAM-LF", "Synthesizer dense")


def test_the_forms_are_what_they_are_called() -> None:
    found = forms()
    assert {*ALL_TASKS, *FEW} <= set(found)
    default = {
        *ea_understanding.IN_TABLE_3,
        *ea_understanding.IN_TABLE_4,
        *ea_understanding.IN_BAM,
    }
    assert default == set(ALL_TASKS), "the three tables together"
    evolving, none, no_skip = (found[name][0] for name in ("Evolving", "w/o convolution", "w/o skip"))
    assert (evolving.alpha, evolving.beta) == (0.1, 0.1)  # type: ignore[attr-defined]
    assert (none.alpha, none.beta) == (0.1, 0)  # type: ignore[attr-defined]
    assert (no_skip.alpha, no_skip.beta) == (0, 0.1)  # type: ignore[attr-defined]
    weights = {
        name: (each.family, each.prior, each.kl_weight)
        for name, mechanisms in found.items()
        for each in mechanisms
        if isinstance(each, overt.Bayesian)
    }
    usual = overt.Bayesian().kl_weight
    assert weights["BAM-WC"] == weights["both"] == ("weibull", "contextual", usual)
    assert weights["Bayesian k=2"] == weights["Bayesian k=10"] == ("weibull", "contextual", usual)
    assert weights["BAM-WC weight 1"] == ("weibull", "contextual", 1)
    assert weights["no KL"][1] is None
    assert [weights[name][:2] for name in FEW[:3]] == [
        ("weibull", "fixed"),
        ("lognormal", "contextual"),
        ("lognormal", "fixed"),
    ]


def added(model: Any, form: str) -> int:
    overt.attach(model, *forms()[form])
    return sum(value.numel() for name, value in model.named_parameters() if ".overt." in name)


def test_the_parameters_that_the_notes_name() -> None:
    from transformers import AlbertConfig, AlbertForSequenceClassification, BertConfig
    from transformers import BertForSequenceClassification as Bert

    small = {"vocab_size": 9, "intermediate_size": 4}
    for layers, heads, count in ((12, 12, 14_388), (24, 16, 53_360)):  # kernels depend on the heads alone
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads}
        assert added(Bert(BertConfig(**sizes, **small)), "Evolving") == count
    config = AlbertConfig(hidden_size=768, num_attention_heads=12, embedding_size=4, **small)
    assert added(AlbertForSequenceClassification(config), "BAM-WC") == 330


def entry(score: float) -> dict[str, Any]:
    return {
        "score": score,
        BAM_SCORE: score,
        "parameters": 1_000_000,
        "added": 1234,
        "run": {"date": "2026-01-01"},
    }


def config_of(tasks: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
    training = {"batch": 32, "longest": 128}
    data = {task: {"train": 9, "dev": {task: 9}} for task in tasks}
    return {
        "model": "small",
        "published_settings": None,
        "held_out": 0.1,
        "data": data,
        "rates": dict.fromkeys(tasks, 1e-4),
        "forms": list(names),
        "rows": {row_name(PLAIN, task): {"task": task, "training": training} for task in tasks},
        "head": [],
    }


def test_averages_are_beside_the_published_ones_over_the_same_tasks_and_cells_show_their_seeds() -> None:
    tasks = ("CoLA", "SST-2", "MRPC", "STS-B")
    names = (PLAIN, "Evolving", "BAM-WF")
    per_seed: dict[int, dict[str, Any]] = {seed: {} for seed in range(10)}
    for task in tasks:
        for seed in range(5 if task == "SST-2" else 10):
            per_seed[seed][row_name(PLAIN, task)] = entry(50 + seed)
            gain = 2 + (seed % 2 if task == "CoLA" else 0)
            per_seed[seed][row_name("Evolving", task)] = entry(50 + seed + gain)
    for seed in range(2):
        per_seed[seed][row_name("BAM-WF", "MRPC")] = entry(51 + 3 * seed)
    outcome = Outcome(config_of(tasks, names), per_seed)
    for rows in per_seed.values():
        for name, numbers in rows.items():
            for key in ea_understanding.keys_of(name.partition(", ")[2]):
                numbers[key] = numbers["score"]
    report = ea_understanding.report_table_3(outcome)
    grids = {grid.title: (grid.columns, dict(grid.rows)) for grid in report.grids}
    columns, measured = grids["Measured, small, development rows, %"]
    cells = {form: dict(zip(columns, line, strict=True)) for form, line in measured.items()}
    assert cells["Evolving"]["n"] == "10 (CoLA, MRPC, STS-B); 5 (SST-2)"
    assert (cells["Evolving"]["parameters"], cells["Evolving"]["added"]) == ("1,000,000", "1,234")
    assert cells["Evolving"]["average"] == "54.10±1.59", "of five seeds: 52, 53.25, 54, 55.25, 56"
    assert (cells["BAM-WF"]["n"], cells["BAM-WF"]["average"]) == ("2 (MRPC)", "–")
    assert cells["BAM-WF"]["MRPC F1"] == "52.50", "no deviation of two seeds"
    columns, lines = grids["Differences with the same seed"]
    short = dict(zip(columns, lines["BAM-WF, MRPC − plain, MRPC"], strict=True))
    assert (short["n"], short["95 % interval"], short["p (Holm)"]) == ("2", "–", "–")
    columns, lines = grids[f"Differences of the average over {', '.join(tasks)}"]
    average = dict(zip(columns, lines["Evolving, average − plain, average"], strict=True))
    assert (average["n"], average["points"]) == ("5", "2.10")
    assert float(average["published, EA-BERT-Base"]) == pytest.approx(84.025 - 82.1, abs=0.006)
    told = next(note for note in report.notes if note.startswith("Published averages over CoLA"))
    assert "BERT-Base 82.1, EA-BERT-Base 84.0," in told
    assert any("14,388" in note and "53,360" in note for note in report.notes)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_notes_tell_whether_rows_are_held_out_with_published_settings(share: float) -> None:
    config = config_of(("CoLA",), (PLAIN,)) | {"published_settings": "BERT-Base", "held_out": share}
    config["rows"]["plain, CoLA"]["held_out"] = share
    outcome = Outcome(config, {0: {"plain, CoLA": entry(50.0)}})
    told = ea_understanding.notes_of(outcome)[0]
    rows = (
        "all training rows but a fixed, stratified 10%, which is held out" if share else "all training rows"
    )
    assert f"Settings are the published ones of BERT-Base, on {rows}." in told


def test_both_synthesizers_have_the_published_gain_beside_them() -> None:
    names = (PLAIN, "Synthesizer random", "Synthesizer dense")
    per_seed = {seed: {row_name(form, "RTE"): entry(50.0) for form in names} for seed in range(3)}
    report = ea_understanding.report_table_3(Outcome(config_of(("RTE",), names), per_seed))
    grid = next(grid for grid in report.grids if grid.title.startswith("Differences"))
    place = grid.columns.index("published, Synthesizer")
    assert {name: cells[place] for name, cells in grid.rows} == {
        f"{form}, RTE − plain, RTE": "4.30" for form in names[1:]
    }


# --- What a result file keeps ---


def perform(task: Any, shared: Any, tell: Any) -> dict[str, Any]:
    """Store numbers without a training."""
    del shared, tell
    score = 10.0 * len(task.name) + task.seed + 1e4 * getattr(task.training, "learning_rate", 0.0)
    numbers = entry(score) | {"updates": task.training.updates}
    numbers |= dict.fromkeys(ea_understanding.keys_of(task.row.task), score)
    numbers["run"] = run_record(task.settings, task.command, "here", {})
    finish_run(task.folder, numbers)
    return numbers


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with CoLA and MRPC, and trainings that only note their numbers."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"s\t{n % 2}\t\tword\n" for n in range(80))
    pairs = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "".join(
        f"{n % 2}\t1\t2\ta\tb\n" for n in range(80)
    )
    for task, text in (("CoLA", lines), ("MRPC", pairs)):
        (tmp_path / "data" / task).mkdir(parents=True)
        for file in ("train.tsv", "dev.tsv"):
            (tmp_path / "data" / task / file).write_text(text)

    def texts(_request: Any, cases: Any, *_: Any) -> Any:
        coded = {task: Texts([{}] * len(case.data.train), {}, ("0", "1")) for task, case in cases.items()}
        return understanding_runs.Shared("model", None, coded, False)

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name, instead in (
        ("perform", perform),
        ("shared_of", texts),
        ("step_ms", lambda *_: 1.0),
        ("new_weights", lambda *_: []),
        ("load_tokenizer", lambda _: None),
        ("check_attachable", lambda *_: None),
    ):
        monkeypatch.setattr(understanding_runs, name, instead)
    return tmp_path / "data"


def run(recipe: str, seeds: int, model: str = "model", out: str = "runs", **options: str) -> dict[str, Any]:
    """The result of a recipe on the data of `quick`."""
    extra = [part for option, value in options.items() for part in (f"--{option}", value)]
    places = {"out": Path(out), "results": Path("results")}
    return reproduce.run(recipe, Path("data"), seeds, "cpu", f"./{model}", extra=extra, **places)


def rows(result: dict[str, Any]) -> dict[str, int]:
    """Row of a result → number of its seeds, but for those that choose a learning rate."""
    names = [name for found in result["per_seed"].values() for name in found if ", rate " not in name]
    return {name: names.count(name) for name in names}


@pytest.mark.usefixtures("quick")
def test_tasks_forms_and_seeds_may_come_one_after_the_other() -> None:
    first = run("ea-table-3", 4, tasks="CoLA", forms="plain,Evolving")
    assert rows(first) == {"plain, CoLA": 4, "Evolving, CoLA": 4}
    then = run("ea-table-3", 2, tasks="MRPC", forms="plain,BAM-WF")
    assert rows(then) == {**rows(first), "plain, MRPC": 2, "BAM-WF, MRPC": 2}
    last = run("ea-table-3", 1, tasks="CoLA", forms="RealFormer")
    assert rows(last) == {**rows(then), "RealFormer, CoLA": 1}
    for result in (first, then):
        for seed, numbers in result["per_seed"].items():
            assert numbers.items() <= last["per_seed"][seed].items(), "numbers stay as they are"
    trials = {f"plain, {task}, rate {rate:g}" for task in ("CoLA", "MRPC") for rate in RATES}
    assert {name for name in last["per_seed"]["0"] if ", rate " in name} == trials
    assert list(last["config"]["data"]) == ["CoLA", "MRPC"]
    assert dict(last["tables"][0]["rows"])["plain"][3] == "4 (CoLA); 2 (MRPC)", "seeds of each task"
    # Another table takes the same runs from the result file or from their folders.
    folders = set(Path("runs").rglob("result.json"))
    assert rows(run("bam-table-5", 2, tasks="CoLA", forms="plain")) == {"plain, CoLA": 2}
    assert set(Path("runs").rglob("result.json")) == folders, "nothing was trained"


@pytest.mark.usefixtures("quick")
def test_numbers_with_other_settings_or_of_another_model_are_not_kept() -> None:
    def pretrained(name: str) -> str:
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"name": name}))
        return name

    run("ea-table-3", 1, tasks="CoLA", forms="plain")
    result = run("ea-table-3", 1, out="two", tasks="MRPC", forms="plain", epochs="2")
    assert rows(result) == {"plain, MRPC": 1}, "with other epochs they would not be comparable"
    result = run("ea-table-3", 1, pretrained("other"), tasks="CoLA", forms="plain")
    assert rows(result) == {"plain, CoLA": 1}
    # The same where settings are published, so that no trials tell.
    result = run("ea-table-3", 1, pretrained("bert-base-uncased"), tasks="MRPC", forms="plain")
    assert rows(result) == {"plain, MRPC": 1}
    assert list(result["config"]["data"]) == list(result["config"]["rates"]) == ["MRPC"]
    assert result["config"]["published_settings"] == "BERT-Base"


@pytest.mark.usefixtures("quick")
def test_the_probe_is_trained_on_the_tasks_that_are_asked_for_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = torch.tensor([0, 1])
    sentences = ea_probe_text.Sentences([{}, {}], labels, [{}, {}], labels)
    for name, instead in (
        ("TASKS", ("CoLA", "MRPC")),
        ("layers_of", lambda *_: (1,)),
        ("sentences_of", lambda *_: sentences),
        ("fastest_update", lambda *_: 1.0),
        ("perform", perform),
    ):
        monkeypatch.setattr(ea_probe_text, name, instead)
    first = run("ea-probe-text", 1, tasks="CoLA")
    assert set(rows(first).values()) == {1}
    then = run("ea-probe-text", 2, tasks="MRPC")
    assert rows(then) == {**rows(first), **{name.replace("CoLA", "MRPC"): 2 for name in rows(first)}}
    titles = [table["title"].partition(":")[0] for table in then["tables"]]
    assert titles[:2] == ["From the maps alone, CoLA", "From the maps alone, MRPC"]


def test_a_published_gain_on_qqp_is_that_of_f1_wherever_it_stands() -> None:
    found = {
        name: ea_understanding.first_of(scores)["QQP"] for name, scores in understanding_tables.DEV.items()
    }
    assert (found["BERT-Base"], found["EA-BERT-Base"]) == (88.3, 88.5), "accuracy/F1"
    assert (found["T5-Base"], found["EA-T5-Base"]) == (88.2, 88.8), "F1/accuracy"
    assert ea_understanding.first_of(understanding_tables.DEV["BERT-Base"])["STS-B"] == 89.5
