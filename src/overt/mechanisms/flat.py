"""One attention call, flat: the groups of tensors and numbers that operators and kernels take.

`torch.library` takes no objects. An operator takes some of these groups one after the other, and a group has
the same fields wherever it is passed. Only this module makes them from an `AttentionCall` (`flat_of`), and
only it defines the shapes of what kernels return. Nothing here needs a GPU or its compiler.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import KINDS, Site

# Families of the noise and of the KL. Kernels have these constants too, and those below.
NO_NOISE, WEIBULL, LOGNORMAL = 0, 1, 2
NO_KL = NO_NOISE
# Where a number of the noise's address comes from: the host, one tensor, or a tensor with one per example.
A_NUMBER, ONE_TENSOR, ONE_PER_EXAMPLE = 0, 1, 2
# What a pass does for padded queries: it writes zeros; attends plainly, without noise and KL; or attends
# plainly for them and leaves the results of all other queries as they are.
ZEROS, PLAINLY, NOTHING_ELSE = 0, 1, 2
_WORD = 2**32


def signed(word: int) -> int:
    """The low 32 bits of a number as a signed 32-bit integer, so that its type is always the same."""
    return (word + 2**31) % 2**32 - 2**31


class Inputs(NamedTuple):
    """The tensors of an attention.

    Attributes:
        query: (batch, heads, query, dim).
        key: (batch, key heads, key, dim).
        value: like `key`.
        scale: of the products.
        prior_key: (batch, key heads, key, prior dim), the keys that the prior reads; None for `key`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    prior_key: Tensor | None = None

    @property
    def keys_of_prior(self) -> Tensor:
        """(batch, key heads, key, prior dim), the keys that the prior reads."""
        return self.key if self.prior_key is None else self.prior_key


class Masks(NamedTuple):
    """Which cells are visible: `Seen`, with the counts that the KL needs.

    Attributes:
        key_visible: boolean or uint8 (batch, key); None where every key may be seen.
        query_real: boolean or uint8 (batch, query), 0 at padding; None where every query is real.
        known: keys that some query sees, boolean (batch, key); None for all.
        seers: how many real queries see each visible key, float32 (batch, key); None where all are real.
        causal: query i sees key j only for j ≤ i + keys − queries.
        left: whether padded queries get plain attention's output rather than zeros.
    """

    key_visible: Tensor | None = None
    query_real: Tensor | None = None
    known: Tensor | None = None
    seers: Tensor | None = None
    causal: bool = False
    left: bool = False


Visibility = Seen | Masks  # both have `key_visible`, `query_real` and `causal`


