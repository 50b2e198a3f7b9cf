"""Measures of a classifier's uncertainty, from samples of its predictive distribution.

`probabilities` always has shape (samples, examples, classes): one predictive distribution per posterior
sample (or dropout pass, or ensemble member) and example. `mean` has shape (examples, classes). Inputs are
numpy arrays, torch tensors on any device, or nested lists; the arithmetic is numpy's, in float64.

With `link="sigmoid"`, the probabilities of an example are each a class's own and need not sum to one: several
answers may be right, or partly right, as in visual question answering. `accuracies` then say how right the
most probable class is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from overt import _check
from overt._predictions import Link, summarize

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Values: TypeAlias = ArrayLike | torch.Tensor
    Floats: TypeAlias = NDArray[np.float64]

_SAMPLED = ("samples", "examples", "classes")
_MEAN = ("examples", "classes")
_SUM_TOLERANCE = 1e-3
_LINKS: tuple[Link, ...] = ("softmax", "sigmoid")


@dataclass(frozen=True, eq=False)  # a generated == would compare arrays and fail on their truth value
class Predictive:
    """A summary of posterior samples for each example. Entropies are in nats.

    mean: (examples, classes), the average of the samples.
    spread: (examples, classes), the standard deviation over the samples (divided by their number, not by
        one less, so a single sample has spread 0).
    entropy: (examples,), entropy of the mean: the total uncertainty.
    expected_entropy: (examples,), average entropy of the samples: what would remain if the weights were
        known.
    mutual_information: (examples,), entropy − expected_entropy, never negative: how much the samples disagree
        (Houlsby et al. 2011, arXiv:1112.5745, section 2).

    Entropies and mutual information of sigmoids are sums of those of the classes, each a yes or a no.
    """

    mean: Floats
    spread: Floats
    entropy: Floats
    expected_entropy: Floats
    mutual_information: Floats


def predictive(probabilities: Values, link: Link = "softmax") -> Predictive:
    """Mean, spread, entropies and mutual information of `probabilities` (samples, examples, classes)."""
    samples = _probabilities("probabilities", probabilities, _SAMPLED, link)
    return Predictive(*(part.numpy() for part in summarize(torch.from_numpy(samples), link)))


def p_values(probabilities: Values, *, link: Link = "softmax", equal_variance: bool = True) -> Floats:
    """P-values, (examples,), of a t-test between the two most probable classes of each example.

    Fan et al. 2020 (Bayesian Attention Modules, arXiv:2010.10604), appendix B.2.1: Student's two-sample
    t-test (equal variances, two-sided) compares the sampled probabilities of the two classes with the highest
    posterior mean. If neither class varies over the samples, the statistic is undefined; such an example
    counts as certain, p = 0. `probabilities` is (samples, examples, classes), with at least two samples and
    two classes. Without `equal_variance`, the test is Welch's.

    The authors' released code (zhougroup/BAM, GAT/execute_cora.py) runs a paired test, on logits; this
    function follows the paper. Their later code for visual question answering runs Welch's, on sigmoids.
    """
    return _p_values(_probabilities("probabilities", probabilities, _SAMPLED, link), equal_variance)


def certain(
    probabilities: Values, threshold: float, *, link: Link = "softmax", equal_variance: bool = True
) -> NDArray[np.bool_]:
    """Which examples the model is certain about, (examples,): those with `p_values(…)` < threshold."""
    _check.fraction("threshold", threshold)
    return p_values(probabilities, link=link, equal_variance=equal_variance) < threshold


def pavpu(
    probabilities: Values,
    targets: Values | None = None,
    thresholds: Sequence[float] = (0.01, 0.05, 0.1),
    *,
    accuracies: Values | None = None,
    link: Link = "softmax",
    equal_variance: bool = True,
) -> dict[float, float]:
    """Share of examples that are accurate and certain, or inaccurate and uncertain, for each threshold.

    PAvPU = (n_ac + n_iu) / (n_ac + n_au + n_ic + n_iu) (Mukhoti and Gal 2018, arXiv:1811.12709); an example
    is certain if its `p_values` < threshold (Fan et al. 2020, appendix B.2.1). `probabilities` is
    (samples, examples, classes). Give exactly one of

    targets: (examples,), integer labels; the prediction is the class of highest posterior mean.
    accuracies: (examples,), in [0, 1], how correct that prediction is, if several answers are partly correct
        (see `vqa_accuracy`). Examples are then weighted: n_ac = Σ Acc·Cer, n_au = Σ Acc·(1−Cer),
        n_ic = Σ (1−Acc)·Cer, n_iu = Σ (1−Acc)·(1−Cer).

    The four counts add up to the number of examples, so results of batches may be averaged, weighted by size.
    `equal_variance` is as in `p_values`.
    """
    _check_sequence("thresholds", thresholds)
    for threshold in thresholds:
        _check.fraction("thresholds", threshold)
    samples = _probabilities("probabilities", probabilities, _SAMPLED, link)
    accurate = _accurate(samples.mean(axis=0), targets, accuracies)
    p = _p_values(samples, equal_variance)
    scores = {}
    for threshold in thresholds:
        agreeing = np.where(p < threshold, accurate, 1.0 - accurate)  # n_ac where certain, n_iu elsewhere
        scores[threshold] = float(agreeing.mean())
    return scores


def vqa_accuracy(counts: Values) -> Floats:
    """min(counts / 3, 1), elementwise: the accuracy of an answer that `counts` human annotators gave.

    Antol et al. 2015 (VQA, arXiv:1505.00468), section 3; Fan et al. 2020, appendix B.2.1.
    """
    humans = _reals("counts", counts)
    if humans.min() < 0.0:
        raise ValueError(f"counts must not be negative, got {humans.min():g}")
    return np.minimum(humans / 3.0, 1.0)


def ece(
    mean: Values,
    targets: Values | None = None,
    bins: int = 15,
    *,
    accuracies: Values | None = None,
    link: Link = "softmax",
) -> float:
    """Expected calibration error: Σ over bins of (share of examples) · |accuracy − mean confidence|.

    Guo et al. 2017 (arXiv:1706.04599), section 2. `mean` is (examples, classes); `targets` (examples,), or
    `accuracies` (examples,) of the most probable class, in [0, 1].
    The bins are those of torchmetrics' multiclass_calibration_error (norm='l1'): of equal width, each
    including its lower edge and not its upper; a confidence of exactly 1 has a separate bin.
    """
    _check.whole("bins", bins, 1)
    confidence, correct = _judged(mean, targets, accuracies, link)
    # At an edge the last bit decides, and torch.linspace's edges are not always i / bins rounded. So both
    # sides of the comparison are as in torchmetrics: these edges, and confidences rounded to float32.
    edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float32, device="cpu").numpy()
    bin_of = np.searchsorted(edges, confidence.astype(np.float32), side="right") - 1
    gaps = np.bincount(bin_of, weights=correct - confidence)
    return float(np.abs(gaps).sum() / len(confidence))


def nll(mean: Values, targets: Values) -> float:
    """Negative log-likelihood, in nats: average over examples of −log p_y, with y the target.

    `mean` is (examples, classes), `targets` (examples,). Infinite if a target has probability 0.
    """
    p = _distributions("mean", mean, _MEAN)
    with np.errstate(divide="ignore"):
        return float(-np.log(p[np.arange(len(p)), _labels(targets, *p.shape)]).mean() + 0.0)


def brier(mean: Values, targets: Values, link: Link = "softmax") -> float:
    """Multiclass Brier score, 0 (best) to 2: average over examples of Σ_c (p_c − 1[c = y])².

    Brier 1950. `mean` is (examples, classes), `targets` (examples,). Of sigmoids, it is the average over
    examples and classes of (p_c − t_c)², 0 to 1, and `targets` t are (examples, classes), in [0, 1].
    """
    p = _probabilities("mean", mean, _MEAN, link)
    if link == "sigmoid":
        wanted = _probabilities("targets", targets, _MEAN, link)
        if wanted.shape != p.shape:
            raise ValueError(f"targets must have the shape of mean, {p.shape}, got shape {wanted.shape}")
        return float(((p - wanted) ** 2).mean())
    error = p.copy()
    error[np.arange(len(p)), _labels(targets, *p.shape)] -= 1.0
    return float((error**2).sum(axis=1).mean())


def selective_accuracy(
    mean: Values,
    targets: Values | None = None,
    coverage: Sequence[float] = (0.5, 0.8, 1.0),
    confidence: Values | None = None,
    *,
    accuracies: Values | None = None,
    link: Link = "softmax",
) -> dict[float, float]:
    """Accuracy on the most confident ⌈coverage · examples⌉ examples, for each coverage in (0, 1].

    Geifman and El-Yaniv 2017 (arXiv:1705.08500), section 2. `mean` is (examples, classes); `targets`
    (examples,), or `accuracies` (examples,) of the most probable class, in [0, 1]. `confidence` (examples,)
    ranks the examples, highest first; by default it is the highest probability, and minus the mutual
    information is another choice. Of equally confident examples, the earlier comes first.
    """
    _check_sequence("coverage", coverage)
    for share in coverage:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"coverage must lie in (0, 1], got {share}")
    rank_by, correct = _ranked_by(mean, targets, confidence, accuracies, link)
    examples = len(correct)
    ranked = correct[np.argsort(-rank_by, kind="stable")]
    # 0.07 · 100 is 7.000000000000001 in floats, and must give 7: subtract more than rounding adds.
    counts = {share: math.ceil(share * examples * (1.0 - 1e-12)) for share in coverage}
    return {share: float(ranked[:count].mean()) for share, count in counts.items()}


def error_auroc(mean: Values, targets: Values, confidence: Values | None = None) -> float:
    """Area under the ROC curve of uncertainty as a detector of errors: 1 is perfect, 0.5 is chance.

    It is the probability that a wrong prediction has less confidence than a right one, where a tie counts
    half (Hendrycks and Gimpel 2017, arXiv:1610.02136, section 2). `mean` is (examples, classes), `targets`
    (examples,), and `confidence` as in `selective_accuracy`. NaN if all predictions are right, or all wrong:
    there is then nothing to tell apart.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped, unused-ignore]

    rank_by, correct = _ranked_by(mean, targets, confidence)
    right = correct.sum()
    wrong = len(correct) - right
    if right == 0.0 or wrong == 0.0:
        return math.nan
    above = (rankdata(rank_by) * correct).sum() - right * (right + 1.0) / 2.0  # Mann–Whitney's U
    return float(above / (right * wrong))


