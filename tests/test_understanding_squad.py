"""SQuAD in the tables of language understanding: what is held out, windows, thresholds, trainings."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    MambaConfig,
    RobertaConfig,
    RobertaModel,
)

from overt.data import squad
from overt.data.squad import Question, Questions
from overt.recipes import reproduce, spans, squad_runs, text_training, understanding_runs
from overt.recipes._recipe import Outcome
from overt.recipes.ea_understanding import BAM_TABLE_5
from overt.recipes.squad_runs import most_tokens, texts_of, with_windows
from overt.recipes.text_training import TextTraining, collator_of, load_model, predict_ends
from overt.recipes.understanding_forms import knobs
from overt.recipes.understanding_runs import ANSWERS, HELD_OUT, published_for, published_training
from small_text import small_bert

WORDS = ["where", "answer", *(f"w{number}" for number in range(12))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_bert(tmp_path_factory.mktemp("pretrained"), WORDS)


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


def questions(count: int, seed: int = 0, impossible: bool = False) -> list[Question]:
    """Four questions an article; the answer to each is the word "answer", or there is none."""
    random, made = Random(seed), []
    for number in range(count):
        words = random.choices(WORDS[2:], k=random.randint(4, 9))
        never = impossible and number % 2 == 1
        if not never:
            words.insert(random.randrange(len(words)), "answer")
        context = " ".join(words)
        answers = ((), ()) if never else (("answer",), (context.index("answer"),))
        made.append(Question(f"{seed}-{number}", f"article {number // 4}", context, "where", *answers, never))
    return made


def write(path: Path, asked: list[Question]) -> None:
    """A file in SQuAD's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [
        {
            "title": one.title,
            "paragraphs": [
                {
                    "context": one.context,
                    "qas": [
                        {
                            "id": one.id,
                            "question": one.text,
                            "answers": [
                                {"text": text, "answer_start": start}
                                for text, start in zip(one.answers, one.starts, strict=True)
                            ],
                            "is_impossible": one.impossible,
                        }
                    ],
                }
            ],
        }
        for one in asked
    ]
    path.write_text(json.dumps({"data": data}))


# --- What is held out ---


def test_no_context_and_no_article_is_both_trained_on_and_held_out() -> None:
    asked = [one._replace(title="" if number % 3 else one.title) for number, one in enumerate(questions(200))]
    asked += [one._replace(id=f"again {one.id}", title="another") for one in asked[::7]]  # the same contexts
    train, held = squad.set_apart(asked, 0.1)
    assert sorted([*train, *held]) == sorted(asked)
    assert not {one.context for one in train} & {one.context for one in held}
    titles = [{one.title for one in part if one.title and one.title != "another"} for part in (train, held)]
    assert not titles[0] & titles[1]
    assert 0.08 * len(asked) <= len(held) <= round(0.1 * len(asked))
    assert squad.set_apart(asked, 0.1) == (train, held)
    assert squad.set_apart(asked, 0.1, seed=1)[1] != held


def test_articles_larger_than_the_share_are_held_out_whole_and_one_alone_is_refused() -> None:
    asked = questions(12)  # three articles of four
    train, held = squad.set_apart(asked, 0.1)
    assert (len(train), len({one.title for one in held}), len(held)) == (8, 1, 4)
    with pytest.raises(ValueError, match="at least two articles to set 10% of them apart, got 4 about 1"):
        squad.set_apart(asked[:4])


def test_the_public_subsets_stand_in_for_a_missing_version_1_1_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = (
        questions(4),
        [one._replace(title="other", context=f"{one.context} .") for one in questions(2)],
    )
    write(tmp_path / squad.SUBSET[0], train)
    rows = [{"context": "w1 answer", "question": "where", "answer": "answer"}]
    (tmp_path / squad.SUBSET[1]).write_text(json.dumps(rows))
    write(tmp_path / squad.SUBSET[2], test)
    monkeypatch.setattr(squad, "SUBSET_COUNTS", dict(zip(squad.SUBSET_COUNTS, (4, 1, 2), strict=True)))
    both = ["SQuAD 1.1", "SQuAD 2.0"]
    found, missing = squad.load_available(tmp_path, both)
    assert {name: len(each.train) for name, each in found.items()} == {"SQuAD subset": 5}
    assert list(missing) == ["SQuAD 2.0"]
    assert "train-v2.0.json and dev-v2.0.json not found" in missing["SQuAD 2.0"]
    write(tmp_path / "train-v1.1.json", train)
    found, missing = squad.load_available(tmp_path, both)
    assert (found, list(missing)) == ({}, both), "half of SQuAD 1.1 is a mistake, not a lack of it"
    write(tmp_path / "dev-v1.1.json", test)
    assert list(squad.load_available(tmp_path, both)[0]) == ["SQuAD 1.1"]
    with pytest.raises(ValueError, match=r"name must be one of .*'SQuAD 3'"):
        squad.load_available(tmp_path, ["SQuAD 3"])


