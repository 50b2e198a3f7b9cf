"""The parts of a loss: the task's loss, and the KL with its weight."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Losses(NamedTuple):
    """The parts of one forward pass's loss, detached: the optimizer minimises task + weight·kl.

    Attributes:
        task: the loss without the KL; None where the model computed none.
        kl: unweighted, summed over layers, with examples weighted as in the loss; None where it was not
            computed: in evaluation outside `overt.with_kl`, and where nothing adds to the loss.
        weight: factor of the KL, kl_weight·λ(t); None without a KL.
        items: number of labels, or examples, that the means are taken over.
    """

    task: Tensor | None
    kl: Tensor | None
    weight: Tensor | float | None
    items: Tensor | int | None
