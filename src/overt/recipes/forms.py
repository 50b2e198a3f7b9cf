"""The four forms of attention that the demo and the flow tables train from scratch."""

from __future__ import annotations

from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.mechanism import Mechanism

# The prior used for the published results. In the paper's text the prior's α is larger by 1/β, which slows
# down the learning of sharp maps from scratch.
_BAYESIAN = Bayesian.paper(k=10.0, preset="official")
_EVOLVING = Evolving(alpha=0.1, beta=0.1)
FORMS: dict[str, tuple[Mechanism, ...]] = {
    "plain": (),
    "evolving": (_EVOLVING,),
    "Bayesian": (_BAYESIAN,),
    "both": (_EVOLVING, _BAYESIAN),
}
