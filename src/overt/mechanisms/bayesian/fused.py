"""Bayesian Attention without a query × key tensor, on a GPU; `naive` and `closed` have the definitions.

One pass over scores makes outputs and the KL. The KL takes of a row's scores its log-sum-exp and a sum or two
with the prior's parameter, and that holds for any scores under padding and causal masks, evolved ones too.
"""

from __future__ import annotations

import json
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from overt.mechanisms._operator import Maybe, Operator, Tensors
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import KINDS

if TYPE_CHECKING:
    from overt.mechanisms._attend_triton import Draw, Prior
    from overt.mechanisms.bayesian._prior_triton import Network
    from overt.mechanisms.bayesian.layer import BayesianLayer
    from overt.mechanisms.chain import Chain
    from overt.mechanisms.site import Site

# Weights are formed relative to the row's largest score before noise; stronger noise would leave float16.
LEAST_K, MOST_SIGMA = 1.0, 1.5
MOST_MIDDLE = 32
_WORD = 2**32


def unfit(layer: BayesianLayer, device: torch.device) -> str | None:
    """Why a layer is not for the kernels on a device; None if it is."""
    config, prior = layer.config, layer.prior
    if prior is not None:
        if not type(prior.inner) is type(prior.outer) is nn.Linear or prior.inner.bias is None:
            return "the prior's network has been wrapped or replaced"
        if prior.inner.weight.device != device or prior.outer.weight.device != device:
            return f"the prior's weights lie on {prior.inner.weight.device}, queries on {device}"
    if config.family == "weibull" and config.k < LEAST_K:
        return f"kernels take k from {LEAST_K}, got {config.k}"
    if config.family == "lognormal" and config.sigma > MOST_SIGMA:
        return f"kernels take sigma up to {MOST_SIGMA}, got {config.sigma}"
    if config.prior == "contextual" and config.d_mid > MOST_MIDDLE:
        return f"kernels take d_mid up to {MOST_MIDDLE}, got {config.d_mid}"
    if config.prior == "contextual" and config.preset == "official" and config.prior_beta > 1.0:
        return f'kernels take prior_beta up to 1 with preset="official", got {config.prior_beta}'
    return None


class Noise(NamedTuple):
    """What is drawn at one attention call, and the noise's address; numbers may be tensors on the device.

    Attributes:
        draws: whether weights are drawn, or their mean is used.
        seed: of the noise.
        step: training step.
        layer: place in the chain.
        kind: of the chain, by its number.
        sample: which sample, one for all or (batch,).
        examples: global number of the first example, or of each, (batch,).
        first_row: absolute position of the first query row.
        dropout: probability of dropping a weight.
        drop_keys: int64 (2,), from torch's own generator; None without dropout.
    """

    draws: bool
    seed: int
    step: Tensor | int
    layer: int
    kind: int
    sample: Tensor | int
    examples: Tensor | int
    first_row: int
    dropout: float
    drop_keys: Tensor | None


def noise_of(
    layer: BayesianLayer | None,
    chain: Chain,
    site: Site,
    batch: int,
    device: torch.device,
    first_row: int,
    dropout: float,
) -> Noise:
    """The draw of one attention call: Bayesian's, where there is a layer that draws, and dropout's."""
    from overt.mechanisms.bayesian.layer import draws_sample

    draws = layer is not None and draws_sample(layer, chain)
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
            "a CUDA graph would replay this step's noise for ever: give Chain a step on the device, a tensor"
        )
    drop_keys = torch.randint(_WORD, (2,), device=device) if dropout > 0.0 else None
    step: Tensor | int = 0
    sample: Tensor | int = 0
    examples: Tensor | int = 0
    if addressed:
        step, sample = _there(chain.step, device), _there(chain.sample, device)
        examples = _there(chain.examples, device)
    kind = KINDS.index(site.kind)
    return Noise(
        draws, chain.seed_number, step, site.layer, kind, sample, examples, first_row, dropout, drop_keys
    )


def _capturing() -> bool:
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def _there(numbers: Tensor | None, device: torch.device) -> Tensor | int:
    """On the device, without a copy that would wait for it: one number of the host's stays a number."""
    if numbers is None:
        return 0
    if numbers.dim() == 0 and numbers.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(numbers)
    return numbers.to(device).contiguous()


@lru_cache(maxsize=64)
def config_of(settings: str) -> Bayesian:
    """Settings from the text that an operator takes them as."""
    return Bayesian(**json.loads(settings))


_DEFAULT = Bayesian()


def draw_of(config: Bayesian, noise: Noise) -> Draw:
    """What is drawn, as kernels take it."""
    from overt.mechanisms._attend_triton import LOGNORMAL, WEIBULL, Draw

    weibull = config.family == "weibull"
    family = 0 if not noise.draws else WEIBULL if weibull else LOGNORMAL
    return Draw(family, 1.0 / config.k if weibull else config.sigma, *noise[1:])


