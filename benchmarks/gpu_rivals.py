"""Bayesian and Evolving Attention as one would write them without overt: the baselines of `gpu.py`.

They draw from the same distributions as overt's defaults (Weibull, k = 10, contextual prior, KL averaged over
visible cells), but not the same numbers. Queries, keys and values are (batch, heads, length, width); `real`
is boolean, (batch, length), False at padding; `spread`, a tensor with one number, is 1/k of the Weibull noise
or σ of the Lognormal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

K, RATE = 10.0, 1e-2  # of the Weibull distribution and its Gamma prior
SIGMA, PRIOR_SIGMA = 0.1, 1e3  # of the Lognormal distribution and its prior
ALPHA = BETA = 0.1  # of Evolving
EULER = 0.5772156649015329
SLOPE = EULER / K - math.log(RATE) + math.lgamma(1.0 + 1.0 / K)
BASE = math.log(K) - EULER - 1.0
LOGNORMAL_BASE = math.log(PRIOR_SIGMA / SIGMA) + 0.5 * (SIGMA / PRIOR_SIGMA) ** 2 - 0.5
HIDDEN = float("-inf")
Way = Literal["narrow", "wide", "keys"]
WAYS: tuple[Way, ...] = ("narrow", "wide", "keys")  # of `plain_lse`, the cheapest first


class Prior(NamedTuple):
    """Linear → ReLU → Linear, shared by all heads: first weight and bias, second weight."""

    inner: Tensor
    bias: Tensor
    outer: Tensor


# --- The ten lines: dense maps ---


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * float(q.shape[-1] ** -0.5)


def log_prior(prior: Prior, key: Tensor, real: Tensor | None) -> Tensor:
    """log Ψ, the softmax over keys of the prior's network, (batch, heads, key)."""
    hidden = F.relu(F.linear(key.to(prior.inner.dtype), prior.inner, prior.bias))
    scores = F.linear(hidden, prior.outer).squeeze(-1)
    if real is not None:
        scores = scores.masked_fill(~real[:, None], HIDDEN)
    return torch.log_softmax(scores, dim=-1)


def drawn(scores: Tensor, v: Tensor, spread: Tensor, family: str = "weibull") -> Tensor:
    """Random weights times values; normalised Weibull draws are softmax(Φ + log(−log(1−ε))/k)."""
    noise = (
        torch.log(-torch.log1p(-torch.rand_like(scores))) if family == "weibull" else torch.randn_like(scores)
    )
    return torch.softmax(scores + noise * spread, dim=-1).to(v.dtype) @ v


def per_key(log_psi: Tensor, real: Tensor | None) -> Tensor:
    """The terms of the Weibull family's KL that depend only on keys, (batch, heads, key), zero at padding."""
    psi = log_psi.exp()
    terms = psi * SLOPE + torch.lgamma(1.0 + psi) - log_psi + BASE
    return terms if real is None else terms.masked_fill(~real[:, None], 0.0)


def dense_kl(scores: Tensor, log_psi: Tensor, real: Tensor | None, family: str = "weibull") -> Tensor:
    """KL per example, (batch,), cell by cell; `scores` are −inf at padded keys."""
    log_p, psi = torch.log_softmax(scores, dim=-1), log_psi.exp().unsqueeze(-2)
    if real is not None:
        log_p = log_p.masked_fill(~real[:, None, None], 0.0)
    if family == "weibull":
        cells = RATE * log_p.exp() - psi * log_p
        keys = per_key(log_psi, real)
    else:
        cells = 0.5 * ((log_p - SIGMA**2 / 2.0 - psi) / PRIOR_SIGMA).square() + LOGNORMAL_BASE
        keys = torch.zeros_like(log_psi)
    if real is None:
        return cells.mean(dim=(1, 2, 3)) + keys.mean(dim=(1, 2))
    heads, length = scores.shape[1], real.sum(dim=1)
    cells = cells.masked_fill(~(real[:, None, :, None] & real[:, None, None]), 0.0)
    return (cells.sum(dim=(1, 2, 3)) / length + keys.sum(dim=(1, 2))) / (length * heads)


def bayesian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spread: Tensor,
    prior: Prior | None = None,
    real: Tensor | None = None,
    family: str = "weibull",
) -> tuple[Tensor, ...]:
    """Output, and with a prior the KL per example."""
    scores = scores_of(q, k).float()
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], HIDDEN)
    out = drawn(scores, v, spread, family)
    return (out,) if prior is None else (out, dense_kl(scores, log_prior(prior, k, real), real, family))


