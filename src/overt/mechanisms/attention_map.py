"""One site's way from current logits to weights, through whichever mechanisms it has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from overt.mechanisms import backend, fused
from overt.mechanisms.bayesian import fused as fused_bayesian
from overt.mechanisms.bayesian.closed import Dot
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving import fused as fused_evolving
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.maps import check_map, check_visible, softmax
from overt.mechanisms.scores import Synthesizer, SynthesizerLayer
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site

log = logging.getLogger("overt")
T = TypeVar("T")
Mechanism = Evolving | Bayesian | Synthesizer


def find(mechanisms: Sequence[Mechanism], wanted: type[T]) -> T | None:
    """The mechanism of a type in a list, or None; more than one is an error."""
    found = [mechanism for mechanism in mechanisms if isinstance(mechanism, wanted)]
    if len(found) > 1:
        raise ValueError(f"mechanisms may hold one {wanted.__name__}, got {len(found)}")
    return found[0] if found else None


def check_mechanisms(mechanisms: Sequence[Mechanism]) -> None:
    """Refuse anything but a list of settings."""
    if not isinstance(mechanisms, list | tuple):
        raise TypeError(f"mechanisms must be a list, such as [Evolving()], got {mechanisms!r}")
    for mechanism in mechanisms:
        if not isinstance(mechanism, Mechanism):
            raise TypeError(
                f"mechanisms must be Evolving(…), Bayesian(…) or Synthesizer(…), got {mechanism!r}"
            )


class AttentionMap(nn.Module):
    """Logits → weights at one site.

    The order is fixed whatever the order of the list: Synthesizer makes logits, Evolving refines them and
    carries them on, noise-free, and Bayesian draws weights around the result.
    """

    def __init__(self, mechanisms: Sequence[Mechanism], site: Site) -> None:
        super().__init__()
        check_mechanisms(mechanisms)
        self.site = site
        synthesizer = find(mechanisms, Synthesizer)
        evolving = find(mechanisms, Evolving)
        bayesian = find(mechanisms, Bayesian)
        self.synthesizer = SynthesizerLayer(synthesizer, site) if synthesizer else None
        self.evolving = EvolvingLayer(evolving, site) if evolving else None
        self.bayesian = BayesianLayer(bayesian, site) if bayesian else None

    @property
    def has_mechanism(self) -> bool:
        """Whether anything but a softmax happens here."""
        return any(part is not None for part in (self.synthesizer, self.evolving, self.bayesian))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        seen: Seen | None,
        chain: Chain,
        first_row: int = 0,
        site: Site | None = None,
        dropout: float = 0.0,
        hindrance: str | None = None,
    ) -> Tensor | None:
        """From queries to outputs (batch, heads, query, dim) by fused kernels; None where they do not apply.

        The caller then goes by `forward`. Logits are plain scaled products here.

        Args:
            query: (batch, heads, query, dim).
            key: (batch, key heads, key, dim).
            value: like `key`.
            scale: of the products.
            seen: which cells are visible; None where padding and causality do not say it all.
            chain: what the layers below left, and where this one leaves its part.
            first_row: absolute position of the first query row (`Chain.first_row`).
            site: where the map is this time, for a module that several layers share; its own otherwise.
            dropout: probability of dropping a weight; 0 in evaluation mode.
            hindrance: what the caller knows that stands against it.
        """
        site = self.site if site is None else site
        hindrance = hindrance or self._hindrance(query, key, value, scale, seen, chain, dropout)
        if not torch.compiler.is_compiling():
            which = "fused kernels" if hindrance is None else f"plain operations: {hindrance}"
            log.debug("%s %d: %s", *site.place, which)
        if hindrance is not None or seen is None:
            return None
        chain.claim(site, self)
        at = (query, key, value, scale, seen, chain, site, first_row, dropout)
        if self.evolving is not None:
            return fused_evolving.attended(self.evolving, self.bayesian, *at)
        assert self.bayesian is not None
        return fused_bayesian.attended(self.bayesian, *at)

    def draw(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        seen: Seen,
        chain: Chain,
        samples: int,
        first_row: int = 0,
        hindrance: str | None = None,
    ) -> Tensor | None:
        """Outputs under draws 0 … samples − 1, (samples, batch, heads, query, dim); None as with `attend`.

        Each tile of keys and values is read once for all of them.
        """
        if self.evolving is not None:
            hindrance = hindrance or "an evolved map is drawn around one sample at a time"
        hindrance = hindrance or self._hindrance(query, key, value, scale, seen, chain, 0.0)
        if hindrance is not None or self.bayesian is None:
            log.debug("%s %d: plain operations: %s", *self.site.place, hindrance)
            return None
        log.debug("%s %d: fused kernels", *self.site.place)
        return fused_bayesian.draw(
            self.bayesian, query, key, value, scale, seen, chain, self.site, samples, first_row
        )

    def _hindrance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        seen: Seen | None,
        chain: Chain,
        dropout: float,
    ) -> str | None:
        """Why fused kernels do not apply to a call; None if they do."""
        if not self.has_mechanism:
            return "there is no mechanism"
        if self.synthesizer is not None:
            return "Synthesizer makes logits of its own"
        if chain.keep:
            return "rows may come in pieces"
        if reason := fused.unfit(query, key, value, scale, dropout, chain.switched_off):
            return reason
        if self.bayesian is not None and (reason := fused_bayesian.unfit(self.bayesian, query.device)):
            return reason
        if self.evolving is not None:
            reason = fused_evolving.unfit(self.evolving, query, key.shape[2], backend.room(query.device))
            if reason is not None:
                return reason
        return "masks are more than padding and causality" if seen is None else None

    def forward(
        self,
        logits: Tensor,
        visible: Tensor,
        query: Tensor,
        key: Tensor,
        chain: Chain,
        dot: Dot | None = None,
        first_row: int = 0,
        site: Site | None = None,
    ) -> Tensor:
        """Weights of shape (batch, heads, query, key), at least float32; zeros in hidden cells.

        Args:
            logits: current logits with every position bias in them, (batch, heads, query, key).
            visible: boolean, broadcasts to `logits`; key may be seen and query is not padding.
            query: (batch, heads, query, dim).
            key: (batch, key heads, key, dim).
            chain: what the layers below left, and where this one leaves its part.
            dot: given when the logits are a plain dot product.
            first_row: absolute position of the first query row (`Chain.first_row`).
            site: where the map is this time, for a module that several layers share; its own otherwise.
        """
        site = self.site if site is None else site
        check_map("logits", logits)
        check_visible(visible, logits)
        if logits.shape[1] != self.site.heads:
            raise ValueError(f"logits must have {self.site.heads} heads, got {logits.shape[1]}")
        if self.has_mechanism:
            chain.claim(site, self)
        if self.synthesizer is not None:
            logits, dot = self.synthesizer(logits, query, first_row), None
        if self.evolving is not None:
            logits, dot = self.evolving(logits, visible, chain, site), None
        if self.bayesian is not None:
            drawn: Tensor = self.bayesian(logits, visible, chain, key, dot, first_row, site)
            return drawn
        return softmax(logits, visible)