class Noise(NamedTuple):
    """What is drawn, and at which address. In an address, a tensor on the device overrides the number.

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
        """Factor of the noise in units of log 2, and the factor of the weights that dropout keeps."""
        return _factors(self.family, self.number, self.dropout)

    def loose(self) -> tuple[int, ...]:
        """The numbers that change from call to call, as 32-bit integers."""
        return _loose(
            self.seed, self.step_number, self.sample_number, self.layer, self.kind, self.first_example
        )

    def sources(self) -> tuple[int, int, int]:
        """Where step, sample and example numbers come from: A_NUMBER, ONE_TENSOR or ONE_PER_EXAMPLE."""
        return _source(self.step), _source(self.sample), _source(self.examples)


# Every launch of a call asks for these, and so do all layers.


@lru_cache(1024)
def _factors(family: int, number: float, dropout: float) -> tuple[float, float]:
    lognormal = number * math.sqrt(2.0) * math.log2(math.e)
    return number if family == WEIBULL else lognormal, 1.0 / (1.0 - dropout)


@lru_cache(1024)
def _loose(seed: int, step: int, sample: int, layer: int, kind: int, first_example: int) -> tuple[int, ...]:
    first, second = signed(seed), signed(seed >> 32)
    return first, second, signed(step), signed(sample), layer, kind, signed(first_example)


def _source(numbers: Tensor | None) -> int:
    if numbers is None:
        return A_NUMBER
    return ONE_PER_EXAMPLE if numbers.dim() > 0 else ONE_TENSOR


class Divergence(NamedTuple):
    """The KL, and its prior.

    Attributes:
        inner: (middle, dim), of the contextual prior's network; None without one.
        bias: (middle,), of the same.
        outer: (1, middle), of the same.
        pairs: float32 (batch,), the visible cells of all heads that the KL is averaged over, where examples
            differ; None otherwise.
        per_cell: factor of the KL.
        family: NO_KL, WEIBULL or LOGNORMAL.
        scores: whether the posterior's mean is taken from raw scores, without the log-sum-exp.
        official: whether the prior's parameter is as in the released code.
        fixed: parameter of a fixed prior, log α or the Lognormal mean.
        slope: factor of α, in addition to −log mean; WEIBULL only.
        base: constant term of every visible cell.
        shift: added to the contextual parameter: log β of the released code, σ²/2 of LOGNORMAL.
        seeing: constant term of each row that sees a key: the Gamma prior's rate.
        precision: 1/σ₁², of the Lognormal prior.
    """

    inner: Tensor | None = None
    bias: Tensor | None = None
    outer: Tensor | None = None
    pairs: Tensor | None = None
    per_cell: float = 1.0
    family: int = NO_KL
    scores: bool = False
    official: bool = False
    fixed: float = 0.0
    slope: float = 0.0
    base: float = 0.0
    shift: float = 0.0
    seeing: float = 0.0
    precision: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether there is a KL to compute."""
        return self.family != NO_KL

    def total(self, parts: Tensor) -> Tensor:
        """KL per example, (batch,), from sums over blocks of rows; empty without a KL."""
        if not self.wanted:
            return parts.view(0)
        total = parts.sum(dim=(1, 2))
        return total if self.pairs is None else total / self.pairs.clamp(min=1.0)

    def to_total(self, to_kl: Tensor | None, rows: Tensor) -> Tensor | None:
        """Gradient of the KL before it is divided by pairs, (batch,); `rows` are `Attended.rows`."""
        if not self.wanted:
            return None
        if to_kl is None:
            return rows.new_zeros(rows.shape[1])
        return to_kl.contiguous() if self.pairs is None else to_kl / self.pairs.clamp(min=1.0)


Flat = tuple[Inputs, Masks, Noise, Divergence]


class Drawing(NamedTuple):
    """What a layer with random weights needs from one pass, as numbers.

    Attributes:
        family: NO_NOISE for the mean of the weights, WEIBULL or LOGNORMAL for a draw.
        number: 1/k of WEIBULL, σ of LOGNORMAL.
        divergence: the KL's numbers and the prior's network; NO_KL without a KL.
        averaged: whether the KL is averaged over visible cells and heads.
    """

    family: int = NO_NOISE
    number: float = 1.0
    divergence: Divergence = Divergence()
    averaged: bool = False


class Drawer(Protocol):
    """A layer with random weights, as forms of other mechanisms see it."""

    def drawing(self, chain: Chain) -> Drawing:
        """What it needs from a pass."""

    def leave_kl(self, chain: Chain, site: Site, kl: Tensor) -> None:
        """Add its KL per example, (batch,), to the chain."""


def flat_of(call: AttentionCall, drawing: Drawing, chain: Chain) -> Flat:
    """One attention call as operators take it.

    Args:
        call: the attention call, of plain products under padding and causality.
        drawing: what the layer with random weights needs, if there is one.
        chain: addresses the noise.
    """
    divergence = _divergence_of(call, drawing)
    _, _, queries, keys = call.shape
    seen, known, seers = call.seen, None, None
    if divergence.wanted:
        known, seers = seen.known(queries, keys), seen.seers(queries, keys)
    left = call.left_alone is not None and seen.query_real is not None
    return (
        Inputs(
            call.query, call.key, call.value, call.scale, None if divergence.inner is None else call.prior_key
        ),
        Masks(*seen.as_bytes(), known, seers, seen.causal, left),
        _noise_of(call, drawing, chain),
        divergence,
    )


