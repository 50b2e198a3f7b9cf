"""The demo, shortened: it runs, is kept, goes on after an interruption, and can be loaded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import overt
from overt.cli import demo, demo_flow
from overt.data.agreement import VOCABULARY
from overt.models.agreement import AgreementClassifier
from overt.recipes import grammar_training
from overt.recipes._runs import prepare_run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FORMS", {"plain": (), "both": (overt.Evolving(), overt.Bayesian())})
    monkeypatch.setattr(grammar_training, "BATCH", 8)
    for name, value in {"TRAIN": 200, "TEST": 100, "BATCH": 8, "SAMPLES": 3, "SAMPLED": 20}.items():
        monkeypatch.setattr(demo, name, value)
    for name, value in {"SHOWN": 1, "EXAMPLES": 10, "BATCH": 10}.items():
        monkeypatch.setattr(demo_flow, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_demo_prints_its_table_and_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = demo.run(tmp_path, page=tmp_path / "page" / "index.html", steps=4)
    table = capsys.readouterr().out
    for word in ("plain", "both", "majority", "first noun", "nearest noun", "PAvPU", "parameters", "ms/step"):
        assert word in table
    assert rows["both"]["parameters"] - rows["plain"]["parameters"] == 5 * (8 * 8 * 9 + 8) + 6 * (
        16 * 5 + 5 + 5
    )
    assert set(rows["both"]["pavpu"]) == {"0.01", "0.05", "0.1"}
    assert "pavpu" not in rows["plain"]
    assert not list(tmp_path.rglob("checkpoints")), "checkpoints go when a form is done"
    page = (tmp_path / "page" / "index.html").read_text()
    assert "index.html shows the traces of these sentences by all forms" in " ".join(table.split())
    for name in ('"name":"plain: ', '"name":"both: ', '"part convolution"', '"singular"', '"blank-out"'):
        assert name in page

    assert demo.run(tmp_path, page=tmp_path / "page" / "index.html", steps=4) == rows
    assert "already trained" in capsys.readouterr().out
    assert demo.run(tmp_path, page=tmp_path / "page" / "index.html", steps=2) != rows, (
        "other settings start over"
    )

    model = demo.load(tmp_path / "both")
    assert int(model.step) == 1
    with pytest.raises(FileNotFoundError, match=r"no demo model in .*: run `overt demo` first"):
        demo.load(tmp_path / "neither")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_an_interrupted_form_goes_on_and_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FORMS", {"both": (overt.Evolving(), overt.Bayesian())})
    monkeypatch.setattr(grammar_training, "CHECKPOINTS", 3)
    network = partial(demo.AgreementClassifier, layers=2, heads=2, width=16)
    monkeypatch.setattr(demo, "AgreementClassifier", network)
    demo.run(tmp_path / "whole", page=tmp_path / "page" / "index.html", steps=6)

    collate, calls = grammar_training.collate, []

    def interrupted(items: list[tuple[int, demo.Sentence]]) -> dict[str, torch.Tensor]:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return collate(items)

    monkeypatch.setattr(grammar_training, "collate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run(tmp_path / "parts", page=tmp_path / "page" / "index.html", steps=6)
    assert list((tmp_path / "parts" / "both" / "checkpoints").iterdir()), "there is something to go on from"
    monkeypatch.setattr(grammar_training, "collate", collate)
    demo.run(tmp_path / "parts", page=tmp_path / "page" / "index.html", steps=6)

    whole, parts = (demo.load(tmp_path / name / "both").state_dict() for name in ("whole", "parts"))
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-6)


def test_a_torn_result_is_not_mistaken_for_a_finished_one(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"a": 1})[:-3])
    assert prepare_run(tmp_path, {"a": 1}, fresh=False) is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fresh", [True, False])
def test_the_demo_deletes_nothing_that_is_not_its_own(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "notes.txt").write_text("more of it")
    with pytest.raises(
        ValueError, match="has files that are not from a run of this recipe: choose another --out"
    ):
        demo.run(tmp_path, page=tmp_path / "page" / "index.html", steps=1, fresh=fresh)
    assert (tmp_path / "thesis.tex").exists()
    assert (tmp_path / "plain" / "notes.txt").exists()


def test_the_classifier_refuses_input_that_is_too_long() -> None:
    model = AgreementClassifier(len(VOCABULARY), max_length=4)
    with pytest.raises(ValueError, match=r"input_ids may be at most 4 tokens long \(max_length\), got 5"):
        model(torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 5))


def test_evaluation_loss_is_the_task_loss_and_training_loss_has_the_kl() -> None:
    mechanism = overt.Bayesian(kl_weight=0.5)
    model = AgreementClassifier(9, [mechanism], layers=2, heads=2, width=8, dropout=0.0)
    tokens, seen, labels = torch.randint(0, 9, (3, 5)), torch.ones(3, 5), torch.tensor([0, 1, 1])
    model.eval()
    output = model(tokens, seen, labels)
    torch.testing.assert_close(output["loss"], torch.nn.functional.cross_entropy(output["logits"], labels))
    chain = overt.Chain(step=0)
    trained = model.train()(tokens, seen, labels, chain=chain)
    task = torch.nn.functional.cross_entropy(trained["logits"], labels)
    torch.testing.assert_close(trained["loss"], task + 0.5 * chain.kl())
