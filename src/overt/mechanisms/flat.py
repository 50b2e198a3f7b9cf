"""One attention call, flat: the groups of tensors and numbers that operators and kernels take.

`torch.library` takes no objects. An operator takes some of these groups one after the other, and a group has
the same fields wherever it goes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

# Families of the noise, and of the KL; kernels have them as constants.
NO_NOISE, WEIBULL, LOGNORMAL = 0, 1, 2


def signed(word: int) -> int:
    """The low 32 bits of a number as a 32-bit integer, so that its type is always the same."""
    return (word + 2**31) % 2**32 - 2**31


class Inputs(NamedTuple):
    """What attends.

    Attributes:
        query: (batch, heads, query, dim).
        key: (batch, key heads, key, dim).
        value: like `key`.
        scale: of the products.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


class Masks(NamedTuple):
    """Which cells are visible; `Seen`, with what the KL asks of it.

    Attributes:
        key_visible: boolean (batch, key); None where every key may be seen.
        query_real: boolean (batch, query), False at padding; None where every query is real.
        known: keys that some query sees, boolean (batch, key); None for all.
        seers: how many real queries see each key that is shown, float32 (batch, key); None where all are real.
        causal: query i sees key j only for j ≤ i + keys − queries.
    """

    key_visible: Tensor | None = None
    query_real: Tensor | None = None
    known: Tensor | None = None
    seers: Tensor | None = None
    causal: bool = False


class Noise(NamedTuple):
    """What is drawn, and at which address. Of an address, tensors on the device take the place of numbers.

    Attributes:
        step: int64 scalar, or None for `step_number`.
        sample: int64 scalar or (batch,), or None for `sample_number`.
        examples: int64, global numbers (batch,) or the first of them; None for `first_example`.
        drop_keys: int64 (2,), the key of dropout's words; None without dropout.
        step_number: training step.
        sample_number: which sample.
        first_example: global number of the first example.
        seed: of the noise.
        layer: place in the chain.
        kind: of the chain, by its number.
        family: NO_NOISE for the mean of the weights, WEIBULL or LOGNORMAL for a draw.
        number: 1/k of WEIBULL, σ of LOGNORMAL.
        first_row: absolute position of the first query row.
        dropout: probability of dropping a weight.
    """

    step: Tensor | None = None
    sample: Tensor | None = None
    examples: Tensor | None = None
    drop_keys: Tensor | None = None
    step_number: int = 0
    sample_number: int = 0
    first_example: int = 0
    seed: int = 0
    layer: int = 0
    kind: int = 0
    family: int = NO_NOISE
    number: float = 1.0
    first_row: int = 0
    dropout: float = 0.0

    def factors(self) -> tuple[float, float]:
        """Factor of the noise in units of log 2, and what kept weights gain."""
        lognormal = self.number * math.sqrt(2.0) * math.log2(math.e)
        return self.number if self.family == WEIBULL else lognormal, 1.0 / (1.0 - self.dropout)

    def loose(self) -> tuple[int, ...]:
        """The numbers that change from call to call, as 32-bit integers."""
        return (
            signed(self.seed),
            signed(self.seed >> 32),
            signed(self.step_number),
            signed(self.sample_number),
            self.layer,
            self.kind,
            signed(self.first_example),
        )


class Divergence(NamedTuple):
    """The KL, and the prior that it is taken to.

    Attributes:
        inner: (middle, dim), of the contextual prior's network; None without one.
        bias: (middle,), of the same.
        outer: (1, middle), of the same.
        pairs: float32 (batch,), the visible cells of all heads that the KL is averaged over, where examples
            differ; None otherwise.
        per_cell: what the KL is multiplied by.
        family: NO_NOISE for no KL, WEIBULL or LOGNORMAL.
        scores: whether the posterior's mean is of raw scores, without the log-sum-exp.
        official: whether the prior's parameter is as in the released code.
        fixed: parameter of a fixed prior, log α or the Lognormal mean.
        slope: what α is multiplied by beside −log mean, of WEIBULL.
        base: what every visible cell has.
        shift: added to the contextual parameter: log β of the released code, σ²/2 of LOGNORMAL.
        seeing: what each row that sees a key has: the Gamma prior's rate.
        precision: 1/σ₁², of the Lognormal prior.
    """

    inner: Tensor | None = None
    bias: Tensor | None = None
    outer: Tensor | None = None
    pairs: Tensor | None = None
    per_cell: float = 1.0
    family: int = NO_NOISE
    scores: bool = False
    official: bool = False
    fixed: float = 0.0
    slope: float = 0.0
    base: float = 0.0
    shift: float = 0.0
    seeing: float = 0.0
    precision: float = 0.0
