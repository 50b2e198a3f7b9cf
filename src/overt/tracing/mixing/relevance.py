"""Gradient-weighted attention (Chefer et al. 2021, "generic attention explainability").

Relevance starts as the identity, and each layer adds to it: R ← R + Ā·R with Ā = mean_h max(0, A ⊙ ∂y/∂A), y
being the target's logit. Rollout over these maps is that product: with a residual of one half, each level is
(I + Ā) / 2, so that L layers give R / 2^L, in the same order of tokens.
"""

from __future__ import annotations

from overt.tracing.capture import CapturedAttention
from overt.tracing.mixing.gradient import Gradient
from overt.tracing.mixing.mixing import register_mixing


@register_mixing
class Relevance(Gradient):
    """The maps of "gradient" as they are: what a layer adds stays small where its gradients are."""

    name = "relevance"
    title = "relevance"
    unit = False
    signed = True  # none is negative, but like signed weights these keep the sums of their rows in rollout

    @classmethod
    def titled(cls, method: str) -> str:
        """The rollout of these maps is what the paper calls relevance."""
        return {"raw": "attention × gradient", "rollout": cls.title}.get(method, f"{cls.title} {method}")

    def map(self, call: CapturedAttention) -> None:
        """Keep the weights for later; of self-attention alone."""
        if call.kind == "cross":
            raise ValueError(
                f"mixing={self.name!r} is for models with self-attention alone, and {call.path} is "
                'cross-attention: use mixing="gradient"'
            )
        super().map(call)
