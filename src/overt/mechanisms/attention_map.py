"""From current logits to weights at one site, through whichever mechanisms it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.mechanisms import fused
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.maps import check_map, check_visible, softmax
from overt.mechanisms.mechanism import (
    Mechanism,
    MechanismLayer,
    check_layers,
    check_mechanisms,
    first_point,
    key_of,
)
from overt.mechanisms.rows import Rows
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site

log = logging.getLogger("overt")


def rows_left_alone(
    call: AttentionCall, logits: Tensor, visible: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """A function that gives queries that are padding or see no key the weights of plain attention.

    Mechanisms neither see nor change such rows, but a model may read their outputs. None where there are no
    such rows.

    Args:
        call: the attention call.
        logits: (batch, heads, query, key), before any mechanism.
        visible: boolean, broadcasts to them.
    """
    batch, _, queries, keys = logits.shape
    seen = call.seen
    every_query = call.mask is None and seen.query_real is None and (not seen.causal or keys >= queries)
    if every_query and (seen.key_visible is None or call.left_alone == "sdpa"):
        return None  # only queries that see no key are left, if any, and they get zeros anyway
    blind = seen.blind(queries, keys) if call.mask is None else None  # once for all layers
    alone = ~visible.any(dim=-1, keepdim=True) if blind is None else blind.view(-1, 1, queries, 1)
    few = alone.shape[1] == 1 and logits.device.type == "cpu" and not torch.compiler.is_compiling()
    if few and not bool(alone.any()):
        return None
    shown = call.shown()
    if not few or type(logits) is not Tensor:
        dense = _plain(call, logits, shown, call.bias)
        return lambda weights: torch.where(alone, dense.to(weights.dtype), weights)
    example, row = alone.expand(batch, 1, queries, 1)[:, 0, :, 0].nonzero(as_tuple=True)
    shown_rows = shown.expand(batch, -1, queries, keys)[example, :, row].unsqueeze(2)
    bias = None if call.bias is None else call.bias.expand_as(logits)[example, :, row].unsqueeze(2)
    rows = _plain(call, logits[example, :, row].unsqueeze(2), shown_rows, bias).squeeze(2)
    heads = torch.arange(logits.shape[1])

    def put_rows(weights: Tensor) -> Tensor:
        places = example[:, None], heads[None], row[:, None]
        return weights.index_put(places, rows.to(weights.dtype))

    return put_rows


def _plain(call: AttentionCall, logits: Tensor, shown: Tensor, bias: Tensor | None) -> Tensor:
    weights = softmax(logits, shown)
    if call.left_alone == "sdpa":
        return weights
    # Uniform, but computed from the scores: the added mask rounds them away, yet they have their gradient.
    if call.left_alone == "biased" and bias is not None:
        logits = logits - bias
    level = (logits - logits.detach())[..., : call.key.shape[-2]].to(weights.dtype).softmax(dim=-1)
    level = F.pad(level, (0, logits.shape[-1] - level.shape[-1]))
    return torch.where(shown.any(dim=-1, keepdim=True), weights, level)


class Layers(nn.Module):
    """The mechanisms' layers at one site, dense or on edges, each a module named after its mechanism."""

    def __init__(
        self, mechanisms: Sequence[Mechanism], site: Site, make: Callable[[Mechanism], MechanismLayer]
    ) -> None:
        super().__init__()
        check_mechanisms(mechanisms)
        self.site = site
        self._order = tuple(key_of(mechanism) for mechanism in mechanisms)
        # Layers are made, and so their parameters listed, in the order of the first point they act at,
        # whatever the order of the list: an optimizer's state is saved by parameter number.
        for mechanism in sorted(mechanisms, key=first_point):
            key = key_of(mechanism)
            if hasattr(self, key):
                raise ValueError(
                    f"a mechanism cannot be called {type(mechanism).__name__}: the name {key} is taken"
                )
            self.add_module(key, make(mechanism))
        check_layers(self.layers)

    @property
    def layers(self) -> list[MechanismLayer]:
        """The mechanisms' layers, in the order of the mechanisms passed."""
        return [cast(MechanismLayer, self._modules[key]) for key in self._order]

    def layer_of(self, kind: type[Mechanism]) -> MechanismLayer | None:
        """The layer of a mechanism, or None."""
        return next((layer for layer in self.layers if isinstance(layer.config, kind)), None)

    @property
    def has_mechanism(self) -> bool:
        """Whether anything but a softmax happens here."""
        return len(self._order) > 0

    @property
    def any_width(self) -> bool:
        """Whether fused kernels take values of another width than keys as they are."""
        form = fused.form_of(self.names)
        return form is not None and form.any_width

    @property
    def random(self) -> bool:
        """Whether weights are drawn."""
        return any(layer.random for layer in self.layers)

    @property
    def sums_to_one(self) -> bool:
        """Whether rows of weights sum to one."""
        return all(layer.sums_to_one for layer in self.layers)

    @property
    def signed(self) -> bool:
        """Whether weights may be negative."""
        return any(layer.signed for layer in self.layers)

    @property
    def reads_below(self) -> bool:
        """Whether it reads what the layer below left in the chain."""
        return any(layer.reads_below for layer in self.layers)

    @property
    def reads_rows(self) -> bool:
        """Whether a row of the map depends on other rows."""
        return any(layer.reads_rows for layer in self.layers)

    @property
    def reads_logits_only(self) -> bool:
        """Whether no mechanism reads queries or keys of a call, apart from a prior's keys."""
        return all(layer.reads_logits_only for layer in self.layers)

    @property
    def earlier_rows(self) -> int:
        """How many rows above each row it reads."""
        return max((layer.earlier_rows for layer in self.layers), default=0)

    @property
    def names(self) -> frozenset[str]:
        """Names of the mechanisms."""
        return frozenset(layer.name for layer in self.layers)


