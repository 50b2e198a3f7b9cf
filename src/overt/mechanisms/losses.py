"""What a loss is made of: the task's part, and the KL with its weight."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Losses(NamedTuple):
    """The parts of one forward pass's loss, cut off from its graph: task + weight·kl joins the optimizer.

    Attributes:
        task: the loss without the KL; None where the model made none.
        kl: unweighted, the sum over layers, examples weighing as they do in the loss; None where it was not
            computed: in evaluation, unless asked for by `overt.with_kl`, and where nothing adds to the loss.
        weight: what the KL is multiplied by, kl_weight·λ(t); None without a KL.
        items: number of labels, or examples, that the means are over.
    """

    task: Tensor | None
    kl: Tensor | None
    weight: Tensor | float | None
    items: Tensor | int | None
