"""What one forward pass hands from layer to layer."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from overt import _check
from overt.mechanisms import backend

if TYPE_CHECKING:
    from overt.mechanisms.bayesian.config import Bayesian
    from overt.mechanisms.site import Site

Place = tuple[str, int]
_around: ContextVar[Chain | None] = ContextVar("overt_chain", default=None)
REENTRANT = (
    "reentrant checkpointing cuts the chain of maps and gives wrong gradients; "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Chain:
    """The thread that runs through one forward pass: previous maps, kept rows, KL, and the noise's address.

    Make a fresh one for each forward pass and hand it to every attention of the model, which fills it:

    ```python
    chain = overt.Chain(step=t)
    loss = task_loss(model(x, chain=chain)) + chain.penalty()
    ```

    The chains of encoder, decoder-self and cross attention are kept apart inside it.

    Graph attention also finds it by itself, for models whose `forward` has no place for one:

    ```python
    with overt.Chain(step=t) as chain:
        loss = task_loss(model(x, edge_index))
    ```

    Args:
        step: training step t. It addresses the noise and drives `rho` and `ramp_steps`; anything that needs
            it and does not find it says so.
        seed: key of the noise, any 64-bit integer.
        generator: draws the seed, once, in place of `seed`. The global generator is never touched.
        sample: which posterior sample to draw, a number or one number per example, in training or
            evaluation. None draws sample 0 in training mode and uses the mean of the weights in
            evaluation mode.
        examples: global number of each example in the batch, or that of the first. Noise follows an example
            by its number, whatever batch or process it falls into.
        keep: keep the map rows that the next query rows need, so that decoder rows can be fed in pieces, in
            order, one Chain per sequence.
        kl: whether to compute the KL. None computes it in training mode, and not with `keep`.
        gaps: whether layers may be left out, as layer drop does in training; a map then starts from that of
            the last layer that ran.
    """

    def __init__(
        self,
        *,
        step: int | Tensor | None = None,
        seed: int = 0,
        generator: torch.Generator | None = None,
        sample: int | Tensor | None = None,
        examples: int | Tensor = 0,
        keep: bool = False,
        kl: bool | None = None,
        gaps: bool = False,
    ) -> None:
        for name, value in (("step", step), ("sample", sample), ("examples", examples)):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.bool):
                raise TypeError(f"{name} must hold whole numbers, got a {value.dtype} tensor")
            if value is not None and not isinstance(value, Tensor):
                _check.whole(name, value, 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number, got {seed!r}")
        # Kept as tensors: a Python number here would make torch.compile build anew at each step.
        self.step = None if step is None else torch.as_tensor(step, dtype=torch.int64)
        if generator is not None:
            drawn = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=generator.device)
            self.seed = drawn.cpu()
            self.seed_number = int(self.seed)
        else:
            wrapped = (seed + 2**63) % 2**64 - 2**63  # any integer, by its low 64 bits
            self.seed = torch.tensor(wrapped, dtype=torch.int64)
            self.seed_number = wrapped
        self.sample = None if sample is None else torch.as_tensor(sample, dtype=torch.int64)
        self.examples = torch.as_tensor(examples, dtype=torch.int64)
        self.keep, self.wants_kl, self.gaps = keep, kl, gaps
        self.maps: dict[Place, Tensor] = {}
        self.rows: dict[Place, Tensor] = {}
        self.edges: dict[Place, Tensor] = {}
        self.fed: dict[Place, int] = {}
        self._owners: dict[Place, object] = {}
        self._kl: dict[Place, tuple[Tensor, Bayesian]] = {}
        self._called: dict[object, list[int]] = {}
        self._entered: list[Token[Chain | None]] = []
        self._off: str | None = None
        self._begun = False

    def __enter__(self) -> Self:
        self._entered.append(_around.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        _around.reset(self._entered.pop())

    @property
    def switched_off(self) -> str | None:
        """Why this pass has no faster forms, decided as it begins: recomputed blocks go the same way."""
        if not self._begun:
            self._off, self._begun = backend.switched_off(), True
        return self._off

    def previous(self, site: Site) -> Tensor | None:
        """The evolved logits that the layer below left; None where layers may be left out and all were."""
        below = self.maps.get((site.kind, site.layer - 1))
        if below is None and self.gaps:
            layers = [layer for kind, layer in self.maps if kind == site.kind and layer < site.layer]
            return self.maps[site.kind, max(layers)] if layers else None
        if below is None and recomputing() and (site.kind, site.layer - 1) in self._owners:
            raise RuntimeError(REENTRANT)  # it was there, and was let go of without a gradient to keep it for
        if below is None:
            raise ValueError(
                f"layer {site.layer} of the {site.kind} chain found no map of layer {site.layer - 1}: "
                "number the attentions layer=0, 1, 2, … and hand them all the same Chain"
            )
        return below

    def claim(self, site: Site, owner: object) -> None:
        """Refuse a second attention in a place: they would share noise and overwrite each other."""
        if self._owners.setdefault(site.place, owner) is not owner:
            raise ValueError(
                f"two attentions are both layer {site.layer} of the {site.kind} chain: "
                "number them layer=0, 1, 2, …"
            )

    def numbered(self, owner: object) -> int:
        """The layer of an attention that was given none: how many calls of such came before in this pass."""
        calls = self._called.setdefault(owner, [])
        if not recomputing():
            calls.append(sum(map(len, self._called.values())))
        elif len(calls) != 1:
            raise ValueError(
                "a checkpointed attention that is called more than once in a pass cannot be numbered by its "
                "calls: give each call a layer of its own"
            )
        return calls[-1]

    def carry(self, site: Site, evolved: Tensor) -> None:
        """Leave this layer's evolved logits for the layer above."""
        if recomputing() and site.place in self.maps:
            _refuse_reentrant(self.maps[site.place], evolved)
            return  # the first pass's map is the one that the graph hangs on
        self.maps[site.place] = evolved
        if not torch.is_grad_enabled():
            self.maps.pop((site.kind, site.layer - 1), None)

    def record_kl(self, site: Site, kl: Tensor, config: Bayesian) -> None:
        """Note one layer's KL per example, (batch,)."""
        if recomputing() and site.place in self._kl:
            _refuse_reentrant(self._kl[site.place][0], kl)
            return
        self._kl[site.place] = (kl, config)

    def first_row(self, site: Site, queries: int, keys: int) -> int:
        """Absolute position of the first of these query rows; counts them when rows are kept."""
        first = keys - queries if site.kind == "decoder" else 0
        if not self.keep or recomputing():
            return first
        fed = self.fed.get(site.place, 0)
        if site.kind == "decoder" and first != fed:
            raise ValueError(
                f"after {fed} rows fed in pieces, {queries} more need {fed + queries} keys, got {keys}: "
                "give every key so far, and make a fresh Chain for each sequence"
            )
        self.fed[site.place] = fed + queries
        return fed

    def kl(self, per_example: bool = False) -> Tensor:
        """KL of the last forward pass, unweighted: sum over layers, mean over the batch; 0 if there is none.

        `per_example=True` leaves out the average and gives shape (batch,).
        """
        return _total([kl for kl, _ in self._kl.values()], per_example)

    def penalty(self, per_example: bool = False) -> Tensor:
        """What joins the loss: λ(t)·KL, summed over layers, averaged over the batch unless `per_example`."""
        of_config: dict[str, tuple[Bayesian, list[Tensor]]] = {}
        for kl, config in self._kl.values():
            of_config.setdefault(config.settings, (config, []))[1].append(kl)
        weighted = [
            _weighted(_total(kls, per_example), config.annealing(self.step))
            for config, kls in of_config.values()
        ]
        return _total(weighted, per_example=True)

    @property
    def has_kl(self) -> bool:
        """Whether any layer recorded a KL."""
        return len(self._kl) > 0


def around() -> Chain | None:
    """The chain of the innermost `with chain:` around the caller, if any."""
    return _around.get()


def _total(parts: list[Tensor], per_example: bool) -> Tensor:
    if not parts:
        return torch.zeros(())
    first, *rest = [part.to(parts[0].device) for part in parts]
    if rest and all(part.shape == first.shape for part in rest):
        total = torch.stack([first, *rest]).sum(dim=0)
    else:
        total = sum(rest, first)
    return total if per_example else total.mean()


def _weighted(kl: Tensor, weight: Tensor | float) -> Tensor:
    if isinstance(weight, Tensor):
        return kl * weight.to(kl.device)
    return kl if weight == 1.0 else kl * weight


def _refuse_reentrant(first: Tensor, again: Tensor) -> None:
    if again.requires_grad and not first.requires_grad:
        raise RuntimeError(REENTRANT)


def recomputing() -> bool:
    """True while a checkpointed block runs again inside the backward pass."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)