def _divergence_of(call: AttentionCall, drawing: Drawing) -> Divergence:
    """The KL of one call, with the number of cells that it is averaged over."""
    divergence = drawing.divergence
    if not divergence.wanted or not drawing.averaged:
        return divergence
    _, heads, queries, keys = call.shape
    pairs = call.seen.pairs(queries, keys)
    if isinstance(pairs, float):
        return divergence._replace(per_cell=1.0 / (pairs * heads))
    return divergence._replace(pairs=pairs * heads)


def _noise_of(call: AttentionCall, drawing: Drawing, chain: Chain) -> Noise:
    """The noise of one call: the layer's, if it draws, and dropout's."""
    site, batch, device, dropout = call.site, call.query.shape[0], call.query.device, call.dropout
    draws = drawing.family != NO_NOISE
    if draws and chain.step is None:
        raise ValueError("random weights need an address for their noise: pass chain=Chain(step=t)")
    addressed = draws or dropout > 0.0
    for name, numbers in (("sample", chain.sample), ("examples", chain.examples)):
        if addressed and numbers is not None and numbers.dim() > 0 and numbers.shape != (batch,):
            raise ValueError(
                f"{name} must be one number or one for each of the batch's {batch} examples, "
                f"got {tuple(numbers.shape)}"
            )
    on_host = draws and chain.step is not None and not chain.step.is_cuda
    if on_host and device.type == "cuda" and _capturing():
        raise RuntimeError(
            "a CUDA graph would replay this step's noise forever: pass Chain a step tensor on the device"
        )
    drop_keys = torch.randint(_WORD, (2,), device=device) if dropout > 0.0 else None
    address = (chain.step, chain.sample, chain.examples) if addressed else (None, None, None)
    step, sample, examples = (_on_device(numbers, device) for numbers in address)
    return Noise(
        step if isinstance(step, Tensor) else None,
        sample if isinstance(sample, Tensor) else None,
        examples if isinstance(examples, Tensor) else None,
        drop_keys,
        0 if isinstance(step, Tensor) else step,
        0 if isinstance(sample, Tensor) else sample,
        0 if isinstance(examples, Tensor) else examples,
        chain.seed_number,
        site.layer,
        KINDS.index(site.kind),
        drawing.family,
        drawing.number,
        call.first_row,
        dropout,
    )


def _capturing() -> bool:
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def _on_device(numbers: Tensor | None, device: torch.device) -> Tensor | int:
    """Move numbers to the device, but return a single number on the host as an int: no blocking copy."""
    if numbers is None:
        return 0
    if numbers.dim() == 0 and numbers.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(numbers)
    return numbers.to(device).contiguous()


# Empty results of kernels, for compilers --------------------------------------------------------------------


def keyed_size(batch: int, key_heads: int, keys: int, causal: bool) -> int:
    """How many numbers `kernels.prior` computes from the keys."""
    maps = batch * key_heads
    return 2 * maps * keys + maps + 2 * maps * (keys if causal else 1)


def empty_heads_last(x: Tensor) -> Tensor:
    """An empty tensor shaped like x, (batch, heads, length, width), with heads next to width in memory."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def empty_rows(inputs: Inputs, masks: Masks, divergence: Divergence) -> tuple[Tensor, Tensor, Tensor]:
    """KL per example, `Attended.rows`, and what `kernels.prior` computes from the keys."""
    query, with_kl = inputs.query, divergence.wanted
    batch, heads, queries, _ = query.shape
    _, key_heads, keys, _ = inputs.key.shape
    size = keyed_size(batch, key_heads, keys, masks.causal) if with_kl else 0
    return (
        query.new_empty(batch if with_kl else 0, dtype=torch.float32),
        query.new_empty(3 if with_kl else 1, batch, heads, queries, dtype=torch.float32),
        query.new_empty(size, dtype=torch.float32),
    )


def empty_gradients(inputs: Inputs, divergence: Divergence) -> dict[str, Tensor]:
    """Gradients of query, key and value, and of the prior's keys and network where there is a KL."""
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "prior_key": inputs.prior_key}
    gradients = {name: empty_heads_last(x) for name, x in tensors.items() if x is not None}
    if divergence.wanted:
        network = {"inner": divergence.inner, "bias": divergence.bias, "outer": divergence.outer}
        gradients |= {name: x.new_empty(x.shape) for name, x in network.items() if x is not None}
    return gradients
