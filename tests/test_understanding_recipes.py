"""Fine-tuning on GLUE: settings, forms, learning rates, and the tables."""

from __future__ import annotations

import shutil
import statistics
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import overt
from overt.data.glue import TASKS, Row
from overt.recipes import (
    _runs,
    glue_submission,
    reproduce,
    text_training,
    uncertainty,
    understanding_runs,
    understanding_submission,
)
from overt.recipes._recipe import Outcome
from overt.recipes.text_training import Texts, TextTraining, encode, load_model, predict
from overt.recipes.understanding_forms import PLAIN, forms, knobs
from overt.recipes.understanding_runs import HELD_OUT, RATES, scores_of
from overt.recipes.understanding_tables import AVERAGES, BAM, BAM_TUNED, DEV, GLUE, TEST, TUNED, known_model
from small_text import WORDS, cola, small_bert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_bert(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return cola(tmp_path / "data")


def test_published_numbers_give_the_published_averages() -> None:
    for part, table in (("dev", DEV), ("test", TEST)):
        assert set(table) == set(AVERAGES[part])
        for name, scores in table.items():
            assert list(scores) == list(GLUE)
            found = statistics.fmean(numbers[0] for numbers in scores.values())
            follows = found == pytest.approx(AVERAGES[part][name], abs=0.06)
            assert follows == ("RoBERTa" not in name), f"{name}: {found}"  # as the notes of the table say
    four = ("CoLA", "SST-2", "MRPC", "STS-B")
    for name, average in (("BERT-Base", 82.1), ("EA-BERT-Base", 84.0)):
        assert statistics.fmean(DEV[name][task][0] for task in four) == pytest.approx(average, abs=0.06)


def test_published_settings_are_used_for_the_models_they_name() -> None:
    assert known_model("google-bert/bert-base-uncased") == "BERT-Base"
    assert known_model("/models/roberta-large/") == "RoBERTa-Large"
    assert known_model("all-MiniLM-L6-v2") is None
    assert all(set(tasks) == set(GLUE) for tasks in TUNED.values())
    assert set(BAM) == set(BAM_TUNED)
    assert knobs("CoLA", "BERT-Base", 128)[:3] == (0.2, 0.1, 10)
    assert knobs("SST-2", None, 128)[:3] == (0.1, 0.1, 1000)
    albert = understanding_runs.published_training("ALBERT-base", "MNLI", 392_702)
    assert (albert.updates, albert.batch, albert.longest, albert.dropout) == (10_000, 128, 512, 0.0)
    bert = understanding_runs.published_training("BERT-Base", "CoLA", 8551)
    assert (bert.updates, bert.batch, bert.learning_rate, bert.dropout) == (3 * 1068, 8, 2e-5, None)
    evolving = forms(knobs("RTE", "RoBERTa-Large", 128))["Evolving"][0]
    assert isinstance(evolving, overt.Evolving)
    assert (evolving.alpha, evolving.beta) == (0.2, 0.4)


def test_forms_with_the_same_seed_start_from_the_same_weights_and_see_the_same_batches(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [Row((f"{WORDS[n % 2]} {WORDS[2 + n % 8]}",), n % 2) for n in range(24)]
    texts = Texts(encode(rows, tokenizer, 16), {}, ("bad", "good"))
    seen: dict[str, list[list[int]]] = {}
    fetch = text_training.Batches.__getitem__
    for name in (PLAIN, "Evolving", "Synthesizer random"):
        batches = seen.setdefault(name, [])

        def note(self: Any, update: int, batches: list[list[int]] = batches) -> Any:
            batch = fetch(self, update)
            batches.append(batch["input_ids"].flatten().tolist())
            return batch

        monkeypatch.setattr(text_training.Batches, "__getitem__", note)
        training = TextTraining(4, batch=8, learning_rate=1e-3)
        text_training.train(tmp_path / name, texts, tokenizer, model, forms()[name], training, 3, "cpu")
    assert len(seen[PLAIN]) == 4
    assert seen[PLAIN] == seen["Evolving"] == seen["Synthesizer random"]
    heads = [load_model(model, ("bad", "good"), 3)[0].classifier.weight for _ in range(2)]
    assert torch.equal(*heads)
    assert not torch.equal(heads[0], load_model(model, ("bad", "good"), 4)[0].classifier.weight)


def test_predictions_keep_the_order_of_rows_whatever_their_length(model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    net, new = load_model(model, ("bad", "good"), 0)
    assert any("classifier" in name for name in new), "the head is new"
    rows = encode([Row((" ".join(WORDS[: 1 + n % 7]),), 0) for n in range(9)], tokenizer, 16)
    together = predict(net.eval(), rows, tokenizer)
    alone = torch.cat([predict(net, [row], tokenizer) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("both",), pytest.param(tuple(forms()), marks=pytest.mark.exhaustive)],
    ids=["both", "every form"],
)
@pytest.mark.parametrize("family", ["roberta", "albert", "t5", "modernbert"])
def test_models_of_other_families_are_fine_tuned(
    model: str, family: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    special = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    if family == "t5":
        sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32}
        special = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}
    if family == "albert":
        sizes["embedding_size"] = 8
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes, **special)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = encode(
        [Row((" ".join([WORDS[n % 2], *WORDS[4 : 4 + n % 5]]),), n % 2) for n in range(12)], tokenizer, 16
    )
    texts = Texts(rows, {}, ("bad", "good"))
    training = TextTraining(1, batch=12, learning_rate=1e-2)
    for name in names:
        found, numbers = text_training.train(
            tmp_path / "runs" / name.replace("/", ""),
            texts,
            tokenizer,
            str(tmp_path),
            forms()[name],
            training,
            0,
        )
        assert numbers["updates"] == 1
        together = predict(found.eval(), rows, tokenizer)
        alone = torch.cat([predict(found, [row], tokenizer) for row in rows])  # without padding
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0, msg=name)