def evolved(
    q: Tensor, k: Tensor, previous: Tensor | None, weight: Tensor, bias: Tensor, real: Tensor | None
) -> Tensor:
    """The evolved map; hidden cells are arbitrary, and are set to zero before the convolution."""
    scores = scores_of(q, k)
    if previous is None:
        return scores
    mixed = ALPHA * previous + (1.0 - ALPHA) * scores
    if real is not None:
        mixed = mixed.masked_fill(~(real[:, None, :, None] & real[:, None, None]), 0.0)
    image = F.conv2d(mixed, weight.to(mixed.dtype), bias.to(mixed.dtype), padding=weight.shape[-1] // 2)
    return BETA * F.relu(image) + (1.0 - BETA) * mixed


def shown(logits: Tensor, real: Tensor | None) -> Tensor:
    """Logits in float32, with padded keys hidden."""
    return logits.float() if real is None else logits.float().masked_fill(~real[:, None, None], HIDDEN)


def evolving(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    previous: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    real: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Output and evolved map."""
    logits = evolved(q, k, previous, weight, bias, real)
    seen = shown(logits, real)
    return torch.softmax(seen, dim=-1).to(v.dtype) @ v, logits


def both(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    previous: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    spread: Tensor,
    prior: Prior,
    real: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Output, evolved map, and the KL per example: random weights around an evolved map."""
    logits = evolved(q, k, previous, weight, bias, real)
    seen = shown(logits, real)
    return drawn(seen, v, spread), logits, dense_kl(seen, log_prior(prior, k, real), real)


# --- Without dense scores: the KL from rows' log-sum-exp, noise as a mask or in a score_mod ---


def closed_kl(q: Tensor, k: Tensor, lse: Tensor, prior: Prior, real: Tensor | None = None) -> Tensor:
    """`dense_kl` of the Weibull family from the log-sum-exp of each row's scores, (batch, heads, query).

    With log p_ij = Φ_ij − lse_i, everything else is a sum over keys times a sum over queries.
    """
    log_psi = log_prior(prior, k, real)
    psi = log_psi.exp()
    queries: Tensor | int = q.shape[2]
    if real is not None:
        lse = lse.masked_fill(~real[:, None], 0.0)
        q = q.masked_fill(~real[:, None, :, None], 0.0)
        queries = real.sum(dim=1, keepdim=True)
    centre = (psi.unsqueeze(-1) * k.to(psi.dtype)).sum(dim=-2)
    products = (q.to(psi.dtype).sum(dim=-2) * centre).sum(dim=-1) * q.shape[-1] ** -0.5
    heads = queries * (per_key(log_psi, real).sum(dim=-1) + RATE) - products + lse.sum(dim=-1)
    total: Tensor = heads.sum(dim=1, keepdim=True) / (queries * queries * q.shape[1])
    return total.squeeze(1)


def unit_of(seed: Tensor, place: Tensor) -> Tensor:
    """Uniform on the open unit interval, from a seed and a cell's number, both int32 (products wrap)."""
    x = place + seed * -1640531527
    x = (x ^ ((x >> 16) & 0xFFFF)) * 2146121005
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    x = x ^ ((x >> 16) & 0xFFFF)
    return (((x >> 9) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23


def hashed_noise(
    seed: Tensor, spread: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, heads: int, length: int
) -> Tensor:
    """Weibull noise of a cell, up to a constant; in base 2, whose logarithms are faster."""
    unit = unit_of(seed, ((b * heads + h) * length + i) * length + j)
    return torch.log2(-torch.log2(unit)) * (spread * math.log(2.0))


def hashed_map(shape: tuple[int, ...], seed: Tensor, spread: Tensor) -> Tensor:
    """The noise that FlexAttention draws, as a dense map (batch, heads, query, key)."""
    batch, heads, length, _ = shape
    sizes = (batch, heads, length, length)
    b, h, i, j = (
        torch.arange(size, dtype=torch.int32, device=seed.device).view([-1] + [1] * (3 - axis))
        for axis, size in enumerate(sizes)
    )
    return hashed_noise(seed, spread, b, h, i, j, heads, length)


def dense_hashed(
    q: Tensor, k: Tensor, v: Tensor, spread: Tensor, seed: Tensor, real: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Dense operations that draw exactly the same numbers as `flexed`, for checks."""
    scores = scores_of(q, k).float() + hashed_map(tuple(q.shape), seed, spread)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], HIDDEN)
    return (torch.softmax(scores, dim=-1).to(v.dtype) @ v,)


def plain_lse(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, way: Way = "narrow") -> Tensor:
    """log-sum-exp of scores without noise, with its gradients.

    FlexAttention needs values for it, and torch 2.11 compiles no backward pass if the output has no gradient.
    "narrow" passes a few columns of the values, "wide" all of them; the output gets a gradient of zero.
    "keys" passes keys as values: the output, Σⱼ pᵢⱼ kⱼ, times the scale is the gradient for a query, and the
    gradient of its product with the query for these values is the gradient for keys.
    """
    request = AuxRequest(lse=True)
    if way == "keys":
        out, aux = flex_attention(q.detach(), k.detach(), k, block_mask=blocks, return_aux=request)
        assert aux.lse is not None
        slope = (q.float() * out.float()).sum(dim=-1) * float(q.shape[-1] ** -0.5)
        return aux.lse.detach() + (slope - slope.detach())
    few = v.detach() if way == "wide" else v[..., :16].detach()
    out, aux = flex_attention(q, k, few, block_mask=blocks, return_aux=request)
    assert aux.lse is not None
    return aux.lse + 0.0 * out.sum(dim=-1)


def flexed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spread: Tensor,
    seed: Tensor,
    prior: Prior | None = None,
    real: Tensor | None = None,
    blocks: BlockMask | None = None,
    way: Way = "narrow",
) -> tuple[Tensor, ...]:
    """FlexAttention with noise in its score_mod; the KL needs a second call, for scores without noise."""
    _, heads, length, _ = q.shape

    def noisy(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + hashed_noise(seed, spread, b, h, i, j, heads, length)

    out = flex_attention(q, k, v, score_mod=noisy, block_mask=blocks)
    if prior is None:
        return (out,)
    return out, closed_kl(q, k, plain_lse(q, k, v, blocks, way), prior, real)


def masked_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spread: Tensor,
    prior: Prior | None = None,
    real: Tensor | None = None,
    blocks: BlockMask | None = None,
    way: Way = "narrow",
) -> tuple[Tensor, ...]:
    """sdpa with dense noise as its mask; the log-sum-exp for the KL comes from FlexAttention."""
    batch, heads, length, _ = q.shape
    unit = torch.rand(batch, heads, length, length, device=q.device)
    noise = torch.log(-torch.log1p(-unit)) * spread
    if real is not None:
        noise = noise.masked_fill(~real[:, None, None], HIDDEN)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=noise.to(q.dtype))
    if prior is None:
        return (out,)
    return out, closed_kl(q, k, plain_lse(q, k, v, blocks, way), prior, real)


def padding_blocks(real: Tensor) -> BlockMask:
    """FlexAttention's mask of right-padded batches: padded keys are hidden, padded queries see nothing."""
    lengths, (batch, length) = real.sum(dim=1).to(torch.int32), real.shape

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del h
        return (i < lengths[b]) & (j < lengths[b])

    return create_block_mask(inside, batch, None, length, length, device=str(real.device))


# --- In a transformers BERT, as a registered attention function ---


class Carried:
    """What the attentions of a model pass to each other and to the training step."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.map: Tensor | None = None
        self.real: Tensor | None = None
        self.blocks: BlockMask | None = None
        self.spread: Tensor | None = None
        self.way: Way | None = None  # for forms with several ways

    def other_way(self) -> bool:
        """Switch to the next way, if there is one."""
        if self.way is None or self.way == WAYS[-1]:
            return False
        self.way = WAYS[WAYS.index(self.way) + 1]
        return True

    def begin(self) -> None:
        self.kl, self.map = [], None

    def total_kl(self) -> Tensor:
        """Sum over layers, mean over the batch."""
        return torch.stack(self.kl).sum(dim=0).mean()


Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Carried], Tensor]


def _prior(module: Any) -> Prior:
    inner, _, outer = module.prior
    return Prior(inner.weight, inner.bias, outer.weight)


def bayesian_rule(form: Callable[..., tuple[Tensor, ...]], hashes: bool = False) -> Attend:
    """An attention of a model from `bayesian`, `masked_sdpa` or, with `hashes`, `flexed`."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, carried: Carried) -> Tensor:
        assert carried.spread is not None
        more: dict[str, Any] = {} if carried.way is None else {"way": carried.way}
        if hashes:
            more["seed"] = torch.randint(2**31 - 1, (), dtype=torch.int32, device=q.device)
        if carried.blocks is not None:
            more["blocks"] = carried.blocks
        out, kl = form(q, k, v, carried.spread, prior=_prior(module), real=carried.real, **more)
        carried.kl.append(kl)
        return out

    return attend


def evolving_rule(form: Callable[..., tuple[Tensor, ...]], random: bool = False) -> Attend:
    """An attention of a model from `evolving` or, `random`, from `both`."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, carried: Carried) -> Tensor:
        convolution = module.convolution
        more = (carried.spread, _prior(module)) if random else ()
        weights = convolution.weight, convolution.bias
        out, carried.map, *kl = form(q, k, v, carried.map, *weights, *more, real=carried.real)
        carried.kl += kl
        return out

    return attend


def install(model: Any, name: str, attend: Attend, prior: bool, convolution: bool) -> Carried:
    """Add parameters to each attention of a BERT, and make `attend` the model's attention function."""
    from transformers import AttentionInterface

    carried = Carried()
    for module in list(model.modules()):
        if type(module).__name__ != "BertSelfAttention":
            continue
        weight = module.query.weight
        if prior:
            layers = nn.Linear(module.attention_head_size, 5), nn.ReLU(), nn.Linear(5, 1, bias=False)
            module.prior = nn.Sequential(*layers).to(weight.device)
        if convolution:
            heads = module.num_attention_heads
            module.convolution = nn.Conv2d(heads, heads, 3, padding=1).to(weight.device)
            nn.init.dirac_(module.convolution.weight)
            nn.init.zeros_(module.convolution.bias)
    carried.spread = torch.tensor(1.0 / K, device=next(model.parameters()).device)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **_: object
    ) -> tuple[Tensor, None]:
        del attention_mask  # None, since no mask function has this name; `carried.real` has the padding
        with torch.autocast(query.device.type, enabled=False):
            out = attend(module, query, key, value, carried)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    return carried