def risk_coverage(mean: Values, targets: Values, confidence: Values | None = None) -> Floats:
    """Share of errors among the 1, 2, … most confident examples, (examples,): the risk–coverage curve.

    Entry i is the risk at coverage (i + 1) / examples; the last is the error rate. `mean` is
    (examples, classes), `targets` (examples,), and `confidence` as in `selective_accuracy`. Equally confident
    examples are taken in random order, and the curve is the mean over these orders, so that the order of the
    data does not matter.
    """
    rank_by, correct = _ranked_by(mean, targets, confidence)
    _, group = np.unique(-rank_by, return_inverse=True)  # 0 for the most confident
    sizes = np.bincount(group)
    errors = np.repeat(np.bincount(group, weights=1.0 - correct) / sizes, sizes)
    return np.asarray(np.cumsum(errors) / np.arange(1, len(correct) + 1))


def aurc(mean: Values, targets: Values, confidence: Values | None = None) -> float:
    """Area under the risk–coverage curve, 0 (best) to 1: the average of `risk_coverage`.

    Geifman et al. 2019 (arXiv:1805.08206), section 3. It is 0 if all predictions are right and 1 if all are
    wrong, whatever the confidences; between models of different accuracy it compares both accuracy and
    ranking.
    """
    return float(risk_coverage(mean, targets, confidence).mean())