def test_scores_of_constant_predictions_are_not_made_up() -> None:
    constant = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    labels = torch.tensor([0, 1, 0, 1])
    assert scores_of(TASKS["CoLA"], constant, labels)["MCC"] == 0
    assert scores_of(TASKS["MRPC"], constant, labels)["accuracy"] == 50
    same = scores_of(TASKS["STS-B"], torch.ones(4, 1), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert same == {"Pearson": None, "Spearman": None}


def test_dropout_is_set_where_the_config_has_one_and_refused_elsewhere(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _ = load_model(model, ("bad", "good"), 0, dropout=0.25)
    assert {module.p for module in net.bert.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
    monkeypatch.setattr(text_training, "DROPOUTS", ("unheard_of",))
    with pytest.raises(ValueError, match=r"no dropout of BertConfig is known that could be set to 0\.1"):
        load_model(model, ("bad", "good"), 0, dropout=0.1)


def test_batches_are_padded_as_transformers_pads_them(model: str) -> None:
    from transformers import AutoTokenizer, DataCollatorWithPadding

    for side, label in (("right", 1), ("left", 2.5)):
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side=side)
        rows = [Row((" ".join(WORDS[: 1 + n % 7]), "good film"), label) for n in range(9)]
        coded = encode(rows, tokenizer, 8)
        for batch in (coded, [text_training.without_label(row) for row in coded]):
            ours = text_training.collator_of(tokenizer)(batch)
            theirs = DataCollatorWithPadding(tokenizer)(batch)
            assert set(ours) == set(theirs)
            for name, value in theirs.items():
                assert ours[name].dtype == value.dtype, name
                assert torch.equal(ours[name], value), name
        strange = [{**row, "special_tokens_mask": [0] * len(row["input_ids"])} for row in coded]
        padded = text_training.collator_of(tokenizer)(strange)
        assert torch.equal(
            padded["special_tokens_mask"], DataCollatorWithPadding(tokenizer)(strange)["special_tokens_mask"]
        )


@pytest.mark.slow
def test_a_short_training_stores_no_checkpoints_and_one_with_them_goes_on_where_it_was(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = Texts(
        encode([Row((WORDS[n % 10],), n % 2) for n in range(24)], tokenizer, 16), {}, ("bad", "good")
    )

    def train(name: str, told: Any = None) -> Any:
        training = TextTraining(6, batch=4, learning_rate=1e-3)
        return text_training.train(tmp_path / name, texts, tokenizer, model, (), training, 1, "cpu", told)[0]

    def stop(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    whole = train("whole")
    assert not list((tmp_path / "whole" / "checkpoints").iterdir())
    monkeypatch.setattr(text_training, "PAUSE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train("parts", stop)
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["checkpoint-4"]
    steps: list[int] = []
    again = train("parts", steps.append)
    assert steps[0] == 4
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, msg=name)


@pytest.mark.slow
def test_rates_are_chosen_on_held_out_rows_and_forms_are_compared_on_development_rows(
    model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(understanding_runs, "RATES", (1e-5, 3e-2))
    monkeypatch.setattr(understanding_runs, "RATE_SEEDS", 1)

    def run(**options: str) -> dict[str, Any]:
        extra = [part for option, value in options.items() for part in (f"--{option}", value)]
        places = {"out": Path("runs"), "results": Path("results")}
        return reproduce.run("ea-table-4", data, 1, "cpu", model, extra=extra, **places)

    result = run(epochs="4", tasks="CoLA,MRPC", forms="plain,Evolving")
    rows = result["per_seed"]["0"]
    assert set(rows) == {"plain, CoLA", "Evolving, CoLA", "plain, CoLA, rate 1e-05", "plain, CoLA, rate 0.03"}
    trial = rows["plain, CoLA, rate 0.03"]
    assert f"{HELD_OUT} MCC" in trial
    assert "CoLA MCC" not in trial, "development rows are not read to choose"
    assert result["config"]["rates"] == {"CoLA": 0.03}
    assert rows["plain, CoLA"]["CoLA MCC"] == 100, "the first word tells the class"
    assert result["config"]["data"]["CoLA"]["train"] == 80
    assert result["config"]["data"]["CoLA"]["source"].startswith("DIR/"), "no folder of one machine"
    assert rows["Evolving, CoLA"]["added"] > 0 == rows["plain, CoLA"]["added"]
    assert len(list((tmp_path / "runs").rglob("model.safetensors"))) == 2

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("everything is there")

    monkeypatch.setattr(text_training, "train", refuse)
    assert run(epochs="4", tasks="CoLA", forms="plain,Evolving")["per_seed"] == result["per_seed"]
    assert len(RATES) == 4
    with pytest.raises(ValueError, match=r"--forms must be one of .*Evolving.*; got 'Evolvin'"):
        run(forms="Evolvin")
    with pytest.raises(
        FileNotFoundError, match="none of the tasks MRPC is there: give a folder with their files as --data"
    ):
        run(tasks="MRPC")


@pytest.mark.slow
def test_every_way_to_be_uncertain_is_measured_on_rows_as_they_are_and_shifted(
    model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(understanding_runs, "RATES", (3e-2,))
    monkeypatch.setattr(understanding_runs, "RATE_SEEDS", 1)
    monkeypatch.setattr(uncertainty, "SAMPLES", 3)
    places = {"out": Path("runs"), "results": Path("results")}
    extra = ["--epochs", "1", "--tasks", "CoLA", "--forms", "plain,Bayesian k=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # so few rows do not determine a temperature
        result = reproduce.run("uncertainty", data, 1, "cpu", model, extra=extra, **places)
    grids = {grid["title"]: dict(grid["rows"]) for grid in result["tables"]}
    domains = [f"CoLA, {part}" for part in (uncertainty.IN_DOMAIN, uncertainty.OUT_OF_DOMAIN)]
    shifts = [f"CoLA, {rate} {what}" for rate in ("10%", "30%") for what in ("typos", "words dropped")]
    tables = ["CoLA", *domains, *shifts]
    assert [title for title in grids if title in tables] == tables
    assert "Wins" not in grids, "nothing wins with one seed"
    methods = [method for method in uncertainty.COSTS if "k=10" not in method]
    assert list(grids["CoLA"]) == methods
    plain, random = (result["per_seed"]["0"][f"{form}, CoLA"] for form in (PLAIN, "Bayesian k=2"))
    for method in methods:
        numbers = random if method.startswith("Bayesian") else plain
        assert grids["CoLA"][method][0] == "1", "one ensemble of two models, and one seed of all else"
        for measure in ("accuracy", "NLL", "Brier", "PAvPU"):  # means over rows: 5 of 20 are foreign
            whole, inside, outside = (
                numbers[f"{part} | {method} | {measure}"]
                for part in ("CoLA", uncertainty.IN_DOMAIN, uncertainty.OUT_OF_DOMAIN)
            )
            assert whole == pytest.approx(0.75 * inside + 0.25 * outside, rel=1e-6), (method, measure)
    one, warm = (plain[f"CoLA | {name} | accuracy"] for name in (uncertainty.ONE, uncertainty.TEMPERATURE))
    assert one == warm, "a temperature does not change predictions"
    assert sorted(result["per_seed"]) == ["0", "1"], "a second plain model, for the ensemble"
    assert set(result["per_seed"]["1"]) == {"plain, CoLA"}
    trials = list(Path("runs").glob("*/plain-CoLA-rate*/seed-0"))
    assert len(trials) == 1, "learning rates are chosen by the trainings of the tables"
    stored = overt.load(next(Path("runs").rglob("Bayesian-k=2-CoLA")) / "seed-0" / "model")
    overt.posterior(stored, {"input_ids": torch.tensor([[2, 4, 3]])}, 2)  # its temperature is for this
    with pytest.raises(ValueError, match=r"--forms must be one of 'plain', 'Bayesian k=2', .*'Evolving'"):
        reproduce.run("uncertainty", data, 1, "cpu", model, extra=["--forms", "Evolving"], **places)


@pytest.mark.slow
@pytest.mark.parametrize("form", uncertainty.FORMS[:2])
def test_the_estimate_counts_the_rows_that_pass_through_a_model(
    model: str, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(uncertainty, "SAMPLES", 2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    train, held, tested = (
        encode([Row((" ".join(WORDS[n % 7 : 9]),), n % 2) for n in range(count)], tokenizer, 16)
        for count in (11, 7, 5)
    )
    texts = Texts(train, {HELD_OUT: held, "CoLA": tested}, ("bad", "good"), {"some": ("CoLA", [0, 3])})
    net = text_training.attached(model, texts, forms()[form], TextTraining(1), 0).eval()
    seen: list[int] = []

    def note(_module: Any, _args: Any, named: dict[str, Any]) -> None:
        seen.append(len(named["input_ids"]))

    net.register_forward_pre_hook(note, with_kwargs=True)
    row: Any = SimpleNamespace(form=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # so few rows do not determine a temperature
        numbers, _ = uncertainty.uncertainties(net, texts, tokenizer, row, 0)
    assert sum(seen) == uncertainty.passes(row, texts)
    warmed = {
        key.split(" | ")[1] for key in numbers if "temperature" in key or "noise" in key
    }  # part | method | measure
    assert set(numbers["fitted"]) == {f"{method} | temperature" for method in warmed} | (
        {"last-layer Laplace | prior precision", "noise at test + temperature | k"}
        if form == PLAIN
        else set()
    )
    outcome = Outcome({"data": {"CoLA": {}}}, {0: {f"{form}, CoLA": numbers}})
    assert [name for name, _ in uncertainty.fitted_grid(outcome).rows] == list(numbers["fitted"])


def test_other_weights_under_the_same_name_are_not_taken_for_a_models_finished_runs(tmp_path: Path) -> None:
    from transformers import BertModel

    model, out = tmp_path / "model", tmp_path / "runs"
    small_bert(model)
    _runs.check_weights(out, str(model), fresh=False)
    _runs.check_weights(out, str(model), fresh=False)
    trained: Any = BertModel.from_pretrained(model)
    torch.nn.init.ones_(trained.pooler.dense.weight)
    trained.save_pretrained(model)  # config and name are the same
    with pytest.raises(ValueError, match="other weights than the model of that name"):
        _runs.check_weights(out, str(model), fresh=False)
    _runs.check_weights(out, str(model), fresh=True)
    _runs.check_weights(out, str(model), fresh=False)
    _runs.check_weights(out, "a/name-on-the-hub", fresh=False)


def test_models_that_do_not_fit_are_refused_before_anything_is_trained(
    model: str, data: Path, tmp_path: Path
) -> None:
    from transformers import BertModel, DebertaV2Config, DebertaV2Model, GPT2Config, GPT2Model

    def refused(name: str, forms: str = "plain,Evolving", recipe: str = "ea-table-3") -> str:
        extra = ["--tasks", "CoLA", "--forms", forms]
        with pytest.raises((ValueError, TypeError)) as error:
            reproduce.run(recipe, data, 1, "cpu", str(tmp_path / name), tmp_path / "runs", extra=extra)
        assert not (tmp_path / "runs").exists()
        message = str(error.value)
        assert "\n" not in message
        return message

    files = shutil.ignore_patterns("tokenizer*")
    shutil.copytree(model, tmp_path / "wordless", ignore=files)  # transformers makes up a tokenizer for it
    assert "wordless has no tokenizer: its files are missing" in refused("wordless")
    assert "wordless has no tokenizer" in refused("wordless", "plain")
    shutil.copytree(model, tmp_path / "attached")
    overt.attach(BertModel.from_pretrained(model), overt.Evolving()).save_pretrained(tmp_path / "attached")
    assert "attached has mechanisms of Overt already" in refused("attached")
    shutil.copytree(model, tmp_path / "deberta")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    DebertaV2Model(DebertaV2Config(vocab_size=14, **sizes)).save_pretrained(tmp_path / "deberta")
    assert "DebertaV2ForSequenceClassification (deberta-v2) cannot be attached to" in refused("deberta")
    shutil.copytree(model, tmp_path / "gpt2")
    config = GPT2Config(vocab_size=14, n_embd=16, n_layer=1, n_head=2, pad_token_id=0)
    GPT2Model(config).save_pretrained(tmp_path / "gpt2")
    message = refused("gpt2", "plain", "uncertainty")
    assert "logits of GPT2ForSequenceClassification are not the output of its last linear layer" in message


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (6, [], "CoLA must have 1,063 test rows in a submission, got 6"),
        (0, [], "--submission needs test files, and none of CoLA has one"),
        (1063, ["--discard-models"], "--submission needs the models that --discard-models discards"),
    ],
)
def test_a_submission_that_would_fail_is_refused_before_anything_is_trained(
    rows: int, more: list[str], message: str, model: str, data: Path, tmp_path: Path
) -> None:
    if rows:
        lines = ["index\tsentence", *(f"{number}\tgood film" for number in range(rows))]
        (data / "CoLA" / "test.tsv").write_text("\n".join(lines) + "\n")
    extra = ["--tasks", "CoLA", "--submission", *more]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        reproduce.run(
            "ea-table-3", data, 1, "cpu", model, tmp_path / "runs", tmp_path / "results", extra=extra
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_submission_has_the_predictions_of_the_models_that_are_best_on_held_out_rows(
    model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(understanding_runs, "RATES", (3e-2,))
    lines = [f"{number}\t{WORDS[number % 2]} film" for number in range(6)]
    (data / "CoLA" / "test.tsv").write_text("\n".join(["index\tsentence", *lines]) + "\n")
    monkeypatch.setitem(glue_submission.FILES, "CoLA", (TASKS["CoLA"], 6))
    extra = ["--epochs", "4", "--tasks", "CoLA", "--forms", "plain,Evolving", "--submission"]
    places = {"out": Path("runs"), "results": Path("results")}
    reproduce.run("ea-table-3", data, 2, "cpu", model, extra=extra, **places)
    for form in ("plain", "Evolving"):
        with zipfile.ZipFile(f"runs/submission/{form}.zip") as file:
            assert set(file.namelist()) == {"CoLA.tsv", "WNLI.tsv"}
            told = file.read("CoLA.tsv").decode().splitlines()
        assert told == ["index\tprediction", *(f"{number}\t{number % 2}" for number in range(6))]
    row = SimpleNamespace(name="plain, CoLA", task="CoLA")
    scores: Any = {("plain, CoLA", seed): {"held out MCC": score} for seed, score in ((0, 5.0), (1, 9.0))}
    assert understanding_submission.best_seed(row, scores) == 1  # type: ignore[arg-type]
    shutil.rmtree(next(Path("runs").rglob("plain-CoLA")) / "seed-0" / "model")
    shutil.rmtree(next(Path("runs").rglob("plain-CoLA")) / "seed-1" / "model")
    with pytest.raises(
        FileNotFoundError, match=r"--submission needs the model of plain, CoLA, and .* has none"
    ):
        reproduce.run("ea-table-3", data, 2, "cpu", model, extra=extra, **places)
