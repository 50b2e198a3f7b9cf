"""The KL of a plain dot-product map, given its rows' log-sum-exp, in memory linear in its length.

The prior depends on keys alone, so sums over cells reduce to sums over keys: with φ_ij = Φ_ij − lse_i
and Φ_ij = scale·q_i·k_j + b_j, for instance Σ_j α_j Φ_ij = scale·q_i·(Σ_j α_j k_j) + Σ_j α_j b_j. A causal
mask turns sums over keys into prefix sums. This holds for scaled dot products, with at most a bias per key,
under padding and causal masks; anything else needs `naive.map_kl`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import reduce_kl
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.special import EULER

# Rows per block under a causal mask where squares of scores are needed.
BLOCK = 128


def closed_kl(call: AttentionCall, log_normalizer: Tensor, prior: Tensor, config: Bayesian) -> Tensor:
    """KL of a map per example, (batch,): the value of `naive.map_kl` without the map.

    Args:
        call: one whose `is_dot()` is True: queries, keys, masks in parts, at most a bias per key.
        log_normalizer: lse, (batch, heads, query), over visible keys.
        prior: (batch, key heads, key) or broadcasting to it; log α or the Lognormal mean.
        config: family, posterior and reduction.
    """
    batch, heads, queries, width = call.query.shape
    key_heads, keys = call.key.shape[1:3]
    causal, shown, rows_real = call.seen.causal, call.seen.key_visible, call.seen.query_real
    if causal and keys < queries:
        raise ValueError(f"a causal map needs at least as many keys as queries, got {keys} and {queries}")
    dtype = torch.promote_types(log_normalizer.dtype, torch.float32)
    # Heads that share a key head share its sums: (batch, key heads, group, query, …).
    query = call.query.to(dtype).reshape(batch, key_heads, heads // key_heads, queries, width) * call.scale
    lse = log_normalizer.to(dtype).reshape(batch, key_heads, heads // key_heads, queries)
    key = call.key.to(dtype)
    every = torch.ones(1, keys, dtype=dtype, device=key.device)
    seen = (every if shown is None else shown.to(dtype)).unsqueeze(1)  # (batch or 1, 1, key)
    bias = torch.zeros_like(seen) if call.bias is None else call.bias[:, :, 0].to(dtype) * seen
    prior = prior.to(dtype).expand(batch, key_heads, keys)

    def over_keys(values: Tensor) -> Tensor:
        """Σ over the keys that each query sees: (batch, key heads, 1, query or 1, …) from (…, key[, dim])."""
        values = values * (seen if values.dim() == 3 else seen.unsqueeze(-1))
        if causal:
            return values.cumsum(dim=2)[:, :, keys - queries :].unsqueeze(2)
        return values.sum(dim=2, keepdim=True).unsqueeze(2)

    def scores_over_keys(values: Tensor) -> Tensor:
        """Σ_j values_j·scale·q_i·k_j: (batch, key heads, group, query)."""
        return (query * over_keys(values.unsqueeze(-1) * key)).sum(dim=-1)

    visible_keys = over_keys(torch.ones_like(prior))
    sees = (visible_keys > 0).to(dtype)  # a number times booleans would be float32
    probabilities = config.posterior == "probabilities"
    if config.family == "weibull":
        alpha = prior.exp()
        per_key = alpha * (EULER / config.k - math.log(config.prior_beta) + math.lgamma(1.0 + 1.0 / config.k))
        per_key = per_key + torch.lgamma(1.0 + alpha) - prior + (math.log(config.k) - EULER - 1.0)
        rows = over_keys(per_key) - scores_over_keys(alpha) - over_keys(alpha * bias)
        if probabilities:
            rows = rows + lse * over_keys(alpha) + config.prior_beta * sees
        else:
            rows = rows + config.prior_beta * lse.exp() * sees
    else:
        # (x_ij + u_j + v_i)² summed over j, with x = scale·q·k, u per key and v per query.
        u = bias - prior - config.sigma**2 / 2.0
        v = -lse if probabilities else torch.zeros_like(lse)
        squares = _squared_scores(query, key * seen.unsqueeze(-1), causal)
        squares = squares + over_keys(u.square()) + v.square() * visible_keys + 2.0 * scores_over_keys(u)
        squares = squares + 2.0 * v * (scores_over_keys(torch.ones_like(prior)) + over_keys(u))
        constant = math.log(config.prior_sigma / config.sigma) - 0.5
        constant += 0.5 * (config.sigma / config.prior_sigma) ** 2
        # Divided twice: the square of a published σ₁ (1e15) times another 1e15 would leave float32.
        rows = constant * visible_keys + 0.5 * (squares / config.prior_sigma) / config.prior_sigma

    pairs = visible_keys[:, :1]  # (batch, 1, 1, query or 1)
    if rows_real is not None:
        real = rows_real.view(batch, 1, 1, queries)
        rows, pairs = rows.masked_fill(~real, 0.0), pairs * real
    total = rows.expand(-1, -1, -1, queries).sum(dim=(1, 2, 3))
    pairs = pairs.expand(-1, 1, 1, queries).sum(dim=(1, 2, 3)) * heads
    return reduce_kl(total, pairs, config)


def _squared_scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Σ_j (q_i·k_j)² over the keys that query i sees, (batch, key heads, group, query).

    query is (batch, key heads, group, query, dim), key (batch, key heads, key, dim) with zeros at padding.
    The sum over all keys of k·kᵀ is a dim × dim matrix; under a causal mask queries are taken in blocks, and
    keys are added to it block by block.
    """
    if not causal:
        outer = key.mT @ key
        return ((query @ outer.unsqueeze(2)) * query).sum(dim=-1)
    queries, keys = query.shape[3], key.shape[2]
    shift = keys - queries
    outer = key[:, :, :shift].mT @ key[:, :, :shift]

    def squares_of(rows: Tensor, near: Tensor, outer: Tensor) -> Tensor:
        scores = rows @ near.unsqueeze(2).mT
        inside = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        squares = scores.square().masked_fill(~inside, 0.0).sum(dim=-1)
        return squares + ((rows @ outer.unsqueeze(2)) * rows).sum(dim=-1)

    if torch.compiler.is_compiling():  # a loop would be unrolled again for each length
        return squares_of(query, key[:, :, shift:], outer)
    blocks = []
    for start in range(0, queries, BLOCK):
        near = key[:, :, shift + start : shift + start + BLOCK]
        blocks.append(squares_of(query[:, :, :, start : start + BLOCK], near, outer))
        outer = outer + near.mT @ near
    return torch.cat(blocks, dim=-1)
