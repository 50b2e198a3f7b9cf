"""Correlations over a corpus, against scipy one sentence at a time; and the randomisation check."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import overt
from families import BY_NAME, inputs_of, tokens
from overt.judge import correlate, randomised, spearman
from overt.models.agreement import AgreementClassifier

pytestmark = pytest.mark.slow


def model_and_batches() -> tuple[AgreementClassifier, list[dict[str, Tensor]], list[Tensor]]:
    torch.manual_seed(0)
    model = AgreementClassifier(30, layers=3, width=16, heads=2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    batches, targets = [], []
    for seed, lengths in enumerate(([7, 5], [6, 3], [4, 4])):
        ids = 3 + tokens(2, 7, seed) % 27
        ids[:, 0] = 1
        mask = torch.arange(7) < torch.tensor(lengths)[:, None]
        batches.append({"input_ids": ids * mask, "attention_mask": mask.long()})
        targets.append(torch.tensor([seed % 2, 1]))
    return model.eval(), batches, targets


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=12),
    st.lists(st.integers(0, 4), min_size=12, max_size=12),
)
def test_spearman_is_scipys_with_ties(one: list[int], other: list[int]) -> None:
    x, y = np.array(one, dtype=float), np.array(other[: len(one)], dtype=float)
    found = spearman(x[None], y)[0]
    if len(set(one)) == 1 or len(set(y)) == 1:
        assert np.isnan(found), "nothing to rank"
        return
    assert found == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.slow
def test_correlations_are_those_of_scipy_sentence_by_sentence() -> None:
    model, batches, targets = model_and_batches()
    found = correlate((overt.trace(model, batch) for batch in batches), targets, unk=2, bootstrap=50)
    expected: dict[tuple[str, str], list[list[float]]] = {pair: [] for pair in found.mean}
    with_cls: list[float] = []
    for batch, target in zip(batches, targets, strict=True):
        traced = overt.trace(model, batch)
        for example in range(2):
            length = int(batch["attention_mask"][example].sum())
            for method, reference in expected:
                importance = (
                    traced.blankout(target=target, unk=2)
                    if reference == "blankout"
                    else traced.gradients(target=target)
                )[example, 0, 0]
                rows = getattr(traced, method)(queries=0)[example, :, 0]
                values = [
                    float(stats.spearmanr(row[1:length], importance[1:length]).statistic) for row in rows
                ]
                expected[method, reference].append(values)
                if (method, reference) == ("flow", "gradients"):
                    with_cls.append(float(stats.spearmanr(rows[2, :length], importance[:length]).statistic))
    for pair, rows in expected.items():
        np.testing.assert_allclose(found.values[pair], rows, atol=1e-9)
        np.testing.assert_allclose(found.mean[pair], np.mean(rows, axis=0), atol=1e-9)
        np.testing.assert_allclose(found.sd[pair], np.std(rows, axis=0, ddof=1), atol=1e-9)
        assert bool((found.low[pair] <= found.mean[pair]).all())
        assert bool((found.high[pair] >= found.mean[pair]).all())
    assert found.count == 6
    assert found.with_cls is not None
    np.testing.assert_allclose(found.with_cls.values["flow", "gradients"][:, 2], with_cls, atol=1e-9)
    told = found.to_dict()
    assert told["flow ~ gradients"]["mean"] == pytest.approx(list(found.mean["flow", "gradients"]))
    assert told["with_cls"]["count"] == 6
    assert "rollout ~ blankout" in str(found)


@pytest.mark.slow
def test_bootstrap_intervals_cover_the_mean_of_normal_data() -> None:
    from overt.judge.correlation import _summary

    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        rows = {("raw", "gradients"): list(rng.normal(0.3, 0.2, size=(60, 1)))}
        found = _summary(rows, 200, rng, None)
        covered += bool(found.low["raw", "gradients"][0] < 0.3 < found.high["raw", "gradients"][0])
    assert 0.88 <= covered / 200 <= 0.99


def test_sentences_without_a_rank_count_for_nothing() -> None:
    model, batches, _ = model_and_batches()
    short = {name: value[:1, :2] for name, value in batches[0].items()}  # CLS and one word
    found = correlate([overt.trace(model, batches[0]), overt.trace(model, short)], unk=2)
    assert found.count == 3
    assert found.defined["raw", "blankout"].tolist() == [2, 2, 2]
    alone = correlate(overt.trace(model, batches[0]), unk=2)
    np.testing.assert_allclose(found.mean["raw", "blankout"], alone.mean["raw", "blankout"])
    assert correlate(overt.trace(model, short), unk=2).to_dict()["raw ~ blankout"]["mean"] == [None] * 3


def test_methods_are_compared_on_the_sentences_that_all_of_them_rank() -> None:
    from overt.judge.correlation import _summary

    rng = np.random.default_rng(1)
    pairs = [(method, reference) for reference in ("blankout", "gradients") for method in ("raw", "flow")]
    rows = {pair: rng.uniform(-1, 1, size=(40, 3)) for pair in pairs}
    for pair in pairs:
        rows[pair][rng.random((40, 3)) < 0.3] = np.nan
    rows["raw", "gradients"][:, 2] = np.nan  # nothing is left to compare
    found = _summary({pair: list(table) for pair, table in rows.items()}, 300, rng, None)
    assert found.common is not None
    assert found.common.common is None
    for method, reference in pairs:
        for layer in range(3):
            own = [value for value in rows[method, reference][:, layer] if value == value]
            shared = [
                rows[method, reference][sentence, layer]
                for sentence in range(40)
                if all(
                    rows[other, reference][sentence, layer] == rows[other, reference][sentence, layer]
                    for other in ("raw", "flow")
                )
            ]
            for result, expected in ((found, own), (found.common, shared)):
                assert result.count == 40
                assert result.defined[method, reference][layer] == len(expected)
                if not expected:
                    assert np.isnan(result.mean[method, reference][layer])
                    continue
                assert result.mean[method, reference][layer] == pytest.approx(np.mean(expected))
                assert result.sd[method, reference][layer] == pytest.approx(np.std(expected, ddof=1))
                low, high = result.low[method, reference][layer], result.high[method, reference][layer]
                assert low < np.mean(expected) < high
                # the normal interval is near the bootstrap's
                half = 1.96 * np.std(expected, ddof=1) / len(expected) ** 0.5
                assert high - low == pytest.approx(2 * half, rel=0.35)
    for reference in ("blankout", "gradients"):
        one, two = (found.common.defined[method, reference] for method in ("raw", "flow"))
        assert one.tolist() == two.tolist()
    assert found.defined["raw", "blankout"].tolist() != found.defined["flow", "blankout"].tolist()
    told = found.to_dict()["common"]
    assert told["flow ~ blankout"]["mean"] == pytest.approx(list(found.common.mean["flow", "blankout"]))
    # what is printed side by side is of the same sentences, and says how many
    assert str(found) == str(found.common)
    [line] = [line for line in str(found).splitlines() if line.startswith("n of 40 ~ blankout")]
    assert list(map(int, line.split()[-3:])) == found.common.defined["raw", "blankout"].tolist()


def even(model: AgreementClassifier) -> AgreementClassifier:
    """The model with even attention in its last layer, where raw attention then ranks nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("encoder.blocks.2.attention.in_proj"):
                parameter[: 2 * parameter.shape[0] // 3] = 0
    return model


def test_a_method_that_ranks_nothing_leaves_nothing_to_compare() -> None:
    model, batches, targets = model_and_batches()
    found = correlate(overt.trace(even(model), batches[0]), targets[0], unk=2, bootstrap=5)
    assert found.common is not None
    assert found.with_cls is not None
    assert found.with_cls.common is not None
    assert found.defined["raw", "blankout"].tolist() == [2, 2, 0]
    assert found.defined["rollout", "blankout"].tolist() == [2, 2, 2]
    assert not np.isnan(found.mean["rollout", "blankout"]).any()
    for result in (found.common, found.with_cls.common):
        assert result.defined["rollout", "blankout"].tolist() == [2, 2, 0]
        assert np.isnan(result.mean["rollout", "blankout"]).tolist() == [False, False, True]


def test_what_randomisation_leaves_is_compared_on_the_same_sentences() -> None:
    model, batches, _ = model_and_batches()
    found = randomised(even(model), batches[0])
    assert found.defined["raw"].tolist() == [0] * 4
    assert found.defined["rollout"].tolist() == [2] * 4
    assert np.isfinite(found.left["rollout"]).all()
    assert found.shared.tolist() == [0] * 4
    assert np.isnan(found.common["rollout"]).all()
    assert "nan" not in str(found)
    alone = randomised(even(model), batches[0], methods=["rollout", "flow"])
    assert alone.shared.tolist() == [2] * 4
    for method in ("rollout", "flow"):
        np.testing.assert_array_equal(alone.common[method], alone.left[method])
        np.testing.assert_array_equal(alone.left[method], found.left[method])


def test_all_references_can_be_asked_for() -> None:
    pytest.importorskip("captum", reason="needs the extra interpret")
    model, batches, _ = model_and_batches()
    references = ["blankout", "blankout-absolute", "gradients", "gradient-input", "integrated"]
    found = correlate(overt.trace(model, batches[0]), unk=2, methods=["rollout"], references=references)
    assert {reference for _, reference in found.mean} == set(references)


def test_mistakes_are_named_in_one_line() -> None:
    model, batches, targets = model_and_batches()
    traced = overt.trace(model, batches[0])
    with pytest.raises(ValueError, match="methods must be one of 'raw', 'rollout', 'flow'; got 'rolling'"):
        correlate(traced, unk=2, methods=["rolling"])
    with pytest.raises(ValueError, match="references must list some of blankout"):
        correlate(traced, unk=2, references=[])
    with pytest.raises(ValueError, match=r"targets must have 2 classes for this trace, .*, got no more"):
        correlate([traced, traced], targets[:1], unk=2)
    with pytest.raises(ValueError, match="targets must have one entry per trace, got more"):
        correlate([traced], targets, unk=2)
    with pytest.raises(ValueError, match="one per sentence, got shape"):
        correlate([traced], [1], unk=2)
    with pytest.raises(TypeError, match="traces must be a trace or traces of batches, got int"):
        correlate(3, unk=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="traces must hold at least one sentence"):
        correlate([], unk=2)


def test_a_corpus_streams_through() -> None:
    model, batches, _ = model_and_batches()
    alive: list[int] = []

    def stream() -> Iterator[overt.Trace]:
        for batch in batches:
            alive.append(1)
            yield overt.trace(model, batch)

    correlate(stream(), unk=2)
    assert len(alive) == 3


def test_randomised_weights_leave_the_model_alone_and_the_maps_apart() -> None:
    model = BY_NAME["BERT"].make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = randomised(model, tokens(3, 9))
    assert found.stages == [*(f"bert.encoder.layer.{n}" for n in (2, 1, 0)), "everything"]
    for values in found.left.values():
        assert values.shape == (4,)
    # Shuffling the top layer leaves rollout's lower layers, so more of it stays than of raw attention.
    assert found.left["raw"][0] < 0.9
    assert found.left["raw"][0] < found.left["rollout"][0]
    assert abs(found.left["raw"][-1]) < 0.6
    assert "everything" in str(found)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_targets_of_a_whole_corpus_come_in_one_tensor() -> None:
    model, batches, targets = model_and_batches()
    traces = [overt.trace(model, batch) for batch in batches]
    flat = correlate(traces, torch.cat(targets), unk=2, bootstrap=5)
    listed = correlate(traces, targets, unk=2, bootstrap=5)
    np.testing.assert_array_equal(flat.values["flow", "blankout"], listed.values["flow", "blankout"])


def test_causal_models_are_read_at_their_last_token() -> None:
    family = BY_NAME["GPT-2"]
    inputs = {"input_ids": tokens(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3])}
    traced = overt.trace(family.make(), inputs)
    assert traced.main_queries() == [7, 4]
    found = correlate(traced, unk=3, methods=["rollout"], references=["gradients"])
    alone = correlate(traced[1], unk=3, methods=["rollout"], references=["gradients"], query=4)
    np.testing.assert_allclose(
        found.values["rollout", "gradients"][1], alone.values["rollout", "gradients"][0]
    )
    assert bool((randomised(family.make(), inputs, methods=["raw"]).left["raw"] < 0.999).all())


def test_randomisation_begins_at_the_top_of_the_decoder() -> None:
    family = BY_NAME["T5"]
    stages = randomised(family.make(), inputs_of(family), methods=["raw"]).stages
    assert stages[0] == "decoder.block.2"
    assert stages[3] == "encoder.block.2"
    assert stages[-1] == "everything"


def test_a_single_sentence_is_printed_without_a_spread() -> None:
    model, batches, targets = model_and_batches()
    one = overt.trace(model, batches[0])[0]
    found = correlate(one, targets[0][:1], unk=2, bootstrap=1)
    assert np.isnan(found.sd["raw", "blankout"]).all(), "a sentence has no spread"
    assert "nan" not in str(found)
    assert "±" not in str(found)
    several = correlate(overt.trace(model, batches[0]), targets[0], unk=2, bootstrap=1)
    assert "±" in str(several)


def test_a_sentence_with_nothing_to_rank_is_printed_as_a_dash() -> None:
    trace = overt.trace(BY_NAME["BERT"].make(), tokens(1, 2))
    found = correlate(trace, unk=1, bootstrap=1)
    assert np.isnan(found.mean["raw", "blankout"]).all()
    assert "–" in str(found)
    assert "nan" not in str(found)