class AttentionMap(Layers):
    """Logits → weights at one site.

    Whatever the order of the list, mechanisms first act on the current logits, then refine them, then one
    turns them into weights (or a softmax does), then the weights are changed. Mechanisms that act at the same
    point act in the order of the list.
    """

    def __init__(self, mechanisms: Sequence[Mechanism], site: Site) -> None:
        super().__init__(mechanisms, site, lambda mechanism: mechanism.layer(site))

    def attend(
        self, call: AttentionCall, chain: Chain, hindrance: str | None = None, pieces: str | None = None
    ) -> Tensor | None:
        """From queries to outputs (batch, heads, query, dim) by a fused form; None where no form applies.

        The caller then uses `forward`. Where no mechanism does anything in this pass, as with Bayesian in
        evaluation, torch's own attention runs.

        Args:
            call: the attention call.
            chain: what the layers below left, and where this layer leaves its part.
            hindrance: a reason, known to the caller, why no fused form can run.
            pieces: a reason, known to the caller, why only a form of single rows can run.
        """
        layers = self.layers
        if hindrance is None and fused.torchs_own_suffices(layers, call, chain):
            self._log_form(call.site, None, "torch's own attention: there is nothing to draw")
            chain.claim(call.site, self)
            return fused.torchs_own(call)
        by_name = {layer.name: layer for layer in layers}
        form = fused.form_of(frozenset(by_name))
        by_row = hindrance is None
        if hindrance is None:
            hindrance = fused.why_not_row(form, by_name, call, chain)
            by_row = hindrance is None
            if not by_row and not chain.keep:
                hindrance = pieces or fused.why_plain(layers, call, chain)
        self._log_form(call.site, hindrance, "fused kernel for a row" if by_row else "fused kernels")
        if hindrance is not None or form is None:
            return None
        chain.claim(call.site, self)
        width = call.value.shape[-1]
        if by_row or not self.any_width or call.left_alone is not None:
            call = fused.of_equal_widths(call)
        if by_row and form.attend_row is not None:
            out = form.attend_row(by_name, call, chain)
        else:
            out = fused.with_rows_left_alone(form.attend(by_name, call, chain), call, form)
        return out if out.shape[-1] == width else out[..., :width]

    def draw(
        self, call: AttentionCall, chain: Chain, samples: int, hindrance: str | None = None
    ) -> Tensor | None:
        """Outputs under draws 0 … samples − 1, (samples, batch, heads, query, dim); None as in `attend`.

        Each tile of keys and values is read once for all draws.
        """
        hindrance = hindrance or fused.why_plain(self.layers, call, chain, draws=True)
        self._log_form(call.site, hindrance)
        form = fused.form_of(self.names)
        if hindrance is not None or form is None or form.draw is None:
            return None
        width, call = call.value.shape[-1], fused.of_equal_widths(call)
        return form.draw({layer.name: layer for layer in self.layers}, call, chain, samples)[..., :width]

    def rows(
        self, key: Tensor, queries: int, chain: Chain, seen: Seen | None = None, *, prepare: bool = True
    ) -> Rows:
        """The map of a recurrent decoder, whose rows are made one by one; see `Rows`.

        Args:
            key: (batch, key heads, key, dim), what a prior reads.
            queries: number of rows to come.
            chain: of this forward pass, with or without `keep`.
            seen: padding of keys (batch, key) and of queries (batch, queries); None where there is none.
            prepare: draw the noise of all rows at once and compute the KL once, where the mechanisms allow
                it. False calls the mechanisms for each row, with the same result.
        """
        return Rows(self, key, queries, chain, Seen() if seen is None else seen, prepare)

    def _log_form(self, site: Site, hindrance: str | None, form: str = "fused kernels") -> None:
        if not torch.compiler.is_compiling():
            form = form if hindrance is None else f"plain operations: {hindrance}"
            log.debug("%s %d: %s", *site.place, form)

    def forward(self, call: AttentionCall, chain: Chain) -> Tensor:
        """Weights of shape (batch, heads, query, key), at least float32; zeros in hidden cells.

        Args:
            call: the attention call; its site may be another layer's where several layers share this module.
            chain: what the layers below left, and where this layer leaves its part.
        """
        logits, visible = call.scores(), call.visible()
        check_map("logits", logits)
        check_visible(visible, logits)
        if logits.shape[1] != self.site.heads:
            raise ValueError(f"logits must have {self.site.heads} heads, got {logits.shape[1]}")
        layers = self.layers
        if layers:
            chain.claim(call.site, self)
        put_rows = None if call.left_alone is None else rows_left_alone(call, logits, visible)
        for layer in layers:
            if layer.acts_at("logits"):
                logits = layer("logits", logits, call, chain)
                call = call.with_logits(logits)
        for layer in layers:
            if layer.acts_at("refine"):
                logits = layer("refine", logits, call, chain)
                call = call.with_logits(logits, layer.fills_hidden and chain.switched_off is None)
        makers = [layer for layer in layers if layer.acts_at("weights")]
        weights: Tensor
        weights = makers[0]("weights", logits, call, chain) if makers else call.softmax(logits)
        for layer in layers:
            if layer.acts_at("mixed"):
                weights = layer("mixed", weights, call, chain)
        return weights if put_rows is None else put_rows(weights)
