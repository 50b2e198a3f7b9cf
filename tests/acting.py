"""Mechanisms' layers, called with what their tests vary in place of a whole call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import overt
from overt.mechanisms import edge_map
from overt.mechanisms.bayesian import edges as bayesian_edges
from overt.mechanisms.bayesian import layer as bayesian
from overt.mechanisms.evolving import edges as evolving_edges
from overt.mechanisms.evolving import layer as evolving
from overt.mechanisms.fused import form_of
from overt.mechanisms.seen import Seen
from overt.mechanisms.synthesizer import layer as synthesizer


def call_of(
    site: overt.mechanisms.Site,
    logits: Tensor,
    visible: Tensor | None = None,
    key: Tensor | None = None,
    query: Tensor | None = None,
    first_row: int = 0,
) -> overt.AttentionCall:
    """A call whose logits come ready."""
    batch, heads, queries, keys = logits.shape
    query = logits.new_zeros(batch, heads, queries, site.head_dim) if query is None else query
    key = logits.new_zeros(batch, heads, keys, site.head_dim) if key is None else key
    return overt.AttentionCall(site, query, key, key, logits=logits, mask=visible, first_row=first_row)


class EvolvingLayer(evolving.EvolvingLayer):
    def forward(self, logits: Tensor, visible: Tensor, chain: overt.Chain) -> Tensor:  # type: ignore[override]
        return super().forward("refine", logits, call_of(self.site, logits, visible), chain)


class BayesianLayer(bayesian.BayesianLayer):
    def forward(  # type: ignore[override]
        self,
        logits: Tensor,
        visible: Tensor,
        chain: overt.Chain,
        key: Tensor,
        call: overt.AttentionCall | None = None,
        first_row: int = 0,
    ) -> Tensor:
        ready = call_of(self.site, logits, visible, key, first_row=first_row)
        return super().forward("weights", logits, ready if call is None else call, chain)


class SynthesizerLayer(synthesizer.SynthesizerLayer):
    def forward(self, logits: Tensor, query: Tensor, first_row: int = 0) -> Tensor:  # type: ignore[override]
        call = call_of(self.site, logits, query=query, first_row=first_row)
        return super().forward("logits", logits, call, overt.Chain())


class EvolvingEdgeLayer(evolving_edges.EvolvingEdgeLayer):
    def forward(self, scores: Tensor, edges: Tensor, chain: overt.Chain) -> Tensor:  # type: ignore[override]
        call: Any = overt.EdgeCall(self.site, edges, int(edges[1].max()) + 1, torch.empty(0))
        return super().forward("refine", scores, call, chain)


class BayesianEdgeLayer(bayesian_edges.BayesianEdgeLayer):
    def forward(  # type: ignore[override]
        self, scores: Tensor, edges: Tensor, nodes: int, chain: overt.Chain, key: Tensor
    ) -> Tensor:
        call: Any = overt.EdgeCall(self.site, edges, nodes, key)
        return super().forward("weights", scores, call, chain)


class EdgeMap(edge_map.EdgeMap):
    def forward(  # type: ignore[override]
        self, scores: Tensor, edges: Tensor, nodes: int, chain: overt.Chain, key: Tensor
    ) -> Tensor:
        return super().forward(scores, overt.EdgeCall(self.site, edges, nodes, key), chain)


def attended(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Seen,
    chain: overt.Chain,
    first_row: int = 0,
    dropout: float = 0.0,
) -> Tensor:
    """A layer's outputs by the fused form that covers it alone."""
    call = overt.AttentionCall(
        layer.site, query, key, value, scale, seen=seen, first_row=first_row, dropout=dropout
    )
    form = form_of(frozenset({layer.name}))
    assert form is not None
    return form.attend({layer.name: layer}, call, chain)