def _p_values(samples: Floats, equal_variance: bool) -> Floats:
    """`p_values` of checked samples."""
    # Imported here to keep `import overt` light. The ignore is for mypy without scipy-stubs.
    from scipy.stats import ttest_ind_from_stats  # type: ignore[import-untyped, unused-ignore]

    count, examples, classes = samples.shape
    if count < 2:
        raise ValueError(f"probabilities must hold at least two samples for a t-test, got {count}")
    if classes < 2:
        raise ValueError(f"probabilities must hold at least two classes for a t-test, got {classes}")
    mean = samples.mean(axis=0)
    rows = np.arange(examples)
    first = mean.argmax(axis=1)
    mean[rows, first] = -1.0  # below any probability, so that argmax finds the second class
    pair = samples[:, rows, np.stack([first, mean.argmax(axis=1)])]  # (samples, 2, examples)
    means, spreads = pair.mean(axis=0), pair.std(axis=0, ddof=1)
    # The same test as ttest_ind, which warns of lost precision if one of the two classes is constant.
    # By range, since the deviation of equal floats from their rounded mean need not be zero.
    constant = (np.ptp(pair, axis=0) == 0.0).all(axis=0)
    spreads = np.where(constant, 1.0, spreads)  # Welch's test divides by them
    result = ttest_ind_from_stats(
        means[0], spreads[0], count, means[1], spreads[1], count, equal_var=equal_variance
    )
    return np.where(constant, 0.0, np.asarray(result.pvalue, dtype=np.float64))


