"""Settings of Evolving Attention (Wang et al. 2021, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overt import _check
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.site import KINDS, Kind, Site


@dataclass(frozen=True)
class Evolving(Mechanism):
    """A layer's map starts from the previous layer's and is refined by a convolution over all heads' maps.

    Equation 4: input = α·previous + (1 − α)·current; evolved = β·ReLU(conv(input)) + (1 − β)·input.

    The paper's ablations are settings: `beta=0` (no convolution), `alpha=0` (no skip), `kernel_size=1`,
    `kernel_size=5`, `convolve=("decoder", "cross")` (no convolution in the encoder, whose skip stays);
    `Evolving.realformer()` is He et al. 2020.

    Args:
        alpha: weight of the previous layer's evolved logits.
        beta: weight of the convolution.
        kernel_size: width and height of the convolution, odd.
        decoder_alpha: alpha in decoder self- and cross-attention. None means 0 in an encoder–decoder, where
            the paper found skips harmful (section 4.3), and `alpha` in a decoder-only model.
        init: "dirac", the identity kernel with zero bias, hardly changes a pretrained model and trains from
            the first step; "kaiming" draws it at random (He et al. 2015); "lecun" is what the released code
            uses, a truncated normal of variance 1 / fan-in.
        ramp_steps: raise alpha and beta linearly from 0 over this many steps.
        skip: "mix" is equation 4; "add" adds alpha times the previous logits to the current ones, without a
            convolution (`realformer`).
        convolve: the kinds of attention that have a convolution: "encoder", "decoder" (its self-attention),
            "cross". The others have the skip alone, and no parameters.
        first: whether a chain's first layer, which has no previous map, has a convolution too. The paper does
            not say; the parameters that its Table 5 counts are those of `first=True`.
    """

    alpha: float = 0.1
    beta: float = 0.1
    kernel_size: int = 3
    decoder_alpha: float | None = None
    init: Literal["dirac", "kaiming", "lecun"] = "dirac"
    ramp_steps: int = 0
    skip: Literal["mix", "add"] = "mix"
    convolve: tuple[Kind, ...] = KINDS
    first: bool = False

    def __post_init__(self) -> None:
        _check.fraction("alpha", self.alpha)
        _check.fraction("beta", self.beta)
        if self.decoder_alpha is not None:
            _check.fraction("decoder_alpha", self.decoder_alpha)
        _check.whole("kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")
        _check.one_of("init", self.init, ("dirac", "kaiming", "lecun"))
        _check.one_of("skip", self.skip, ("mix", "add"))
        _check.whole("ramp_steps", self.ramp_steps, 0)
        if self.skip == "add" and self.beta != 0.0:
            raise ValueError(f'beta must be 0 with skip="add", which has no convolution; got {self.beta}')
        if not isinstance(self.convolve, list | tuple):
            raise TypeError(f'convolve must be a tuple of kinds, such as ("encoder",), got {self.convolve!r}')
        for kind in self.convolve:
            _check.one_of("convolve", kind, KINDS)
        object.__setattr__(self, "convolve", tuple(kind for kind in KINDS if kind in self.convolve))
        if not isinstance(self.first, bool):
            raise TypeError(f"first must be True or False, got {self.first!r}")
        if self.first and self.skip == "add":
            raise ValueError('first must be False with skip="add", which has no convolution')

    @classmethod
    def realformer(cls, decoder_alpha: float | None = None) -> Evolving:
        """RealFormer: adds the previous logits, unweighted, without a convolution.

        Not the same as `beta=0`, which averages previous and current logits.
        """
        return cls(alpha=1.0, beta=0.0, decoder_alpha=decoder_alpha, skip="add")

    def alpha_at(self, site: Site) -> float:
        """The alpha in effect at a site; see `decoder_alpha`."""
        if site.kind == "encoder":
            return self.alpha
        if self.decoder_alpha is not None:
            return self.decoder_alpha
        return 0.0 if site.encoder_decoder or site.kind == "cross" else self.alpha

    def convolves_at(self, site: Site) -> bool:
        """Whether maps of a site's kind are convolved; those that start a chain only with `first`."""
        return self.skip == "mix" and site.kind in self.convolve
