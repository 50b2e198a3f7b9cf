"""Probabilities from logits, and summaries of predictive samples."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Link = Literal["softmax", "sigmoid", "identity"]
LINKS: tuple[Link, ...] = get_args(Link)


class Summary(NamedTuple):
    """A summary of samples of a distribution, (samples, …, classes). Entropies are in nats.

    Attributes:
        mean: (…, classes).
        spread: standard deviation (divided by the number of samples), (…, classes).
        entropy: of the mean, (…).
        expected_entropy: mean entropy of the samples, (…).
        mutual_information: entropy − expected_entropy, (…).
    """

    mean: Tensor
    spread: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor


def link_of(config: Any, classes: int) -> Link:
    """How a model with this config turns logits of this many classes into probabilities."""
    problem = getattr(config, "problem_type", None)
    if classes == 1 or problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" else "softmax"


def linked(logits: Tensor, link: Link) -> Tensor:
    """Probabilities over the last axis of logits; with "identity", the logits themselves."""
    if link == "identity":
        return logits
    return logits.sigmoid() if link == "sigmoid" else logits.softmax(dim=-1)


def entropy(distribution: Tensor, link: Link = "softmax") -> Tensor:
    """Entropy over the last axis, in nats, with 0·log 0 = 0; of sigmoids, the sum of each one's own."""
    each: Tensor = torch.special.entr(distribution)
    if link == "sigmoid":
        each = each + torch.special.entr(1.0 - distribution)
    return each.sum(dim=-1) + 0.0  # turns −0.0, the entropy of a certain class, into 0.0


def mutual_information(total: Tensor, expected: Tensor) -> Tensor:
    """Entropy of the mean minus mean entropy; negative values, which rounding may cause, become 0."""
    return (total - expected).clamp(min=0.0)


def summarize(samples: Tensor, link: Link = "softmax") -> Summary:
    """Mean, spread, entropies and mutual information of (samples, …, classes): softmaxes or sigmoids."""
    mean = samples.mean(dim=0)
    total, expected = entropy(mean, link), entropy(samples, link).mean(dim=0)
    spread = samples.std(dim=0, correction=0)
    return Summary(mean, spread, total, expected, mutual_information(total, expected))