def _judged(
    mean: Values, targets: Values | None, accuracies: Values | None, link: Link
) -> tuple[Floats, Floats]:
    """Highest probability of each example, and how right its class is, 0 to 1; both (examples,)."""
    p = _probabilities("mean", mean, _MEAN, link)
    return p.max(axis=1), _accurate(p, targets, accuracies)


def _accurate(mean: Floats, targets: Values | None, accuracies: Values | None) -> Floats:
    """How right the most probable class is, (examples,): 1 where it is the target, else 0, or as given."""
    if (targets is None) == (accuracies is None):
        raise ValueError(
            f"targets and accuracies: give exactly one, got {'neither' if targets is None else 'both'}"
        )
    if targets is not None:
        return np.asarray(mean.argmax(axis=1) == _labels(targets, *mean.shape), dtype=np.float64)
    accurate = _per_example("accuracies", accuracies, len(mean))
    if accurate.min() < 0.0 or accurate.max() > 1.0:
        raise ValueError(f"accuracies must lie in [0, 1], got {accurate.min():g} to {accurate.max():g}")
    return accurate


def _ranked_by(
    mean: Values,
    targets: Values | None,
    confidence: Values | None,
    accuracies: Values | None = None,
    link: Link = "softmax",
) -> tuple[Floats, Floats]:
    """What ranks the examples, by default the highest probability, and how right each is; (examples,)."""
    highest, correct = _judged(mean, targets, accuracies, link)
    if confidence is None:
        return highest, correct
    return _per_example("confidence", confidence, len(correct)), correct


def _array(name: str, value: Any) -> NDArray[Any]:
    """`value` as a numpy array of real numbers; tensors are recognised by `.detach`."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()  # numpy has no bfloat16
    array: NDArray[Any] = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, got dtype {array.dtype}")
    return array


def _reals(name: str, value: object, axes: tuple[str, ...] | None = None) -> Floats:
    """`value` in float64, not empty, without NaN, and with these axes unless None."""
    array = _array(name, value)
    if axes is not None and array.ndim != len(axes):
        shape = str(axes).replace("'", "")
        raise ValueError(f"{name} must have shape {shape}, got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    array = array.astype(np.float64, copy=False)
    if missing := int(np.isnan(array).sum()):
        raise ValueError(f"{name} must hold no NaN, got {missing} among {array.size} values")
    return array


def _probabilities(name: str, value: object, axes: tuple[str, ...], link: Link) -> Floats:
    """`value` in float64, with these axes: distributions over classes, or a probability for each class."""
    _check.one_of("link", link, _LINKS)
    if link == "softmax":
        return _distributions(name, value, axes)
    array = _reals(name, value, axes)
    if array.min() < 0.0 or array.max() > 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {array.min():g} to {array.max():g}")
    return array


def _distributions(name: str, value: object, axes: tuple[str, ...]) -> Floats:
    """`value` in float64, with these axes; each row along the last axis is a probability distribution."""
    array = _reals(name, value, axes)
    if array.min() < 0.0:
        raise ValueError(f"{name} must not be negative, got {array.min():g} (logits need a softmax first)")
    sums = array.sum(axis=-1)
    deviations = np.abs(sums - 1.0)
    if deviations.max() > _SUM_TOLERANCE:
        raise ValueError(
            f"{name} must sum to one over classes within {_SUM_TOLERANCE:g}, "
            f"got {sums.flat[deviations.argmax()]:.6g} at worst"
        )
    return array


def _per_example(name: str, value: object, examples: int) -> Floats:
    """`value` in float64, one number for each example."""
    array = _reals(name, value, ("examples",))
    if len(array) != examples:
        raise ValueError(f"{name} must have one value for each of {examples} examples, got {len(array)}")
    return array


def _labels(targets: object, examples: int, classes: int) -> NDArray[np.int64]:
    """Targets as int64 labels, one for each example."""
    array = _array("targets", targets)
    if array.shape != (examples,):
        raise ValueError(f"targets must have shape ({examples},), one per example, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"targets must be integer labels, got dtype {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"targets must lie in 0 to {classes - 1}, a class each, got {low if low < 0 else high}"
        )
    return array.astype(np.int64)


def _check_sequence(name: str, values: Any) -> None:
    """Refuse anything but a non-empty, one-dimensional sequence."""
    if np.ndim(values) != 1 or np.size(values) == 0:
        raise ValueError(f"{name} must be a sequence of one number or more, such as (0.5,), got {values!r}")
