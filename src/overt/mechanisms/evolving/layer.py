"""Evolving Attention at one site of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt.mechanisms import backend
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving._evolve_cpu import evolve as evolve_cpu
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.naive import continued, convolve, mix, reach, refine
from overt.mechanisms.evolving.ramp import ramp
from overt.mechanisms.maps import HIDDEN, softmax
from overt.mechanisms.mechanism import MechanismLayer, Point
from overt.mechanisms.site import Site

# Of the fused form.
FEW_HEADS, ROOM_FOR_MANY = 16, 150_000  # bytes of shared memory
MOST_CELLS = 2**31  # of one head's map, which kernels count in 32 bits


class EvolvingLayer(MechanismLayer):
    """One K→K convolution with bias, and the step from current to evolved logits.

    Layer 0 of a chain has no convolution, hence no parameters.
    """

    config: Evolving
    reads_below = True
    reads_rows = True
    fills_hidden = True
    part_names = ("attention", "convolution")

    def __init__(self, config: Evolving, site: Site) -> None:
        super().__init__(config, site)
        self.alpha = config.alpha_at(site)
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        convolves = config.skip == "mix"
        self.earlier_rows = config.kernel_size - 1 if convolves else 0
        if site.layer > 0 and convolves:
            size = config.kernel_size
            self.weight = nn.Parameter(torch.empty(site.heads, site.heads, size, size))
            self.bias = nn.Parameter(torch.empty(site.heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the convolution as `config.init` says."""
        if self.weight is None or self.bias is None:
            return
        nn.init.zeros_(self.bias)
        if self.config.init == "kaiming":
            nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
            return
        # The identity is the tap that reads the cell itself, which shifted kernels have at an edge.
        left, _, above, _ = reach(self.site.kind, self.config.kernel_size)
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, :, above, left] = torch.eye(self.site.heads)

    def refine(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Evolved logits, (batch, heads, query, key), −inf in hidden cells; leaves them in the chain."""
        site, visible = call.site, call.visible()
        previous = self._previous(logits, call, chain)
        grown = ramp(self.config, chain, self.training, logits.device)
        evolved = self._compiled(logits, previous, visible, grown, site, chain)
        if evolved is None:
            evolved = self._evolved(logits, previous, visible, grown, site, chain)
        chain.carry(site, self.name, evolved)
        return evolved

    def _previous(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor | None:
        below = None if call.site.layer == 0 else chain.previous(call.site, self.name)
        return None if below is None else continued(logits, below.to(logits.device))

    def _compiled(
        self,
        logits: Tensor,
        previous: Tensor | None,
        visible: Tensor,
        grown: Tensor | None,
        site: Site,
        chain: Chain,
    ) -> Tensor | None:
        """Evolved logits by compiled loops, where those apply."""
        if previous is None or self.weight is None or self.bias is None or chain.keep:
            return None
        factors = self.alpha, self.config.beta, grown
        convolution, off = (self.weight, self.bias), chain.switched_off
        return evolve_cpu(logits, previous, convolution, visible, site.kind, *factors, off)

    def _evolved(
        self,
        logits: Tensor,
        previous: Tensor | None,
        visible: Tensor,
        grown: Tensor | None,
        site: Site,
        chain: Chain,
    ) -> Tensor:
        config = self.config
        if previous is None:  # a chain starts: nothing to mix and nothing to convolve
            return logits.masked_fill(~visible, HIDDEN)
        alpha = self.alpha if grown is None else self.alpha * grown
        beta = config.beta if grown is None else config.beta * grown
        mixed = mix(logits, previous, visible, alpha, add=config.skip == "add")
        convolution = None
        if self.weight is not None and self.bias is not None:
            convolution = (self.weight, self.bias)
        kept = self._keep(mixed, chain, site) if chain.keep and convolution is not None else None
        return refine(mixed, convolution, visible, site.kind, beta, kept)

    def _keep(self, mixed: Tensor, chain: Chain, site: Site) -> Tensor | None:
        """Rows kept from the call before; leaves in the chain those that the next call will need."""
        if site.kind == "encoder":
            raise ValueError('rows cannot be fed in pieces to kind="encoder": its windows reach rows below')
        return chain.keep_rows(site, self.name, mixed, self.earlier_rows)

    def unfit(self, call: AttentionCall) -> str | None:
        """Why its map is not for the kernels; None if it is."""
        from overt.mechanisms.evolving.kernels import ALIGNED, convolvable

        _, heads, queries, keys = call.shape
        if queries * (keys + ALIGNED) >= MOST_CELLS:
            return f"one head's map of {queries} × {keys} cells is too large for the kernels"
        if self.weight is None:
            return None
        if self.weight.device != call.query.device:
            return f"the convolution's weights lie on {self.weight.device}, queries on {call.query.device}"
        if heads > FEW_HEADS and backend.room(call.query.device) < ROOM_FOR_MANY:
            return f"convolutions of more than {FEW_HEADS} heads need more shared memory than this GPU has"
        return convolvable(heads, self.config.kernel_size, call.query.dtype)

    def parts(self, point: Point, x: Tensor, call: AttentionCall, chain: Chain) -> dict[str, Tensor]:
        """The layer's own map, and what the convolution makes of its mixture with the previous one."""
        del point  # it acts at one
        visible, previous = call.visible(), self._previous(x, call, chain)
        found = {"attention": softmax(x, visible)}
        if previous is None or self.weight is None or self.bias is None:
            return found
        grown = ramp(self.config, chain, self.training, x.device)
        alpha = self.alpha if grown is None else self.alpha * grown
        image = convolve(mix(x, previous, visible, alpha), self.weight, self.bias, call.site.kind)
        return {**found, "convolution": softmax(image, visible)}

    def describe(self) -> dict[str, str]:
        """The alpha and beta that hold here, or that a chain starts."""
        if self.site.layer == 0:
            return {"alpha": "start", "beta": "start"}
        return {"alpha": f"{self.alpha:g}", "beta": f"{self.config.beta:g}"}

    def extra_repr(self) -> str:
        """Effective settings, for `print(model)`."""
        site, config = self.site, self.config
        settings = f"alpha={self.alpha}, beta={config.beta}, kernel_size={config.kernel_size}"
        return f"{site.kind} {site.layer}, {settings}"