class Call(NamedTuple):
    """One attention call, flat, as an operator takes it; see `Seen` and `Noise` for most.

    `known` and `seers` are `Seen`'s; `pairs`, (batch,), are the visible cells of all heads that the KL is
    averaged over, where examples differ; otherwise `per_cell` is what it is multiplied by. Numbers of the
    noise's address come as tensors or as numbers.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inner: Tensor | None
    bias: Tensor | None
    outer: Tensor | None
    key_visible: Tensor | None
    query_real: Tensor | None
    known: Tensor | None
    seers: Tensor | None
    pairs: Tensor | None
    step: Tensor | None
    sample: Tensor | None
    examples: Tensor | None
    drop_keys: Tensor | None
    step_number: int
    sample_number: int
    first_example: int
    seed: int
    layer: int
    kind: int
    draws: bool
    first_row: int
    dropout: float
    scale: float
    causal: bool
    wants_kl: bool
    per_cell: float
    settings: str

    def seen(self) -> Seen:
        """Which cells are visible."""
        seen = Seen(self.key_visible, self.query_real, self.causal)
        seen.keep("seers", self.seers)
        return seen

    def draw(self) -> Draw:
        """What is drawn."""
        step = self.step_number if self.step is None else self.step
        sample = self.sample_number if self.sample is None else self.sample
        examples = self.first_example if self.examples is None else self.examples
        noise = Noise(
            self.draws, self.seed, step, self.layer, self.kind, sample, examples, self.first_row,
            self.dropout, self.drop_keys,
        )  # fmt: skip
        return draw_of(config_of(self.settings), noise)

    def network(self) -> Network | None:
        """The contextual prior's."""
        from overt.mechanisms.bayesian._prior_triton import Network

        if self.inner is None or self.bias is None or self.outer is None:
            return None
        return Network(self.inner, self.bias, self.outer)

    def prior(self) -> Prior:
        """What the KL takes, in the forward pass."""
        from overt.mechanisms import _attend_triton as kernels
        from overt.mechanisms.bayesian import _prior_triton as priors

        if not self.wants_kl:
            return kernels.NO_PRIOR
        config, key = config_of(self.settings), kernels.rows_whole(self.key)
        return priors.forward(key, self.network(), self.seen(), self.known, config, self.per_cell)

    def prior_again(self, keyed: Tensor) -> Prior:
        """The same in the backward pass, from what it kept."""
        from overt.mechanisms import _attend_triton as kernels
        from overt.mechanisms.bayesian import _prior_triton as priors

        if not self.wants_kl:
            return kernels.NO_PRIOR
        return priors.prior_of(config_of(self.settings), keyed, self.per_cell)

    def total(self, parts: Tensor) -> Tensor:
        """KL per example, (batch,), from sums over blocks of rows; empty where it is not wanted."""
        if not self.wants_kl:
            return parts.view(0)
        total = parts.sum(dim=(1, 2))
        return total if self.pairs is None else total / self.pairs.clamp(min=1.0)

    def to_total(self, to_kl: Tensor | None, rows: Tensor) -> Tensor | None:
        """Gradient of the KL before it is divided by pairs."""
        if not self.wants_kl:
            return None
        if to_kl is None:
            return rows.new_zeros(self.query.shape[0])
        return to_kl.contiguous() if self.pairs is None else to_kl / self.pairs.clamp(min=1.0)

    def to_network(self, prior: Prior, to_a: Tensor, to_kl: Tensor | None, to_key: Tensor) -> Maybe:
        """Gradients of the prior's network, that of keys being added to `to_key`."""
        from overt.mechanisms import _attend_triton as kernels
        from overt.mechanisms.bayesian import _prior_triton as priors

        network = self.network()
        if network is None or to_kl is None:
            return None, None, None
        return priors.backward(
            kernels.rows_whole(self.key), network, self.seen(), self.known, config_of(self.settings),
            self.query.shape[2], self.query.shape[1], prior, to_a, to_kl, to_key,
        )  # fmt: skip

    def empty_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """KL, `Attended.rows` and `Prior.keyed`, empty, for compilers."""
        from overt.mechanisms.bayesian._prior_triton import keyed_size

        query, wanted = self.query, self.wants_kl
        batch, heads, queries, _ = query.shape
        size = keyed_size(batch, self.key.shape[1], self.key.shape[2], self.causal) if wanted else 0
        return (
            query.new_empty(batch if wanted else 0, dtype=torch.float32),
            query.new_empty(3 if wanted else 1, batch, heads, queries, dtype=torch.float32),
            query.new_empty(size, dtype=torch.float32),
        )

    def empty_gradients(self) -> Tensors:
        """Of the first six tensors, for compilers."""
        network = [
            self.query.new_empty(0) if x is None or not self.wants_kl else x.new_empty(x.shape)
            for x in (self.inner, self.bias, self.outer)
        ]
        return *(empty_heads_last(x) for x in (self.query, self.key, self.value)), *network