# --- Windows and batches ---


def test_windows_are_the_published_ones_clipped_to_what_the_model_takes(
    model: str, tokenizer: Any, tmp_path: Path
) -> None:
    assert most_tokens(model, tokenizer)[0] == 512
    assert most_tokens(model, tokenizer)[1] == ["qa_outputs.bias", "qa_outputs.weight"]
    assert most_tokens(small_bert(tmp_path / "few", WORDS, max_position_embeddings=40), tokenizer)[0] == 40
    sizes: Any = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = RobertaConfig(vocab_size=20, max_position_embeddings=42, pad_token_id=1, **sizes)
    RobertaModel(config).save_pretrained(tmp_path / "roberta")
    assert most_tokens(str(tmp_path / "roberta"), tokenizer)[0] == 40, "its first two positions are not used"
    albert = {version: published_training("ALBERT-base", f"SQuAD {version}", 1) for version in ("1.1", "2.0")}
    full = with_windows(albert["1.1"], 512)
    assert (full.longest, full.stride, full.longest_question) == (384, 128, 64)
    assert (full.updates, full.batch, full.learning_rate, full.warmup) == (3649, 48, 5e-5, 365)
    assert (with_windows(albert["2.0"], 512).longest, with_windows(albert["2.0"], 512).stride) == (512, 128)
    for most in (512, 256, 40, 12):
        clipped = with_windows(albert["2.0"], most)
        assert clipped.longest == most
        asked = questions(3)
        rows = texts_of(Questions("q", asked, asked, "", ""), tokenizer, clipped, 0.0, HELD_OUT).train
        assert max(len(row["input_ids"]) for row in rows) <= most


def test_published_settings_are_those_of_a_model_on_a_task() -> None:
    assert (
        published_for("albert-base-v2", "SQuAD 2.0")
        == published_for("albert-base-v2", "CoLA")
        == "ALBERT-base"
    )
    assert published_for("albert-base-v2", "SQuAD subset") is None, "no published split"
    assert published_for("bert-base-uncased", "CoLA") == "BERT-Base"
    assert published_for("bert-base-uncased", "SQuAD 1.1") is None, "Wang et al. have no settings for it"
    assert published_for("all-MiniLM-L6-v2", "SQuAD 1.1") is None
    assert [knobs(f"SQuAD {name}", None, 384).k for name in ("1.1", "2.0", "subset")] == [10, 2000, 10]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_as_transformers_does_and_answers_move_with_their_tokens(
    side: str, model: str
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side=side)
    asked = questions(9)
    rows = squad_runs.encode(spans.Asked(asked, spans.windows(asked, tokenizer)))
    theirs = DataCollatorWithPadding(tokenizer)(
        [{name: codes.tolist() for name, codes in text_training.without_label(row).items()} for row in rows]
    )
    ours = collator_of(tokenizer)(rows)
    assert ours.keys() == {*theirs.keys(), "start_positions", "end_positions"}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for place in ("start_positions", "end_positions"):
        pointed = ours["input_ids"].gather(1, ours[place][:, None]).flatten()
        assert set(pointed.tolist()) == {tokenizer.convert_tokens_to_ids("answer")}
    scores = [{"input_ids": [1], "labels": 2.5}, {"input_ids": [1, 1], "labels": 0.5}]
    assert collator_of(tokenizer)(scores)["labels"].dtype == torch.float32
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"need a tokenizer with a token for padding; .* has none"):
        collator_of(tokenizer)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_of_each_window_are_those_of_the_window_alone(side: str, model: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side=side)
    net = load_model(model, None, 0)[0].eval()
    asked = questions(9)
    rows = squad_runs.encode(spans.Asked(asked, spans.windows(asked, tokenizer)))
    starts, ends = predict_ends(net, rows, tokenizer)
    for row, start, end in zip(rows, starts, ends, strict=True):
        assert len(start) == len(end) == len(row["input_ids"])
        if side == "right":  # BERT counts positions from the padding on
            alone = predict_ends(net, [row], tokenizer)
            np.testing.assert_allclose(alone, [[start], [end]], atol=1e-5)


def test_a_model_without_a_head_for_questions_is_refused_by_name(tmp_path: Path) -> None:
    MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no question-answering model for the MambaConfig of"):
        load_model(str(tmp_path), None, 0)


def test_a_tokenizer_that_only_ends_texts_has_a_token_for_no_answer(model: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model, cls_token=None, sep_token=None, eos_token="[SEP]")
    [window] = spans.windows(questions(1), tokenizer)
    assert tokenizer.convert_ids_to_tokens(window.inputs["input_ids"])[: window.null + 1] == [
        "[CLS]", "where", "[SEP]",
    ]  # fmt: skip


