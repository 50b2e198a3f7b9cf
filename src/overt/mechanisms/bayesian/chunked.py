"""The KL of a whole map in chunks of rows: the value of `naive.map_kl` with bounded temporaries."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import reduce_kl, total_kl

# Cells of a map whose KL is computed at once: bounds the forward pass's temporaries, not the result.
CELLS_AT_ONCE = 2**24


def chunked_kl(
    logits: Tensor, visible: Tensor, prior: Tensor, config: Bayesian, cells_at_once: int = CELLS_AT_ONCE
) -> Tensor:
    """KL of a whole map per example, (batch,), over visible (query, key) pairs and all heads.

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, broadcasts to `logits`.
        prior: (batch, heads, key) or broadcasting to it; see `naive.cell_kl`.
        config: family, posterior and reduction.
        cells_at_once: rows are taken in chunks of about this many cells.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    visible = visible.expand(logits.shape)
    batch, heads, queries, keys = logits.shape
    # A compiler fuses the temporaries away anyway, and would unroll the loop again for each length.
    if torch.compiler.is_compiling() or logits.numel() <= cells_at_once:
        total = total_kl(logits, visible, prior, config)
    else:
        rows = max(1, cells_at_once // max(1, batch * heads * keys))
        total = logits.new_zeros(batch)
        for start in range(0, queries, rows):
            part = slice(start, start + rows)
            total = total + total_kl(logits[:, :, part], visible[:, :, part], prior, config)
    return reduce_kl(total, visible.sum(dim=(1, 2, 3)), config)
