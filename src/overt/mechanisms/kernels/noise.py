"""The noise in kernels: the words of a tile of cells, their address, and what they add to scores.

The words are those of the package `overt.mechanisms.noise`, bit for bit. A counter yields the words of four
neighbouring columns, so the words of a tile are four tiles of a quarter of its columns. They are joined in
one of two ways:

- column by column (`in_order=True`), in the order of the tile's columns in memory;
- side by side (`in_order=False`), for a tile whose columns are taken in the order of `column_order`. Each
  thread's four words are then where the tensor cores put its scores, and nothing moves between threads.
"""

from __future__ import annotations

import math

import triton.language as tl
from triton.language.extra import libdevice

from overt.mechanisms import flat
from overt.mechanisms.kernels.launch import helper
from overt.mechanisms.kernels.philox import words

# Families of the noise and of the KL, and where a number of the noise's address comes from.
NO_NOISE, NO_KL = tl.constexpr(flat.NO_NOISE), tl.constexpr(flat.NO_KL)
WEIBULL, LOGNORMAL = tl.constexpr(flat.WEIBULL), tl.constexpr(flat.LOGNORMAL)
A_NUMBER, ONE_TENSOR = tl.constexpr(flat.A_NUMBER), tl.constexpr(flat.ONE_TENSOR)
ONE_PER_EXAMPLE = tl.constexpr(flat.ONE_PER_EXAMPLE)
# The parameters from `flat.Noise.loose` change from call to call: compiled code must not depend on them.
LOOSE = ["seed_low", "seed_high", "step_number", "sample_number", "layer", "kind", "first_example"]

LOG2E, LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2.0))
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@helper
def column_order(columns, BLOCK_K: tl.constexpr, DRAWS: tl.constexpr):
    """The order in which a tile takes its columns 0 … BLOCK_K − 1: for words side by side, or unchanged."""
    BLOCK_WORDS: tl.constexpr = BLOCK_K // 4
    if DRAWS:
        order = 4 * (columns % BLOCK_WORDS) + columns // BLOCK_WORDS
    else:
        order = columns
    return order


@helper
def word_tile(
    k0, k1, c0, c1, c2, c3,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """One word for each cell of a tile (ROWS, COLUMNS).

    Args:
        k0: first word of the key; one for all, or (rows, 1).
        k1: second word of the key.
        c0: column div 4, (1, columns / 4).
        c1: absolute row, (rows, 1).
        c2: head.
        c3: number of the example.
        ROWS: of the tile.
        COLUMNS: of the tile.
        IN_ORDER: whether the tile's columns are consecutive rather than in `column_order`.
    """
    w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)  # four times (rows, columns / 4)
    pairs = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # (rows, columns / 4, 2, 2)
    if IN_ORDER:
        # column 4 c + w is column c of the w-th words
        tile = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, COLUMNS))
    else:
        # column w · (columns / 4) + c is column c of the w-th words
        tile = tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (ROWS, COLUMNS))
    return tile


@helper
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@helper
def log_noise(word, factor, FAMILY: tl.constexpr, FAST: tl.constexpr):
    """What sampling adds to scores in units of log 2, up to a constant that the softmax cancels.

    Args:
        word: uint32, of any shape.
        factor: the first of `flat.Noise.factors`.
        FAMILY: WEIBULL or LOGNORMAL.
        FAST: whether the hardware's logarithms may be used.
    """
    # 1 − u for `noise.open_unit`'s u, exactly: the complement's bits as a number in [1, 2), minus 1 − 2⁻²⁴.
    rest = ((word >> 9) ^ 0x3FFFFFFF).to(tl.float32, bitcast=True) - _BELOW_ONE
    if FAMILY == WEIBULL:
        if FAST:
            # The fast logarithm's absolute error is as large as the smallest u; −log(1 − u) is above u.
            bound = LOG2E - rest * LOG2E
            return libdevice.fast_log2f(tl.maximum(-libdevice.fast_log2f(rest), bound)) * factor
        else:
            return tl.log2(-tl.log2(rest)) * factor
    else:
        unit = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - _BELOW_ONE
        # erfinv(2u − 1) by Giles' two polynomials (2012) in w = −log(4u(1 − u)); `factor` has the rest.
        w = -_log2(4.0 * unit * rest, FAST) * LN2
        near_zero = w - 2.5
        near = 2.81022636e-08 * near_zero + 3.43273939e-07
        near = near * near_zero - 3.5233877e-06
        near = near * near_zero - 4.39150654e-06
        near = near * near_zero + 0.00021858087
        near = near * near_zero - 0.00125372503
        near = near * near_zero - 0.00417768164
        near = near * near_zero + 0.246640727
        near = near * near_zero + 1.50140941
        far_from_zero = tl.sqrt(tl.maximum(w, 5.0)) - 3.0
        far = -0.000200214257 * far_from_zero + 0.000100950558
        far = far * far_from_zero + 0.00134934322
        far = far * far_from_zero - 0.00367342844
        far = far * far_from_zero + 0.00573950773
        far = far * far_from_zero - 0.0076224613
        far = far * far_from_zero + 0.00943887047
        far = far * far_from_zero + 1.00167406
        far = far * far_from_zero + 2.83297682
        return tl.where(w < 5.0, near, far) * (unit - rest) * factor


@helper
def stream_key(
    step, sample, seed_low, seed_high, step_number, sample_number, layer, kind, example, place,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """`noise.stream`: the key of one call's noise, two words.

    Args:
        step: pointer, where STEP is ONE_TENSOR; otherwise `step_number` is used.
        sample: pointer, where SAMPLE is ONE_TENSOR or ONE_PER_EXAMPLE; otherwise `sample_number` is used.
        seed_low: low half of the seed.
        seed_high: its high half.
        step_number: training step.
        sample_number: which sample.
        layer: place in the chain.
        kind: of the chain, by its number.
        example: place in the batch.
        place: (rows,), row × sample, where SAMPLES is more than 1; unused otherwise.
        STEP: where the step comes from.
        SAMPLE: where the sample comes from.
        SAMPLES: number of samples of a tile's rows, numbered from 0; if more than 1, the key is (rows, 1).
    """
    c0 = step_number.to(tl.uint32)
    if STEP == ONE_TENSOR:
        c0 = tl.load(step).to(tl.uint32)
    if SAMPLES > 1:
        c2 = (place % SAMPLES).to(tl.uint32)[:, None]
    elif SAMPLE == ONE_PER_EXAMPLE:
        c2 = tl.load(sample + example).to(tl.uint32)
    elif SAMPLE == ONE_TENSOR:
        c2 = tl.load(sample).to(tl.uint32)
    else:
        c2 = sample_number.to(tl.uint32)
    k0, k1, _, _ = words(
        seed_low.to(tl.uint32), seed_high.to(tl.uint32), c0, layer.to(tl.uint32), c2, kind.to(tl.uint32)
    )
    return k0, k1


@helper
def example_number(examples, first_example, example, EXAMPLES: tl.constexpr):
    """Global number of an example, from its place in the batch; EXAMPLES is where the numbers come from."""
    if EXAMPLES == ONE_PER_EXAMPLE:
        return tl.load(examples + example).to(tl.uint32)
    elif EXAMPLES == ONE_TENSOR:
        return (tl.load(examples) + example).to(tl.uint32)
    else:
        return (first_example + example).to(tl.uint32)