# --- Scores ---


def test_the_threshold_for_no_answer_is_chosen_on_held_out_questions_or_0(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Margins of held-out questions fit a threshold of 3, those of the development questions one of −3."""

    def logits(_model: Any, rows: list[Any], _tokenizer: Any) -> tuple[list[Any], list[Any]]:
        middle = 3.0 if len(rows) == 8 else -3.0
        both: tuple[list[Any], list[Any]] = [], []
        for row in rows:
            impossible = row["start_positions"] == 0
            answer = row["start_positions"] or 4
            for place, each in enumerate(both):
                values = np.full(len(row["input_ids"]), -9.0)
                values[answer], values[0] = 0.0, (middle + (1 if impossible else -1)) * (place == 0)
                each.append(values)
        return both

    monkeypatch.setattr(squad_runs, "predict_ends", logits)
    data = Questions("SQuAD 2.0", questions(80, 0, True), questions(40, 1, True), "", "")
    training = with_windows(TextTraining(1), 64)
    texts = texts_of(data, tokenizer, training, 0.1, HELD_OUT)
    assert len(texts.parts[HELD_OUT]) == 8
    numbers, answers = squad_runs.measure(None, texts, texts.parts, tokenizer, HELD_OUT)
    assert 2 <= numbers["threshold"] < 4
    assert numbers[f"{HELD_OUT} F1"] == 100, "the threshold is right there"
    assert numbers["SQuAD 2.0 F1"] == numbers["SQuAD 2.0 EM"] == 50, "all answered: not chosen here"
    assert all(answers["SQuAD 2.0"].values())
    without = texts_of(data, tokenizer, training, 0.0, HELD_OUT)
    numbers, _ = squad_runs.measure(None, without, without.parts, tokenizer, HELD_OUT)
    assert (numbers["threshold"], numbers["SQuAD 2.0 F1"]) == (0, 50)
    always = Questions("SQuAD 1.1", questions(80), questions(40, 1), "", "")
    numbers, answers = squad_runs.measure(
        None, texts_of(always, tokenizer, training, 0.0, HELD_OUT), ["SQuAD 1.1"], tokenizer, HELD_OUT
    )
    assert numbers == {"SQuAD 1.1 EM": 100, "SQuAD 1.1 F1": 100}, "version 1.1 always has an answer"


def test_the_average_is_glues_and_published_gains_stand_beside_exact_match_and_f1() -> None:
    def row(task: str, choosing: bool = False) -> dict[str, Any]:
        training = {"batch": 32, "longest": 384, "stride": 128}
        return {"task": task, "training": training, "choosing": choosing}

    run = {"run": {"date": "2024-01-01"}, "parameters": 9, "added": 3}
    per_seed: dict[int, dict[str, Any]] = {}
    for seed in range(3):
        per_seed[seed] = {}
        for form, gain in (("plain", 0.0), ("BAM-WC", 1.0 + 0.1 * seed), ("Evolving", -1.0)):
            mcc, exact, f1 = 50 + gain, 60 + 2 * gain, 80 + 3 * gain
            scores = {"CoLA MCC": mcc, "score": mcc, "bam_score": mcc}
            per_seed[seed][f"{form}, CoLA"] = {**run, **scores}
            scores = {"EM": exact, "F1": f1, "score": f1, "bam_score": f1}
            scores |= {"SQuAD subset EM": exact, "SQuAD subset F1": f1}
            per_seed[seed][f"{form}, SQuAD subset"] = {**run, **scores}
    described = {"train": 10, "dev": {"x": 5}, "impossible": {"train": 0, "dev": 0}}
    config = {
        "model": "m",
        "published_settings": None,
        "chosen_rates": ["CoLA", "SQuAD subset"],
        "held_out": 0.1,
        "data": {"CoLA": described, "SQuAD subset": described},
        "rates": {"CoLA": 1e-4, "SQuAD subset": 1e-4},
        "forms": ["plain", "BAM-WC", "Evolving"],
        "rows": {f"plain, {task}": row(task) for task in ("CoLA", "SQuAD subset")},
        "head": ["qa_outputs.weight"],
    }
    report = BAM_TABLE_5.report(Outcome(config, per_seed))
    measured, glue, exact, f1 = report.grids[:4]
    assert measured.columns[-3:] == ["CoLA MCC", "SQuAD subset EM", "SQuAD subset F1"]
    assert dict(measured.rows)["plain"][2] == "50.00±0.00", "SQuAD is not part of GLUE's average"
    assert [name for name, _ in glue.rows] == ["BAM-WC, CoLA − plain, CoLA", "Evolving, CoLA − plain, CoLA"]
    for grid, title, mean, gain in ((exact, "exact match", "2.20", "0.54"), (f1, "F1", "3.30", "0.12")):
        assert grid.title == f"SQuAD, {title}: differences with the same seed"
        lines = dict(grid.rows)
        found = lines["BAM-WC, SQuAD subset − plain, SQuAD subset"]
        assert (found[1], found[-1]) == (mean, gain)
        assert lines["Evolving, SQuAD subset − plain, SQuAD subset"][-1] == "–"
    notes = " ".join(report.notes)
    assert "scores are not comparable with published ones" in notes
    assert "windows of at most 384 tokens; neighbouring windows share 128 tokens" in notes
    assert "drawn at random: qa_outputs.weight" in notes


# --- Whole trainings ---


@pytest.mark.slow
def test_forms_are_trained_on_squad_and_compared_on_its_development_questions(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(understanding_runs, "RATES", (1e-5, 3e-2))
    monkeypatch.setattr(understanding_runs, "RATE_SEEDS", 1)
    monkeypatch.setenv("COLUMNS", "500")
    data = tmp_path / "data"
    write(data / "squad" / "train-v1.1.json", questions(160))
    dev = questions(40, 1)
    write(data / "squad" / "dev-v1.1.json", dev)
    seen: list[list[Any]] = []
    train, fetch = text_training.train, text_training.Batches.__getitem__

    def note(self: Any, update: int) -> Any:
        batch = fetch(self, update)
        seen[-1].append([batch[name].tolist() for name in ("input_ids", "start_positions")])
        return batch

    def begin(*arguments: Any, **options: Any) -> Any:
        seen.append([])
        return train(*arguments, **options)

    monkeypatch.setattr(text_training.Batches, "__getitem__", note)
    monkeypatch.setattr(understanding_runs, "step_ms", lambda *_: 1.0)
    monkeypatch.setattr(text_training, "train", begin)

    def run(recipe: str, *extra: str) -> dict[str, Any]:
        places = {"out": Path("runs"), "results": Path("results")}
        return reproduce.run(recipe, data, 1, "cpu", model, extra=["--epochs", "6", *extra], **places)

    chosen = ["--tasks", "SQuAD", "--forms", "plain,Evolving,BAM-WC"]
    result = run("bam-table-5", *chosen)
    assert "SQuAD 2.0 is left out: " in capsys.readouterr().out
    rows, config = result["per_seed"]["0"], result["config"]
    forms = ["plain", "Evolving", "BAM-WC"]
    trials = [f"plain, SQuAD 1.1, rate {rate:g}" for rate in (1e-5, 3e-2)]
    assert set(rows) == {*trials, *(f"{form}, SQuAD 1.1" for form in forms)}
    assert config["rates"] == {"SQuAD 1.1": 3e-2}
    assert not any(key.startswith("SQuAD") for key in rows[trials[0]]), "development questions do not choose"
    assert config["head"] == ["qa_outputs.bias", "qa_outputs.weight"]
    assert config["rows"]["plain, SQuAD 1.1"]["training"]["stride"] == 128
    assert seen[2] == seen[3] == seen[4] != [], "all forms see the same batches"
    for form in forms:
        entry = rows[f"{form}, SQuAD 1.1"]
        assert entry["SQuAD 1.1 EM"] == entry["EM"] > 90, "one word is always the answer"
        assert entry["score"] == entry["SQuAD 1.1 F1"]
        [path] = Path("runs").rglob(f"{form}-SQuAD-1.1/seed-0/{ANSWERS}")
        told = json.loads(path.read_text())
        assert 100 * np.mean([told[one.id] == "answer" for one in dev]) == entry["EM"]
        assert (path.parent / "model" / "model.safetensors").is_file()
    assert rows["BAM-WC, SQuAD 1.1"]["kl"]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("everything is there")

    monkeypatch.setattr(text_training, "train", refuse)
    assert run("bam-table-5", *chosen)["per_seed"] == result["per_seed"]
    assert run("ea-table-3", *chosen)["per_seed"] == result["per_seed"], "the recipes share their trainings"
    with pytest.raises(ValueError, match="--submission needs a task of GLUE, got --tasks SQuAD"):
        run("ea-table-3", *chosen, "--submission")

    def cannot(*_: Any) -> None:
        raise ValueError("SQuAD needs a fast tokenizer")

    monkeypatch.setattr(squad_runs, "most_tokens", cannot)
    with pytest.raises(ValueError, match="SQuAD needs a fast tokenizer"):
        run("bam-table-5", *chosen)
    capsys.readouterr()
    with pytest.raises(FileNotFoundError, match=r"none of the tasks MRPC, .*SQuAD 2\.0 is there"):
        run("bam-table-5")
    assert "SQuAD 1.1 is left out: SQuAD needs a fast tokenizer" in capsys.readouterr().out
