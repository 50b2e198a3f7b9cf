"""Recipes on pretrained models: here a small random one with a tokenizer, saved as users save theirs."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import overt
from families import TEXT
from overt.cli import app, drift, judge, sentiment, serve
from overt.data.sst2 import load_rows


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    words = sorted({word for line in drift.sentences(400) for word in line.split()})
    vocabulary = {word: code for code, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TEXT, "vocab_size": len(vocabulary)})
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_the_sample_is_balanced_and_split_without_overlap() -> None:
    train, test, _ = load_rows(None, seed=0)
    assert len(train) == 300
    assert len(test) == 100
    assert not set(train) & set(test)
    assert sum(label for _, label in test) == 50
    assert {label for _, label in train} == {0, 1}
    assert load_rows(None, seed=1)[1] != test


@pytest.mark.parametrize("layout", ["train.tsv", "SST-2/train.tsv", "glue/SST-2/train.tsv.gz"])
def test_sst2_is_read_in_its_own_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, label in (("train", 1), ("dev", 0)):
        path = tmp_path / layout.replace("train", part)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f'sentence\tlabel\na "fine" {part} \t{label}\n'
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    expected = ([('a "fine" train', 1)], [('a "fine" dev', 0)], "SST-2")
    assert load_rows(tmp_path, seed=0) == expected
    monkeypatch.setenv("OVERT_DATA", str(tmp_path))
    assert load_rows(None, seed=0) == expected


def test_wrong_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no train\.tsv and no dev\.tsv; put .* into DIR/SST-2"):
        load_rows(tmp_path, seed=0)
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text("text\tstars\nfine\tfive\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 1: SST-2 needs the columns sentence, label"):
        load_rows(tmp_path, seed=0)


@pytest.mark.parametrize(
    "read",
    [
        drift.run,
        lambda path: sentiment.run(path, Path("runs")),
        lambda path: judge.open_classifier(path, "cpu"),
        lambda path: serve.open_served("model", path),
    ],
    ids=["drift", "sentiment", "judge", "serve"],
)
def test_a_folder_without_a_tokenizer_is_refused(read: Any, pretrained: Path, tmp_path: Path) -> None:
    """transformers makes up a tokenizer that knows no words, and would give numbers all the same."""
    shutil.copytree(pretrained, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model") is not None
    with pytest.raises(ValueError, match=r"model has no tokenizer: its files are missing"):
        read(str(tmp_path / "model"))


@pytest.mark.slow
def test_every_form_is_trained_tested_saved_and_kept(pretrained: Path, tmp_path: Path) -> None:
    rows = sentiment.run(str(pretrained), tmp_path, steps=3)
    assert rows.keys() == sentiment.FORMS.keys()
    for form, row in rows.items():
        assert 0.0 <= row["accuracy"] <= 1.0
        assert ("sampled" in row) == ("Bayesian" in form or "both" in form)
    loaded: Any = overt.load(tmp_path / "both-official" / "model")
    assert loaded.overt_state.mechanisms == sentiment.FORMS["both-official"]
    assert int(loaded.overt_state.step) == 3
    before = (tmp_path / "plain" / "result.json").stat().st_mtime_ns
    assert sentiment.run(str(pretrained), tmp_path, steps=3) == rows
    assert (tmp_path / "plain" / "result.json").stat().st_mtime_ns == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plain").mkdir()
    (tmp_path / "other" / "plain" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="has files that are not from a run of this recipe"):
        sentiment.run(str(pretrained), tmp_path / "other", steps=3)


@pytest.mark.exhaustive  # the demo and the tables go on by the same code, and have tests of it
def test_an_interrupted_form_goes_on(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentiment, "FORMS", {"both": sentiment.FORMS["both-official"]})
    whole = sentiment.run(str(pretrained), tmp_path / "whole", steps=6)["both"]
    real = transformers.Trainer.training_step
    calls = 0

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "training_step", failing)
        with pytest.raises(KeyboardInterrupt):
            sentiment.run(str(pretrained), tmp_path / "cut", steps=6)
    assert not (tmp_path / "cut" / "both" / "result.json").exists()
    again = sentiment.run(str(pretrained), tmp_path / "cut", steps=6)["both"]
    for key in ("accuracy", "loss_after", "pavpu"):
        assert again[key] == pytest.approx(whole[key], abs=1e-6), key


@pytest.mark.slow
def test_drift_is_none_at_zero_and_grows_with_alpha(pretrained: Path) -> None:
    rows = {(row["init"], row["alpha"], row["beta"]): row["mean"] for row in drift.run(str(pretrained))}
    assert rows["dirac", 0.0, 0.0] == pytest.approx(1.0, abs=1e-5)
    assert rows["dirac", 0.1, 0.0] > rows["dirac", 0.5, 0.0]
    assert ("kaiming", 0.1, 0.0) not in rows


def test_the_commands_name_what_is_wrong(tmp_path: Path) -> None:
    runner = CliRunner()
    assert "Missing option" in runner.invoke(app, ["sentiment"]).output
    for command in ("drift", "sentiment"):
        result = runner.invoke(app, [command, "--model", str(tmp_path / "nowhere")])
        assert isinstance(result.exception, FileNotFoundError)
        assert "nowhere must be a folder with config.json, or a name on the hub" in str(result.exception)


def test_support_page_is_of_these_families_and_features() -> None:
    from battery import CASES, DECODING, FEATURES
    from families import FAMILIES, REFUSED

    page = (Path(__file__).parent.parent / "docs" / "support.md").read_text()
    tables = {part.split("\n", 1)[0]: part for part in page.split("\n## ")[1:]}
    cells = {}
    for title in ("Every family", "Decoding"):
        lines = [line for line in tables[title].splitlines() if line.startswith("|")]
        columns = [cell.strip() for cell in lines[0].split("|")[2:-1]]
        for line in lines[2:]:
            name, *found = (cell.strip() for cell in line.split("|")[1:-1])
            cells |= {(name, column): cell for column, cell in zip(columns, found, strict=True)}
    asked = {(case.values[0].name, case.values[1]) for case in CASES}
    assert {key for key, cell in cells.items() if cell} == asked, "run `make support`"
    assert all(cells[key].startswith(("works", "refused (")) for key in asked)
    assert set(FEATURES) >= set(DECODING)
    assert {family.name for family in FAMILIES} == {name for name, _ in asked}
    for name, _, reason in REFUSED:
        assert any(
            line.startswith(f"| {name} |") and reason in line for line in tables["Refused"].splitlines()
        )
