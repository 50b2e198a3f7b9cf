"""The LSTM translator's training, and the recipes of Bayesian Attention Modules' Tables 4 and 8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import overt
from overt.cli import app
from overt.data import reordered, subwords
from overt.recipes import bam_translation, lstm_training, reproduce, translation_runs
from overt.recipes.lstm_training import (
    BOS,
    EOS,
    IGNORED,
    PAD,
    UNKNOWN,
    LstmRow,
    LstmTraining,
    Vocabulary,
    collate,
    likelihood,
    sentence_batches,
    train,
    translate,
    vocabularies,
)
from overt.recipes.translation_training import Encoded, encode, halve, read_epochs

SIZES = {"embedding": 8, "encoder": 8, "decoder": 12, "score": 8}
CORPUS = reordered.corpus(200, 8, 8)


@pytest.fixture(scope="module")
def data() -> Encoded:
    tokenizer = subwords.train([side for pair in CORPUS.train for side in pair], 400)
    return encode(CORPUS, tokenizer, 100)


@given(st.lists(st.integers(3, 30), min_size=1, max_size=9))
def test_a_vocabulary_gives_back_the_pieces_it_knows(sentence: list[int]) -> None:
    vocabulary = Vocabulary.of([sentence])
    ids = vocabulary.encode([*sentence, subwords.EOS_ID])
    assert ids[-1] == EOS
    assert all(4 <= number < len(vocabulary) for number in ids[:-1])
    assert vocabulary.decode([BOS, *ids, PAD, PAD]) == sentence
    assert vocabulary.encode([31]) == [UNKNOWN]
    assert vocabulary.decode([UNKNOWN, EOS, 4]) == [subwords.UNKNOWN_ID]


def test_batches_start_with_bos_and_hold_every_pair_once(data: Encoded) -> None:
    both = vocabularies(data)
    numbers = sentence_batches(data.train, 16, 0)
    assert sorted(number for batch in numbers for number in batch) == list(range(200))
    batch = collate(both, [data.train[number] for number in numbers[3]])
    assert bool((batch["decoder_input_ids"][:, 0] == BOS).all())
    real = batch["labels"] != IGNORED
    assert torch.equal(batch["decoder_input_ids"][:, 1:][real[:, 1:]], batch["labels"][:, :-1][real[:, 1:]])


def test_halving_holds_for_later_steps_too() -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = get_scheduler("constant", optimizer)
    halve(optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.slow
def packed(model: Any) -> Any:
    """The network with the weights of its LSTMs in one block of memory, as cuDNN has them."""
    for module in model.modules():
        if isinstance(module, torch.nn.LSTM):
            block = torch.cat([weight.data.flatten() for weight in module.parameters()])
            parts = block.split([weight.numel() for weight in module.parameters()])
            for weight, part in zip(module.parameters(), parts, strict=True):
                weight.data = part.view_as(weight)
    return model


def test_training_keeps_the_best_epochs_weights_and_resumes(
    data: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(data, train=data.train[:64], valid=data.valid[:8])
    row = LstmRow("soft", (overt.Bayesian(k=5.0),), SIZES)
    # A rate at which the loss goes up as well as down.
    training = LstmTraining(12, batch=32, learning_rate=0.05, dropout=0.1)
    model, numbers = train(tmp_path / "whole", small, row, training, 0, "cpu")
    best = min(numbers["valid_losses"])
    assert numbers["valid_losses"][-1] > best, "the last epoch is not the best here"
    assert numbers["valid_loss"] == pytest.approx(best)
    assert len(read_epochs(tmp_path / "whole")) == numbers["epochs"]

    def stop(update: int) -> None:
        if update == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", small, row, training, 0, "cpu", stop)
    resumed, again = train(tmp_path / "stopped", small, row, training, 0, "cpu")
    assert again["valid_losses"] == numbers["valid_losses"]
    # Trained, but not tested: the last checkpoint is there.
    network = lstm_training.network
    monkeypatch.setattr(lstm_training, "network", lambda *arguments: packed(network(*arguments)))
    tested, _ = train(tmp_path / "stopped", small, row, training, 0, "cpu")
    for name, one in model.named_parameters():
        for other in (resumed, tested):
            assert torch.equal(one, other.get_parameter(name)), name


def test_likelihood_and_translations_do_not_depend_on_the_batch(data: Encoded, monkeypatch: Any) -> None:
    both = vocabularies(data)
    model = lstm_training.network(LstmRow("marginal", sizes=SIZES), both, 0.0, 0).eval()
    found = []
    for size in (64, 3):
        monkeypatch.setattr(lstm_training, "TEST_BATCH", size)
        texts = translate(model, data.tokenizer, both, [source for source, _ in data.test], beam=2)
        found.append((likelihood(model, both, data.test), texts))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == found[1][1]


def test_its_folder_opens_in_overt_translate(data: Encoded, tmp_path: Path) -> None:
    both = vocabularies(data)
    row = LstmRow("soft", (overt.Bayesian(k=5.0),), SIZES)
    model = lstm_training.network(row, both, 0.0, 0).eval()
    lstm_training.save(model, data, tmp_path / "model")
    source = data.test[0][0]
    want = translate(model, data.tokenizer, both, [source], beam=2)[0]
    words = ["translate", data.tokenizer.decode(source), "--model", str(tmp_path / "model"), "--beam", "2"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == want


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(translation_runs.reordered, "corpus", lambda: CORPUS)
    monkeypatch.setattr(bam_translation, "STAND_IN", SIZES)
    monkeypatch.setattr(bam_translation, "ROUNDS", 1)
    monkeypatch.setattr(bam_translation, "TIMED", 2)

    def run(name: str, *extra: str) -> dict[str, Any]:
        return reproduce.run(name, seeds=1, device="cpu", out=Path("runs"), extra=extra)

    return run


@pytest.mark.slow
def test_table_4_has_perplexities_scores_and_entropies(recipe: Any) -> None:
    result = recipe("bam-table-4", "--rows", "soft,variational relaxed,BAM-WC", "--steps", "2", "--beam", "2")
    rows = result["per_seed"]["0"]
    assert set(rows) == {"soft", "variational relaxed", "BAM-WC"}
    for entry in rows.values():
        assert entry["perplexity"] > 1
        assert 0 < entry["entropy"] < 3
    assert rows["soft"]["run"]["settings"]["precision"] == "float32"
    mechanism = rows["BAM-WC"]["run"]["settings"]["row"]["mechanisms"][0]
    assert (mechanism["k"], mechanism["prior_beta"], mechanism["rho"], mechanism["d_mid"]) == (5, 1e-6, 1, 5)
    assert mechanism["kl_weight"] == 1.0


@pytest.mark.slow
def test_table_8_counts_the_published_parameters(recipe: Any) -> None:
    result = recipe("bam-table-8", "--rows", "soft,variational enumerated")
    rows = result["per_seed"]["0"]
    assert rows["soft"]["parameters"] == 42_278_952
    assert rows["variational enumerated"]["parameters"] == 64_331_816
    assert rows["soft"]["ms at batch 6"] > 0


def test_learning_rates_go_with_the_batch() -> None:
    corpus = replace(CORPUS, stand_in=False)
    assert bam_translation.plan(corpus, {"batch": 6, "steps": None}).learning_rate == 3e-4
    assert bam_translation.plan(corpus, {"batch": 64, "steps": 9}).learning_rate == pytest.approx(
        9.8e-4, rel=1e-2
    )


def test_the_bound_of_the_benchmark_is_the_network_without_its_attention(
    data: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    from translation import WithoutAttention, means_in_turns  # type: ignore[import-not-found, unused-ignore]

    both = vocabularies(data)
    soft = lstm_training.network(LstmRow("soft", sizes=SIZES), both, 0.0, 0)
    attention = sum(p.numel() for p in (soft.query.weight, soft.key.weight, soft.score))
    bound = WithoutAttention(soft)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (soft, bound)]
    assert sizes[0] - sizes[1] == attention
    bound(**collate(both, data.train[:4]))["loss"].backward()
    assert all(parameter.grad is not None for parameter in bound.parameters())
    calls: list[str] = []
    forms = {name: lambda name=name: (calls.append(name), [1.0, 3.0])[1] for name in "ab"}
    assert means_in_turns(forms, 2) == {"a": [2.0, 2.0], "b": [2.0, 2.0]}
    assert "".join(calls) == "ababab", "forms take turns, and the first round does not count"