def empty_heads_last(x: Tensor) -> Tensor:
    """An empty tensor of the shape of x, (batch, heads, length, width), with heads beside width in memory."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _forward(call: Call) -> Tensors:
    """Output, KL (batch,), and what the backward pass needs: `Attended.rows` and `Prior.keyed`."""
    from overt.mechanisms import _attend_triton as kernels

    prior = call.prior()
    done = kernels.forward(
        call.query, call.key, call.value, None, call.seen(), call.draw(), prior, call.scale
    )
    keyed = done.kl.new_empty(0) if prior.keyed is None else prior.keyed
    return done.out, call.total(done.kl), done.rows, keyed


def _backward(call: Call, results: Tensors, gradients: Maybe, wanted: tuple[bool, ...]) -> Maybe:
    from overt.mechanisms import _attend_triton as kernels

    del wanted
    (out, _, rows, keyed), (to_out, to_kl) = results, gradients
    to_out = torch.zeros_like(out) if to_out is None else to_out
    prior, to_kl = call.prior_again(keyed), call.to_total(to_kl, rows)
    to_query, to_key, to_value, to_a = kernels.backward(
        call.query,
        call.key,
        call.value,
        call.seen(),
        call.draw(),
        prior,
        call.scale,
        out,
        rows,
        to_out,
        to_kl,
    )
    return to_query, to_key, to_value, *call.to_network(prior, to_a, to_kl, to_key)


bayesian = Operator(
    "bayesian",
    Call,
    _forward,
    _backward,
    lambda call: (empty_heads_last(call.query), *call.empty_rows()),
    lambda call, _: call.empty_gradients(),
    trained=6,
    results=4,
    differentiable=2,
)


def call_of(
    layer: BayesianLayer | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Seen,
    noise: Noise,
    wants_kl: bool,
) -> Call:
    """One attention call, for an operator."""
    config = _DEFAULT if layer is None else layer.config
    (heads, queries), keys = query.shape[1:3], key.shape[2]
    inner = bias = outer = known = seers = pairs = None
    per_cell = 1.0
    if wants_kl:
        known, seers = seen.known(queries, keys), seen.seers(queries, keys)
        if config.kl_reduction == "mean":
            counted = seen.pairs(queries, keys)
            if isinstance(counted, float):
                per_cell = 1.0 / (counted * heads)
            else:
                pairs = counted * heads
        if layer is not None and layer.prior is not None:
            network = layer.prior.inner.weight, layer.prior.inner.bias, layer.prior.outer.weight
            inner, bias, outer = (x if x.is_contiguous() else x.contiguous() for x in network)
    step, step_number = (noise.step, 0) if isinstance(noise.step, Tensor) else (None, noise.step)
    sample, sample_number = (noise.sample, 0) if isinstance(noise.sample, Tensor) else (None, noise.sample)
    examples, first = (noise.examples, 0) if isinstance(noise.examples, Tensor) else (None, noise.examples)
    return Call(
        query, key, value, inner, bias, outer, seen.key_visible, seen.query_real, known, seers, pairs,
        step, sample, examples, noise.drop_keys, step_number, sample_number, first,
        noise.seed, noise.layer, noise.kind, noise.draws, noise.first_row, noise.dropout,
        scale, seen.causal, wants_kl, per_cell, config.settings,
    )  # fmt: skip


def attended(
    layer: BayesianLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Seen,
    chain: Chain,
    site: Site,
    first_row: int,
    dropout: float,
) -> Tensor:
    """Output (batch, heads, query, dim) of Bayesian Attention over plain products; the chain gets its KL."""
    from overt.mechanisms.bayesian.layer import wants_kl

    noise = noise_of(layer, chain, site, query.shape[0], query.device, first_row, dropout)
    wanted = wants_kl(layer, layer.config, chain)
    out, kl, *_ = bayesian(call_of(layer, query, key, value, scale, seen, noise, wanted))
    if wanted:
        chain.record_kl(site, kl, layer.config)
    return out


@torch.no_grad()
def draw(
    layer: BayesianLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Seen,
    chain: Chain,
    site: Site,
    samples: int,
    first_row: int = 0,
) -> Tensor:
    """Outputs of samples 0 … samples − 1, (samples, batch, heads, query, dim), without gradient.

    Each tile of keys and values is read once for all samples.
    """
    from overt.mechanisms import _attend_triton as kernels

    numbered = copy(chain)
    numbered.sample = torch.zeros((), dtype=torch.int64)
    noise = noise_of(layer, numbered, site, query.shape[0], query.device, first_row, 0.0)
    drawn = draw_of(layer.config, noise._replace(draws=True))
    out = kernels.forward(query, key, value, None, seen, drawn, scale=scale, samples=samples).out
    return out if samples > 1 else out.unsqueeze(0)
