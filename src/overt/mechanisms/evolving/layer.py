"""Evolving Attention at one site of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt.mechanisms import backend
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving._evolve_cpu import evolve as evolve_cpu
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.naive import convolve, matching_previous, mix, reach, refine
from overt.mechanisms.evolving.ramp import ramp
from overt.mechanisms.maps import HIDDEN, softmax
from overt.mechanisms.mechanism import MechanismLayer, Point
from overt.mechanisms.site import Site

# Limits of the fused form.
FEW_HEADS, ROOM_FOR_MANY = 16, 150_000  # bytes of shared memory
MOST_CELLS = 2**31  # of one head's map, whose cells kernels count in 32 bits
CUT_STD = 0.87962566103423978  # standard deviation of a standard normal cut off at ±2


class EvolvingLayer(MechanismLayer):
    """One K→K convolution with bias, and the step from current to evolved logits.

    The first layer of a chain has no convolution, hence no parameters, unless `Evolving.first`; nor have
    kinds that `Evolving.convolve` leaves out.
    """

    config: Evolving
    reads_below = True
    reads_logits_only = True
    fills_hidden = True
    part_names = ("attention", "convolution")

    def __init__(self, config: Evolving, site: Site) -> None:
        super().__init__(config, site)
        self.alpha = config.alpha_at(site)
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.reads_rows = config.convolves_at(site)
        self.earlier_rows = config.kernel_size - 1 if self.reads_rows else 0
        if self.reads_rows and (not site.starts or config.first):
            size = config.kernel_size
            self.weight = nn.Parameter(torch.empty(site.heads, site.heads, size, size))
            self.bias = nn.Parameter(torch.empty(site.heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise the convolution according to `config.init`."""
        if self.weight is None or self.bias is None:
            return
        nn.init.zeros_(self.bias)
        if self.config.init == "kaiming":
            nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
            return
        if self.config.init == "lecun":
            std = self.weight[0].numel() ** -0.5 / CUT_STD
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
            return
        # The identity is the tap that reads the cell itself; in shifted kernels it is at an edge.
        left, _, above, _ = reach(self.site.kind, self.config.kernel_size)
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, :, above, left] = torch.eye(self.site.heads)

    def refine(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Evolved logits, (batch, heads, query, key), −inf in hidden cells; left in the chain too."""
        site, visible = call.site, call.visible()
        previous = self._previous(logits, call, chain)
        ramp_factor = ramp(self.config, chain, self.training, logits.device)
        evolved = self._evolve(logits, previous, visible, ramp_factor, site, chain)
        chain.carry(site, self.name, evolved)
        return evolved

    def _previous(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor | None:
        below = None if call.site.starts else chain.previous(call.site, self.name)
        return None if below is None else matching_previous(logits, below.to(logits.device))

    def _evolve(
        self,
        logits: Tensor,
        previous: Tensor | None,
        visible: Tensor,
        ramp_factor: Tensor | None,
        site: Site,
        chain: Chain,
    ) -> Tensor:
        """Evolved logits: by compiled loops where these apply, else by the definition."""
        config = self.config
        convolution = None
        if self.weight is not None and self.bias is not None and (previous is not None or config.first):
            convolution = (self.weight, self.bias)
        if convolution is None and previous is None:  # the chain starts here: nothing to mix or convolve
            return logits.masked_fill(~visible, HIDDEN)
        if convolution is not None and previous is not None and not chain.keep:
            factors = self.alpha, config.beta, ramp_factor
            off = chain.switched_off
            compiled = evolve_cpu(logits, previous, convolution, visible, site.kind, *factors, off)
            if compiled is not None:
                return compiled
        alpha = self.alpha if ramp_factor is None else self.alpha * ramp_factor
        beta = config.beta if ramp_factor is None else config.beta * ramp_factor
        # Without a skip the previous map has no effect; a gradient through it would be zero.
        past = None if ramp_factor is None and self.alpha == 0.0 else previous
        mixed = mix(logits, past, visible, alpha, add=config.skip == "add")
        rows_above = self._rows_above(mixed, chain, site) if chain.keep and convolution is not None else None
        return refine(mixed, convolution, visible, site.kind, beta, rows_above)

    def _rows_above(self, mixed: Tensor, chain: Chain, site: Site) -> Tensor | None:
        """Rows kept from the previous call; leaves in the chain those that the next call will need."""
        if site.kind == "encoder":
            raise ValueError('rows cannot be fed in pieces to kind="encoder": its windows include rows below')
        return chain.keep_rows(site, self.name, mixed, self.earlier_rows)

    def unfit(self, call: AttentionCall) -> str | None:
        """Why the kernels cannot take its map; None if they can."""
        from overt.mechanisms.evolving.kernels import ALIGNED, convolvable

        _, heads, queries, keys = call.shape
        if queries * (keys + ALIGNED) >= MOST_CELLS:
            return f"one head's map of {queries} × {keys} cells is too large for the kernels"
        if self.weight is None:
            return None
        if self.weight.device != call.query.device:
            return f"the convolution's weights are on {self.weight.device}, queries on {call.query.device}"
        if heads > FEW_HEADS and backend.room(call.query.device) < ROOM_FOR_MANY:
            return f"convolutions of more than {FEW_HEADS} heads need more shared memory than this GPU has"
        return convolvable(heads, self.config.kernel_size, call.query.dtype)

    def parts(self, point: Point, x: Tensor, call: AttentionCall, chain: Chain) -> dict[str, Tensor]:
        """The layer's own map, and the convolution of its mixture with the previous map."""
        del point  # it acts at only one
        visible, previous = call.visible(), self._previous(x, call, chain)
        attention = {"attention": softmax(x, visible)}
        if self.weight is None or self.bias is None or (previous is None and not self.config.first):
            return attention
        ramp_factor = ramp(self.config, chain, self.training, x.device)
        alpha = self.alpha if ramp_factor is None else self.alpha * ramp_factor
        image = convolve(mix(x, previous, visible, alpha), self.weight, self.bias, call.site.kind)
        return {**attention, "convolution": softmax(image, visible)}

    def describe(self) -> dict[str, str]:
        """The alpha and beta in effect here: "start" where a chain starts, "none" without a convolution."""
        starts = self.site.starts
        beta = f"{self.config.beta:g}" if self.weight is not None else "start" if starts else "none"
        return {"alpha": "start" if starts else f"{self.alpha:g}", "beta": beta}

    def extra_repr(self) -> str:
        """Effective settings, for `print(model)`."""
        site, config = self.site, self.config
        settings = f"alpha={self.alpha}, beta={config.beta}, kernel_size={config.kernel_size}"
        return f"{site.kind} {site.layer}, {settings}"
