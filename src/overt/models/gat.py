"""The two-layer graph attention network of Veličković et al. 2018, with mechanisms (Fan et al. 2020, B.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import Mechanism
from overt.models.graph_attention import GATConv, GATv2Conv


class GAT(nn.Module):
    """Dropout → attention → ELU → dropout → attention; returns each node's logits.

    Args:
        features: width of the inputs.
        classes: width of the outputs.
        mechanisms: of both layers; see `GATConv`.
        width: of one head of the first layer.
        heads: of the first layer, concatenated.
        out_heads: of the second layer, averaged (8 on Pubmed).
        dropout: on both layers' inputs and weights.
        scores: "gat", or "gatv2" as in Brody et al. 2022.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        mechanisms: Sequence[Mechanism] = (),
        width: int = 8,
        heads: int = 8,
        out_heads: int = 1,
        dropout: float = 0.6,
        scores: Literal["gat", "gatv2"] = "gat",
    ) -> None:
        super().__init__()
        _check.one_of("scores", scores, ("gat", "gatv2"))
        conv = GATConv if scores == "gat" else GATv2Conv
        self.dropout = dropout
        self.first = conv(features, width, heads, dropout=dropout, mechanisms=mechanisms, layer=0)
        self.second = conv(
            width * heads, classes, out_heads, False, dropout=dropout, mechanisms=mechanisms, layer=1
        )

    def forward(self, x: Tensor, edge_index: Tensor, chain: Chain | None = None) -> Tensor:
        """Logits (nodes, classes).

        Args:
            x: (nodes, features); a torch sparse COO tensor gives the same, faster where most are zero.
            edge_index: (2, edges).
            chain: of this forward pass; by default that of the `with chain:` around it.
        """
        x = self._dropped(x.coalesce() if x.is_sparse else x)  # (nodes, features)
        x = F.elu(self.first(x, edge_index, chain=chain))  # (nodes, heads · width)
        out: Tensor = self.second(self._dropped(x), edge_index, chain=chain)  # (nodes, classes)
        return out

    def _dropped(self, x: Tensor) -> Tensor:
        if not x.is_sparse:
            return F.dropout(x, self.dropout, self.training)
        values = F.dropout(x.values(), self.dropout, self.training)  # dropping a zero changes nothing
        # The indices are those of x and need no check.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True)
