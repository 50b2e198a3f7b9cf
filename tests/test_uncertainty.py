"""Claims about overt.judge.uncertainty: hand-worked cases, independent oracles, properties, refusals."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from overt.judge.uncertainty import (
    aurc,
    brier,
    certain,
    ece,
    error_auroc,
    nll,
    p_values,
    pavpu,
    predictive,
    risk_coverage,
    selective_accuracy,
    vqa_accuracy,
)

# Two samples of one two-class example. Leading class 0.9, 0.7: mean 0.8, variance 0.02. Other class 0.1, 0.3:
# mean 0.2, variance 0.02. Pooled variance 0.02, so t = 0.6 / sqrt(0.02 · (1/2 + 1/2)), t² = 18, with
# 2 degrees of freedom, where P(|T| > t) = 1 − t / sqrt(2 + t²). So p = 1 − sqrt(18/20) = 0.0513.
WAVERING = [[0.9, 0.1], [0.7, 0.3]]
P_WAVERING = 1 - math.sqrt(0.9)
STILL = [[0.8, 0.2], [0.8, 0.2]]  # the samples agree exactly: p = 0 by convention


def stack(*examples: list[list[float]]) -> np.ndarray:
    """Per-example lists (samples, classes) as one (samples, examples, classes) array."""
    return np.stack([np.array(example) for example in examples], axis=1)


def draw_samples(
    seed: int, samples: int, examples: int, classes: int, concentration: float = 1.0
) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(classes, concentration), size=(samples, examples))


def draw_targets(seed: int, examples: int, classes: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).integers(0, classes, examples)


# Three examples: the samples disagree fully; they agree on a coin toss; they agree on one class.
THREE = stack([[1, 0], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], [[1, 0], [1, 0]])


class TestPredictive:
    def test_mean_and_spread_are_over_the_samples(self) -> None:
        result = predictive(THREE)
        np.testing.assert_allclose(result.mean, [[0.5, 0.5], [0.5, 0.5], [1, 0]])
        # 1 and 0 lie 1/2 from their mean each: spread 1/2.
        np.testing.assert_allclose(result.spread, [[0.5, 0.5], [0, 0], [0, 0]])

    def test_entropies_in_nats_match_hand_values(self) -> None:
        result = predictive(THREE)
        two = math.log(2)
        np.testing.assert_allclose(result.entropy, [two, two, 0])
        np.testing.assert_allclose(result.expected_entropy, [0, two, 0])
        np.testing.assert_allclose(result.mutual_information, [two, 0, 0])

    def test_an_uneven_case_matches_hand_values(self) -> None:
        # Samples (0.9, 0.1) and (0.7, 0.3), mean (0.8, 0.2).
        # H(0.8) = −0.8 ln 0.8 − 0.2 ln 0.2 = 0.178515 + 0.321888 = 0.500402
        # H(0.9) = 0.094824 + 0.230259 = 0.325083;  H(0.7) = 0.249672 + 0.361192 = 0.610864
        # expected (0.325083 + 0.610864) / 2 = 0.467974; difference 0.032429; spread 0.1.
        result = predictive(stack(WAVERING))
        assert result.entropy[0] == pytest.approx(0.500402, abs=1e-6)
        assert result.expected_entropy[0] == pytest.approx(0.467974, abs=1e-6)
        assert result.mutual_information[0] == pytest.approx(0.032429, abs=1e-6)
        np.testing.assert_allclose(result.spread, [[0.1, 0.1]])

    def test_a_sure_example_has_entropy_zero_without_a_minus_sign(self) -> None:
        result = predictive(THREE)
        assert math.copysign(1.0, result.entropy[2]) == 1.0

    def test_one_sample_has_no_spread_and_no_mutual_information(self) -> None:
        result = predictive([[[0.7, 0.2, 0.1]]])
        np.testing.assert_array_equal(result.spread, np.zeros((1, 3)))
        np.testing.assert_array_equal(result.mutual_information, [0.0])

    def test_rounding_never_makes_mutual_information_negative(self) -> None:
        # Samples that agree exactly, seven times over: the true difference is 0, the float one either sign.
        result = predictive(draw_samples(0, 1, 500, 5).repeat(7, axis=0))
        assert (result.entropy < result.expected_entropy).any()  # else this test would show nothing
        assert (result.mutual_information >= 0.0).all()
        np.testing.assert_allclose(result.mutual_information, 0.0, atol=1e-12)

    def test_the_result_cannot_be_reassigned(self) -> None:
        with pytest.raises(FrozenInstanceError):
            predictive(THREE).mean = np.zeros(1)  # type: ignore[misc]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_tensors_of_any_float_type_serve_even_with_gradients(self, dtype: torch.dtype) -> None:
        # Quarters are exact in every one of these types.
        values = [[[0.75, 0.25], [0.5, 0.5]], [[0.25, 0.75], [1.0, 0.0]]]
        tensor = torch.tensor(values, dtype=dtype, requires_grad=True)
        result, expected = predictive(tensor), predictive(np.array(values))
        for name in ("mean", "spread", "entropy", "expected_entropy", "mutual_information"):
            assert getattr(result, name).dtype == np.float64
            np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))

    def test_the_input_is_left_as_it_was(self) -> None:
        samples = draw_samples(0, 4, 5, 3)
        targets = draw_targets(0, 5, 3)
        before = samples.copy()
        predictive(samples), p_values(samples), pavpu(samples, targets)
        brier(samples[0], targets), ece(samples[0], targets), selective_accuracy(samples[0], targets)
        np.testing.assert_array_equal(samples, before)


class TestPValues:
    def test_two_samples_match_the_closed_form(self) -> None:
        np.testing.assert_allclose(p_values(stack(WAVERING)), [P_WAVERING], rtol=1e-12)

    def test_the_test_is_not_the_paired_one(self) -> None:
        # Paired: differences 0.8, 0.4; t = 0.6 / 0.2 = 3, 1 degree of freedom, p = 2 atan(1/3) / π = 0.205.
        assert abs(p_values(stack(WAVERING))[0] - 2 * math.atan(1 / 3) / math.pi) > 0.1

    def test_the_two_classes_are_those_of_highest_posterior_mean(self) -> None:
        # Means 0.45, 0.25, 0.3: the first against the third, though the second leads the third in sample one.
        # Variances 0.005 and 0.08, pooled 0.0425; t² = 0.15² / 0.0425 = 9/17; p = 1 − sqrt(9/43).
        p = p_values(stack([[0.5, 0.4, 0.1], [0.4, 0.1, 0.5]]))
        np.testing.assert_allclose(p, [1 - math.sqrt(9 / 43)], rtol=1e-12)

    def test_no_spread_in_either_class_counts_as_certain(self) -> None:
        # 0.1 and 0.7 three times over: their float mean is not exactly themselves, the range is.
        assert p_values(np.tile([[0.7, 0.1, 0.2]], (3, 1, 1)))[0] == 0.0

    def test_no_spread_in_one_class_alone_is_tested_and_does_not_warn(self) -> None:
        # 0.6 still; 0.1, 0.3 around 0.2: variances 0 and 0.02, pooled 0.01, t = 0.4 / 0.1 = 4;
        # p = 1 − sqrt(16/18).
        p = p_values(stack([[0.6, 0.1, 0.3], [0.6, 0.3, 0.1]]))
        np.testing.assert_allclose(p, [1 - math.sqrt(16 / 18)], rtol=1e-12)

    def test_spread_at_the_last_bit_does_not_warn(self) -> None:
        p = p_values(stack([[0.8, 0.2], [np.nextafter(0.8, 1.0), 0.2]]))
        assert p[0] < 1e-12

    @pytest.mark.parametrize(("samples", "classes"), [(2, 2), (3, 5), (20, 10), (100, 3)])
    def test_scipy_agrees_example_by_example(self, samples: int, classes: int) -> None:
        # Concentrated around equal means, so that p ranges over (0, 1).
        drawn = draw_samples(samples, samples, 60, classes, concentration=20.0)
        expected = []
        for example in range(60):
            second, first = np.argsort(drawn[:, example].mean(axis=0))[-2:]
            expected.append(scipy.stats.ttest_ind(drawn[:, example, first], drawn[:, example, second]).pvalue)
        np.testing.assert_allclose(p_values(drawn), expected, rtol=1e-9)

    def test_scipy_agrees_where_one_class_is_still(self) -> None:
        drawn = stack([[0.6, 0.1, 0.3], [0.6, 0.35, 0.05], [0.6, 0.25, 0.15]])
        with warnings.catch_warnings():
            # scipy warns that a constant sample may have lost precision; here it has not.
            warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
            expected = scipy.stats.ttest_ind(drawn[:, 0, 0], drawn[:, 0, 1]).pvalue
        np.testing.assert_allclose(p_values(drawn), [expected], rtol=1e-9)

    def test_certain_is_p_below_the_threshold(self) -> None:
        drawn = stack(WAVERING, STILL)
        assert certain(drawn, 0.05).tolist() == [False, True]
        assert certain(drawn, 0.1).tolist() == [True, True]

    def test_certain_is_strict(self) -> None:
        assert certain(stack(STILL), 0.0).tolist() == [False]


class TestPavpu:
    # p is 0 for the first three and 0.0513 for the last three; every prediction is class 0.
    SIX = stack(STILL, STILL, STILL, WAVERING, WAVERING, WAVERING)

    def test_labels_match_a_count_by_hand(self) -> None:
        # Right: examples 0, 1, 3. At 0.01 and 0.05 the first three are certain: n_ac = 2, n_ic = 1, n_au = 1,
        # n_iu = 2: 4/6. At 0.1 all are certain: n_ac = 3, n_ic = 3: 3/6.
        scores = pavpu(self.SIX, [0, 0, 1, 0, 1, 1])
        assert scores == pytest.approx({0.01: 4 / 6, 0.05: 4 / 6, 0.1: 3 / 6})

    def test_soft_accuracies_match_a_count_by_hand(self) -> None:
        # At 0.05: n_ac = 1 + 2/3 + 1/3 = 2, n_iu = 2/3 + 1 + 0 = 5/3; (2 + 5/3) / 6 = 11/18.
        # At 0.1 all certain: n_ac = 1 + 2/3 + 1/3 + 1/3 + 0 + 1 = 10/3; (10/3) / 6 = 5/9.
        accuracies = vqa_accuracy([3, 2, 1, 1, 0, 7])
        scores = pavpu(self.SIX, accuracies=accuracies, thresholds=(0.05, 0.1))
        assert scores == pytest.approx({0.05: 11 / 18, 0.1: 5 / 9})

    def test_the_prediction_is_the_class_of_highest_posterior_mean(self) -> None:
        # Sample one says class 1, but the mean (0.7, 0.3) says class 0.
        drawn = stack([[0.45, 0.55], [0.95, 0.05]])
        assert pavpu(drawn, [0], thresholds=(1.0,)) == {1.0: 1.0}

    def test_batches_average_to_the_whole(self) -> None:
        drawn, targets = draw_samples(3, 10, 30, 4, 5.0), draw_targets(3, 30, 4)
        whole = pavpu(drawn, targets)
        first, rest = pavpu(drawn[:, :10], targets[:10]), pavpu(drawn[:, 10:], targets[10:])
        assert whole == pytest.approx({t: (10 * first[t] + 20 * rest[t]) / 30 for t in whole})

    def test_vqa_accuracy_is_a_third_per_annotator_up_to_one(self) -> None:
        np.testing.assert_allclose(vqa_accuracy([[0, 1, 2], [3, 4, 10]]), [[0, 1 / 3, 2 / 3], [1, 1, 1]])


class TestEce:
    def test_a_case_with_every_kind_of_bin_matches_hand_values(self) -> None:
        # Two bins, [0, 1/2) and [1/2, 1), and one for confidence 1.
        # 0.4 right: gap 0.6. 0.6 right and 0.8 right: 2 − 1.4 = 0.6. 1.0 wrong: gap 1.
        # (0.6 + 0.6 + 1) / 4 = 0.55.
        # Were 1.0 in the last bin: |2 − 2.4| = 0.4, and (0.6 + 0.4) / 4 = 0.25.
        mean = [[0.4, 0.3, 0.3], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]]
        assert ece(mean, [0, 1, 2, 1], bins=2) == pytest.approx(0.55)

    def test_a_bin_holds_its_lower_edge(self) -> None:
        # 0.5 right and 0.6 wrong share [1/2, 1): |0.5 − 0.6| / 2 = 0.05. Apart they would give 0.55.
        assert ece([[0.5, 0.5], [0.6, 0.4]], [0, 1], bins=2) == pytest.approx(0.05)

    @pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 20, 100])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize(("classes", "concentration"), [(2, 1.0), (5, 0.3), (30, 1.0)])
    def test_torchmetrics_agrees_on_random_data(
        self, bins: int, dtype: torch.dtype, classes: int, concentration: float
    ) -> None:
        mean = torch.tensor(draw_samples(bins, 1, 300, classes, concentration)[0], dtype=dtype)
        targets = torch.tensor(draw_targets(bins, 300, classes))
        theirs = multiclass_calibration_error(mean, targets, num_classes=classes, n_bins=bins, norm="l1")
        assert ece(mean, targets, bins=bins) == pytest.approx(theirs.item(), abs=2e-6)

    @pytest.mark.parametrize("bins", [1, 2, 3, 5, 7, 10, 13, 15, 20, 33, 64, 100])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("source", ["torch", "decimal"])
    def test_torchmetrics_agrees_at_the_bin_edges(self, bins: int, dtype: torch.dtype, source: str) -> None:
        if source == "torch":
            edges = torch.linspace(0, 1, bins + 1).to(dtype)  # the edges that torchmetrics compares with
        else:
            edges = torch.tensor([k / bins for k in range(bins + 1)], dtype=dtype)
        classes = 120  # the other classes stay below even the lowest edge used
        edges = edges[edges > 0.02]
        mean = torch.cat(
            [edges[:, None], ((1 - edges) / (classes - 1))[:, None].expand(-1, classes - 1)], dim=1
        )
        mean = mean.repeat(2, 1)
        targets = torch.tensor(draw_targets(bins, len(mean), 2))  # class 0 is right half the time
        theirs = multiclass_calibration_error(mean, targets, num_classes=classes, n_bins=bins, norm="l1")
        assert ece(mean, targets, bins=bins) == pytest.approx(theirs.item(), abs=2e-6)


class TestBrier:
    def test_two_examples_match_hand_values(self) -> None:
        # (0.7, 0.2, 0.1), class 0: 0.09 + 0.04 + 0.01 = 0.14.
        # (0.1, 0.1, 0.8), class 1: 0.01 + 0.81 + 0.64 = 1.46. Mean 0.8.
        assert brier([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], [0, 1]) == pytest.approx(0.8)

    def test_the_ends_are_zero_and_two(self) -> None:
        assert brier([[1.0, 0.0]], [0]) == 0.0
        assert brier([[1.0, 0.0]], [1]) == 2.0

    def test_a_loop_over_one_hot_targets_agrees(self) -> None:
        mean = torch.tensor(draw_samples(5, 1, 50, 7)[0])
        targets = torch.tensor(draw_targets(5, 50, 7))
        total = 0.0
        for p, y in zip(mean, targets, strict=True):
            total += ((p - torch.nn.functional.one_hot(y, 7)) ** 2).sum().item()
        assert brier(mean, targets) == pytest.approx(total / 50, rel=1e-12)


class TestNll:
    def test_two_examples_match_hand_values(self) -> None:
        # −(ln 0.5 + ln 0.125) / 2 = 2 ln 2.
        assert nll([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]], [0, 0]) == pytest.approx(2 * math.log(2))

    def test_torchs_loss_agrees(self) -> None:
        logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        targets = torch.tensor(draw_targets(0, 200, 5))
        theirs = torch.nn.functional.cross_entropy(logits, targets)
        assert nll(logits.softmax(dim=-1), targets) == pytest.approx(theirs.item(), rel=1e-12)

    def test_the_ends_are_zero_and_infinity(self) -> None:
        assert str(nll([[1.0, 0.0]], [0])) == "0.0"
        assert nll([[1.0, 0.0], [0.5, 0.5]], [1, 0]) == math.inf


def confident(*highest: float) -> np.ndarray:
    """Means that predict class 0 with these probabilities."""
    return np.stack([np.array(highest), 1 - np.array(highest)], axis=1)


class TestErrorAuroc:
    def test_a_hand_case_counts_pairs_and_halves_ties(self) -> None:
        # Right: 0.9, 0.7, 0.6. Wrong: 0.7, 0.55. 0.9 is above both, 0.7 ties with 0.7 and is above 0.55, 0.6
        # is above 0.55 alone: 2 + 1.5 + 1 = 4.5 of 6 pairs.
        mean = confident(0.9, 0.7, 0.6, 0.7, 0.55)
        assert error_auroc(mean, [0, 0, 0, 1, 1]) == pytest.approx(0.75)

    @pytest.mark.parametrize("levels", [3, 1000])
    def test_torchmetrics_and_scipy_agree_with_and_without_ties(self, levels: int) -> None:
        mean, targets = draw_samples(levels, 1, 300, 4)[0], draw_targets(levels, 300, 4)
        doubt = np.random.default_rng(levels).integers(0, levels, 300) / levels
        wrong = mean.argmax(axis=1) != targets
        ours = error_auroc(mean, targets, -doubt)
        theirs = binary_auroc(torch.tensor(doubt), torch.tensor(wrong.astype(int)))
        assert ours == pytest.approx(theirs.item(), abs=1e-6)
        u = scipy.stats.mannwhitneyu(doubt[wrong], doubt[~wrong]).statistic
        assert ours == pytest.approx(u / (wrong.sum() * (~wrong).sum()), rel=1e-12)

    def test_it_is_undefined_where_all_are_right_or_all_wrong(self) -> None:
        mean = confident(0.9, 0.7, 0.6)
        assert math.isnan(error_auroc(mean, [0, 0, 0]))
        assert math.isnan(error_auroc(mean, [1, 1, 1]))


class TestRiskCoverage:
    def test_a_hand_case(self) -> None:
        # Ranked 0.9 right, 0.8 wrong, 0.7 right, 0.6 wrong: errors 0/1, 1/2, 1/3, 2/4.
        mean, targets = confident(0.6, 0.9, 0.7, 0.8), [1, 0, 0, 1]
        np.testing.assert_allclose(risk_coverage(mean, targets), [0, 1 / 2, 1 / 3, 1 / 2])
        assert aurc(mean, targets) == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)

    def test_ties_are_averaged_over_every_order(self) -> None:
        highest, targets = np.array([0.9, 0.7, 0.7, 0.7, 0.6]), np.array([1, 0, 1, 0, 0])
        curves = []
        for order in itertools.permutations(range(1, 4)):
            wrong = targets[[0, *order, 4]]
            curves.append(np.cumsum(wrong) / np.arange(1, 6))
        np.testing.assert_allclose(risk_coverage(confident(*highest), targets), np.mean(curves, axis=0))

    def test_all_right_is_zero_and_all_wrong_is_one(self) -> None:
        mean = confident(0.9, 0.7, 0.7)
        assert aurc(mean, [0, 0, 0]) == 0.0
        assert aurc(mean, [1, 1, 1]) == 1.0


class TestSelectiveAccuracy:
    # Confidences 0.7, 0.9, 0.55, 0.8, 0.6, all for class 0; ranked: examples 1, 3, 0, 4, 2.
    FIVE = np.array([[0.7, 0.3], [0.9, 0.1], [0.55, 0.45], [0.8, 0.2], [0.6, 0.4]])
    RIGHT_1_0_2 = (0, 0, 0, 1, 1)

    def test_the_most_confident_are_kept_rounding_their_number_up(self) -> None:
        # 0.5 · 5 rounds up to 3: examples 1, 3, 0, two of them right. 0.8 · 5 = 4: 1, 3, 0, 4, two right.
        # All: 3/5.
        scores = selective_accuracy(self.FIVE, self.RIGHT_1_0_2)
        assert scores == pytest.approx({0.5: 2 / 3, 0.8: 2 / 4, 1.0: 3 / 5})

    def test_a_confidence_that_is_given_ranks_instead(self) -> None:
        # Ranked 4, 3, 2, 1, 0: the first two wrong.
        scores = selective_accuracy(self.FIVE, self.RIGHT_1_0_2, (0.4, 0.6), confidence=-np.arange(5)[::-1])
        assert scores == pytest.approx({0.4: 0.0, 0.6: 1 / 3})

    def test_equals_are_kept_in_order(self) -> None:
        targets = [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
        scores = selective_accuracy(np.tile([0.7, 0.3], (10, 1)), targets, (0.1, 0.2, 0.3))
        assert scores == pytest.approx({0.1: 1.0, 0.2: 1.0, 0.3: 2 / 3})

    @pytest.mark.parametrize(
        ("coverage", "kept"), [(0.07, 7), (0.55, 55), (0.551, 56), (0.29, 29), (1e-6, 1)]
    )
    def test_rounding_of_floats_keeps_no_example_too_many(self, coverage: float, kept: int) -> None:
        # 0.07 · 100 and 0.55 · 100 are a hair over 7 and 55 in floats. The first `kept` are right, no others.
        targets = np.arange(100) >= kept
        scores = selective_accuracy(np.tile([0.7, 0.3], (100, 1)), targets.astype(int), (coverage,))
        assert scores == {coverage: 1.0}
        one_more = selective_accuracy(np.tile([0.7, 0.3], (100, 1)), targets.astype(int), ((kept + 1) / 100,))
        assert next(iter(one_more.values())) == pytest.approx(kept / (kept + 1))


class TestSigmoids:
    """Outputs of which each is the probability of one answer; they do not sum to one."""

    LEADING = np.linspace(1.0, 9.0, 30)[:, None] * np.eye(7)[0]  # the first answer leads more and more
    DRAWN = np.random.default_rng(3).beta(2.0 + LEADING, 3.0, size=(20, 30, 7))

    def test_they_are_refused_unless_they_are_called_sigmoids(self) -> None:
        with pytest.raises(ValueError, match="must sum to one over classes"):
            pavpu(self.DRAWN, accuracies=np.ones(30))
        with pytest.raises(ValueError, match=r"^link must be one of 'softmax', 'sigmoid'; got 'identity'$"):
            predictive(self.DRAWN, link="identity")
        with pytest.raises(ValueError, match=r"^probabilities must lie in \[0, 1\], got .* to 1\.5$"):
            p_values(np.where(self.DRAWN > 0.9, 1.5, self.DRAWN), link="sigmoid")

    @pytest.mark.parametrize("equal_variance", [True, False])
    def test_p_values_are_those_of_scipy_for_the_two_highest_means(self, equal_variance: bool) -> None:
        found = p_values(self.DRAWN, link="sigmoid", equal_variance=equal_variance)
        for example in range(30):
            best, second = self.DRAWN[:, example].mean(axis=0).argsort()[::-1][:2]
            wanted = scipy.stats.ttest_ind(
                self.DRAWN[:, example, best], self.DRAWN[:, example, second], equal_var=equal_variance
            )
            assert found[example] == pytest.approx(wanted.pvalue, rel=1e-9)

    def test_the_tests_differ_where_one_answer_spreads_more(self) -> None:
        drawn = np.stack([np.linspace(0.3, 0.9, 5), np.linspace(0.49, 0.51, 5)], axis=1)[:, None]
        student, welch = (p_values(drawn, link="sigmoid", equal_variance=equal) for equal in (True, False))
        assert welch > 1.05 * student

    def test_pavpu_weights_certain_answers_by_their_accuracy(self) -> None:
        accuracies = np.random.default_rng(4).choice([0.0, 1 / 3, 0.5, 1.0], 30)
        sure = certain(self.DRAWN, 0.05, link="sigmoid", equal_variance=False)
        assert 0 < sure.sum() < 30
        counts = (accuracies * sure).sum() + ((1 - accuracies) * ~sure).sum()
        scores = pavpu(self.DRAWN, accuracies=accuracies, link="sigmoid", equal_variance=False)
        assert scores[0.05] == pytest.approx(counts / 30)

    @pytest.mark.parametrize("equal_variance", [True, False])
    def test_samples_without_spread_are_certain(self, equal_variance: bool) -> None:
        still = self.DRAWN[:1].repeat(20, axis=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = p_values(still, link="sigmoid", equal_variance=equal_variance)
        np.testing.assert_array_equal(found, 0.0)

    def test_entropies_are_sums_of_those_of_a_yes_and_a_no(self) -> None:
        found = predictive(self.DRAWN, link="sigmoid")
        pairs = np.stack([self.DRAWN, 1 - self.DRAWN])
        total = scipy.stats.entropy(pairs.mean(axis=1), axis=0).sum(axis=-1)
        expected = scipy.stats.entropy(pairs, axis=0).sum(axis=-1).mean(axis=0)
        np.testing.assert_allclose(found.entropy, total)
        np.testing.assert_allclose(found.expected_entropy, expected)
        np.testing.assert_allclose(found.mutual_information, total - expected)

    def test_calibration_and_selection_take_the_highest_and_how_right_it_is(self) -> None:
        mean = [[0.9, 0.8, 0.1], [0.35, 0.2, 0.05], [0.88, 0.3, 0.3]]
        accuracies = [0.5, 1.0, 0.0]
        # Ten bins: 0.9 alone, 0.35 alone, 0.88 alone.
        found = ece(mean, bins=10, accuracies=accuracies, link="sigmoid")
        assert found == pytest.approx((0.4 + 0.65 + 0.88) / 3)
        scores = selective_accuracy(mean, coverage=(0.3, 0.6, 1.0), accuracies=accuracies, link="sigmoid")
        assert scores == pytest.approx({0.3: 0.5, 0.6: 0.25, 1.0: 0.5})

    def test_brier_is_the_average_over_answers(self) -> None:
        found = brier([[0.9, 0.2], [0.5, 0.5]], [[1.0, 0.3], [0.0, 1.0]], link="sigmoid")
        assert found == pytest.approx((0.01 + 0.01 + 0.25 + 0.25) / 4)
        with pytest.raises(ValueError, match=r"^targets must have shape \(examples, classes\), got shape"):
            brier([[0.9, 0.2]], [1], link="sigmoid")
        with pytest.raises(ValueError, match=r"^targets must have the shape of mean, \(1, 2\), got shape"):
            brier([[0.9, 0.2]], [[0.1, 0.2, 0.3]], link="sigmoid")


sizes = st.tuples(st.integers(2, 8), st.integers(1, 12), st.integers(2, 6))  # samples, examples, classes
seeds = st.integers(0, 2**32 - 2)
concentrations = st.sampled_from([0.1, 1.0, 30.0])
few = settings(max_examples=40, deadline=None)


class TestProperties:
    @few
    @given(seeds, sizes, concentrations)
    def test_the_order_of_samples_changes_nothing(
        self, seed: int, size: tuple[int, int, int], concentration: float
    ) -> None:
        drawn, targets = draw_samples(seed, *size, concentration), draw_targets(seed, *size[1:])
        mixed = np.random.default_rng(seed).permutation(drawn, axis=0)
        one, other = predictive(drawn), predictive(mixed)
        for name in ("mean", "spread", "entropy", "expected_entropy", "mutual_information"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-12)
        np.testing.assert_allclose(p_values(drawn), p_values(mixed), rtol=1e-6, atol=1e-12)
        assert pavpu(drawn, targets) == pytest.approx(pavpu(mixed, targets))

    @few
    @given(seeds, sizes, concentrations)
    def test_the_order_of_examples_changes_no_score_and_permutes_the_rest(
        self, seed: int, size: tuple[int, int, int], concentration: float
    ) -> None:
        drawn, targets = draw_samples(seed, *size, concentration), draw_targets(seed, *size[1:])
        order = np.random.default_rng(seed).permutation(size[1])
        mixed, moved = drawn[:, order], targets[order]
        one, other = predictive(drawn), predictive(mixed)
        for name in ("mean", "spread", "entropy", "expected_entropy", "mutual_information"):
            np.testing.assert_allclose(getattr(one, name)[order], getattr(other, name), atol=1e-12)
        np.testing.assert_allclose(p_values(drawn)[order], p_values(mixed), rtol=1e-9)
        assert pavpu(drawn, targets) == pytest.approx(pavpu(mixed, moved))
        assert ece(one.mean, targets) == pytest.approx(ece(other.mean, moved))
        assert brier(one.mean, targets) == pytest.approx(brier(other.mean, moved))
        assert selective_accuracy(one.mean, targets) == pytest.approx(selective_accuracy(other.mean, moved))

    @few
    @given(seeds, sizes, concentrations)
    def test_mutual_information_lies_between_zero_and_the_log_of_classes(
        self, seed: int, size: tuple[int, int, int], concentration: float
    ) -> None:
        result = predictive(draw_samples(seed, *size, concentration))
        assert (result.mutual_information >= 0.0).all()
        assert (result.mutual_information <= math.log(size[2]) + 1e-12).all()
        assert (result.entropy <= math.log(size[2]) + 1e-12).all()
        np.testing.assert_allclose(
            result.entropy, result.expected_entropy + result.mutual_information, atol=1e-12
        )

    @few
    @given(seeds, sizes, concentrations)
    def test_scores_stay_within_their_bounds(
        self, seed: int, size: tuple[int, int, int], concentration: float
    ) -> None:
        drawn, targets = draw_samples(seed, *size, concentration), draw_targets(seed, *size[1:])
        mean = drawn.mean(axis=0)
        p = p_values(drawn)
        assert ((p >= 0.0) & (p <= 1.0)).all()
        assert all(0.0 <= score <= 1.0 for score in pavpu(drawn, targets).values())
        assert all(0.0 <= score <= 1.0 for score in selective_accuracy(mean, targets).values())
        assert 0.0 <= ece(mean, targets) <= 1.0
        assert 0.0 <= brier(mean, targets) <= 2.0

    @few
    @given(seeds, sizes, concentrations)
    def test_soft_accuracies_of_zero_and_one_equal_the_labels(
        self, seed: int, size: tuple[int, int, int], concentration: float
    ) -> None:
        drawn, targets = draw_samples(seed, *size, concentration), draw_targets(seed, *size[1:])
        right = drawn.mean(axis=0).argmax(axis=1) == targets
        assert pavpu(drawn, targets) == pavpu(drawn, accuracies=right.astype(float))

    @few
    @given(seeds, sizes)
    def test_selective_accuracy_at_full_coverage_is_accuracy(
        self, seed: int, size: tuple[int, int, int]
    ) -> None:
        mean, targets = draw_samples(seed, *size)[0], draw_targets(seed, *size[1:])
        accuracy = (mean.argmax(axis=1) == targets).mean()
        assert selective_accuracy(mean, targets, (1.0,)) == {1.0: accuracy}
        information = np.random.default_rng(seed).random(size[1])
        assert selective_accuracy(mean, targets, (1.0,), -information) == pytest.approx({1.0: accuracy})

    @few
    @given(seeds, sizes)
    def test_with_every_example_certain_pavpu_is_accuracy(
        self, seed: int, size: tuple[int, int, int]
    ) -> None:
        drawn, targets = draw_samples(seed, *size)[:1].repeat(3, axis=0), draw_targets(seed, *size[1:])
        accuracy = (drawn[0].argmax(axis=1) == targets).mean()
        assert pavpu(drawn, targets) == pytest.approx(dict.fromkeys((0.01, 0.05, 0.1), accuracy))

    @few
    @given(seeds, sizes)
    def test_no_ranking_has_less_area_than_the_errors_last(
        self, seed: int, size: tuple[int, int, int]
    ) -> None:
        mean, targets = draw_samples(seed, *size)[0], draw_targets(seed, *size[1:])
        right = (mean.argmax(axis=1) == targets).astype(float)
        confidence = np.random.default_rng(seed).integers(0, 4, size[1])
        best, worst = aurc(mean, targets, right), aurc(mean, targets, -right)
        assert best - 1e-12 <= aurc(mean, targets, confidence) <= worst + 1e-12
        if 0.0 < right.mean() < 1.0:
            assert error_auroc(mean, targets, right) == 1.0
            assert error_auroc(mean, targets, -right) == 0.0
            flipped = error_auroc(mean, targets, -confidence)
            assert error_auroc(mean, targets, confidence) == pytest.approx(1.0 - flipped)

    @few
    @given(seeds, sizes)
    def test_only_the_order_of_confidences_counts_and_not_that_of_examples(
        self, seed: int, size: tuple[int, int, int]
    ) -> None:
        mean, targets = draw_samples(seed, *size)[0], draw_targets(seed, *size[1:])
        rng = np.random.default_rng(seed)
        confidence, order = rng.integers(0, 3, size[1]), rng.permutation(size[1])
        for measure in (error_auroc, aurc):
            one = measure(mean, targets, confidence)
            others = (
                measure(mean, targets, np.exp(confidence)),
                measure(mean[order], targets[order], confidence[order]),
            )
            assert others == pytest.approx((one, one), nan_ok=True)

    @few
    @given(seeds, sizes)
    def test_the_curve_meets_selective_accuracy_where_nothing_ties(
        self, seed: int, size: tuple[int, int, int]
    ) -> None:
        mean, targets = draw_samples(seed, *size)[0], draw_targets(seed, *size[1:])
        coverage = [(i + 1) / size[1] for i in range(size[1])]
        accuracies = list(selective_accuracy(mean, targets, coverage).values())
        np.testing.assert_allclose(1 - risk_coverage(mean, targets), accuracies)


GOOD = draw_samples(0, 3, 4, 3)
MEAN = GOOD[0]
LABELS = [0, 1, 2, 0]
HOLED = np.where(np.arange(12).reshape(4, 3) < 2, np.nan, MEAN)  # two NaN
SUMS_OFF = MEAN * np.array([[1.0], [1.0005], [1.25], [0.9]])  # the worst row sums to 1.25


class TestRefusals:
    @pytest.mark.parametrize("function", [predictive, p_values, lambda p: pavpu(p, LABELS)])
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (MEAN, r"probabilities must have shape \(samples, examples, classes\), got shape \(4, 3\)"),
            (np.zeros((3, 0, 2)), r"probabilities must not be empty, got shape \(3, 0, 2\)"),
            (HOLED[None], "probabilities must hold no NaN, got 2 among 12 values"),
            (SUMS_OFF[None], "probabilities must sum to one over classes within 0.001, got 1.25 at worst"),
            (
                [[[1.5, -0.5]]],
                r"probabilities must not be negative, got -0.5 \(logits need a softmax first\)",
            ),
            ([[[np.inf, 0.0]]], "probabilities must sum to one over classes within 0.001, got inf at worst"),
            (GOOD.astype(complex), "probabilities must hold real numbers, got dtype complex128"),
            (torch.tensor(HOLED[None]), "probabilities must hold no NaN, got 2 among 12 values"),
        ],
    )
    def test_bad_probabilities_are_named(self, function: Any, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            function(bad)

    @pytest.mark.parametrize("function", [ece, nll, brier, selective_accuracy, error_auroc, aurc])
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (GOOD, r"mean must have shape \(examples, classes\), got shape \(3, 4, 3\)"),
            (np.zeros((0, 3)), r"mean must not be empty, got shape \(0, 3\)"),
            (HOLED, "mean must hold no NaN, got 2 among 12 values"),
            (SUMS_OFF, "mean must sum to one over classes within 0.001, got 1.25 at worst"),
            ([[1.5, -0.5]], r"mean must not be negative, got -0.5 \(logits need a softmax first\)"),
        ],
    )
    def test_a_bad_mean_is_named(self, function: Any, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            function(bad, LABELS)

    @pytest.mark.parametrize(
        "function",
        [
            ece,
            nll,
            brier,
            selective_accuracy,
            risk_coverage,
            lambda mean, y: pavpu(np.stack([mean, mean]), y),
        ],
    )
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([0, 1, 2], r"targets must have shape \(4,\), one per example, got shape \(3,\)"),
            ([[0, 1, 2, 0]], r"targets must have shape \(4,\), one per example, got shape \(1, 4\)"),
            ([], r"targets must have shape \(4,\), one per example, got shape \(0,\)"),
            ([0.0, 1.0, 2.0, 0.0], "targets must be integer labels, got dtype float64"),
            ([True, False, True, True], "targets must be integer labels, got dtype bool"),
            ([0, 1, 3, 0], "targets must lie in 0 to 2, a class each, got 3"),
            ([0, -1, 2, 0], "targets must lie in 0 to 2, a class each, got -1"),
            (["a", "b", "c", "d"], "targets must hold real numbers, got dtype <U1"),
        ],
    )
    def test_bad_targets_are_named(self, function: Any, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            function(MEAN, bad)

    def test_row_sums_within_tolerance_are_taken(self) -> None:
        predictive(GOOD * 1.0009)

    def test_the_t_test_needs_two_samples(self) -> None:
        with pytest.raises(
            ValueError, match=r"^probabilities must hold at least two samples for a t-test, got 1$"
        ):
            p_values(GOOD[:1])

    def test_the_t_test_needs_two_classes(self) -> None:
        with pytest.raises(
            ValueError, match=r"^probabilities must hold at least two classes for a t-test, got 1$"
        ):
            p_values(np.ones((3, 4, 1)))

    def test_certain_needs_a_threshold_between_zero_and_one(self) -> None:
        with pytest.raises(ValueError, match=r"^threshold must lie in \[0, 1\], got 5$"):
            certain(GOOD, 5)

    def test_pavpu_needs_exactly_one_of_targets_and_accuracies(self) -> None:
        with pytest.raises(ValueError, match=r"^targets and accuracies: give exactly one, got neither$"):
            pavpu(GOOD)
        with pytest.raises(ValueError, match=r"^targets and accuracies: give exactly one, got both$"):
            pavpu(GOOD, LABELS, accuracies=[1, 1, 1, 1])

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ((0.05, 1.5), r"thresholds must lie in \[0, 1\], got 1.5"),
            ((), r"thresholds must be a sequence of one number or more, such as \(0.5,\), got \(\)"),
            (0.05, r"thresholds must be a sequence of one number or more, such as \(0.5,\), got 0.05"),
        ],
    )
    def test_bad_thresholds_are_named(self, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            pavpu(GOOD, LABELS, bad)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([0.5, 0.5], "accuracies must have one value for each of 4 examples, got 2"),
            ([0.5, 0.5, 0.5, 1.5], r"accuracies must lie in \[0, 1\], got 0.5 to 1.5"),
            ([-1, 0.5, 0.5, 0.5], r"accuracies must lie in \[0, 1\], got -1 to 0.5"),
            ([0.5, 0.5, 0.5, np.nan], "accuracies must hold no NaN, got 1 among 4 values"),
            ([[0.5] * 4], r"accuracies must have shape \(examples,\), got shape \(1, 4\)"),
        ],
    )
    def test_bad_accuracies_are_named(self, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            pavpu(GOOD, accuracies=bad)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([1, -2], "counts must not be negative, got -2"),
            ([], r"counts must not be empty, got shape \(0,\)"),
            ([np.nan, 1.0], "counts must hold no NaN, got 1 among 2 values"),
        ],
    )
    def test_bad_counts_are_named(self, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            vqa_accuracy(bad)

    @pytest.mark.parametrize("bad", [0, -1, 2.5, True])
    def test_bins_must_be_a_whole_number_of_at_least_one(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=rf"^bins must be a whole number of at least 1, got {bad}$"):
            ece(MEAN, LABELS, bins=bad)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ((0.0,), r"coverage must lie in \(0, 1\], got 0.0"),
            ((0.5, 1.1), r"coverage must lie in \(0, 1\], got 1.1"),
            ((math.nan,), r"coverage must lie in \(0, 1\], got nan"),
            ((), r"coverage must be a sequence of one number or more, such as \(0.5,\), got \(\)"),
            (0.5, r"coverage must be a sequence of one number or more, such as \(0.5,\), got 0.5"),
        ],
    )
    def test_bad_coverage_is_named(self, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            selective_accuracy(MEAN, LABELS, bad)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([1.0, 2.0], "confidence must have one value for each of 4 examples, got 2"),
            ([1.0, 2.0, 3.0, np.nan], "confidence must hold no NaN, got 1 among 4 values"),
        ],
    )
    def test_a_bad_confidence_is_named(self, bad: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            selective_accuracy(MEAN, LABELS, confidence=bad)
