"""What one forward pass passes from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from overt import _check
from overt.mechanisms import backend
from overt.mechanisms.maps import as_wide, stacked

if TYPE_CHECKING:
    from overt.mechanisms.site import Site

T = TypeVar("T")
Place = tuple[str, int]
Owned = tuple[str, str, int]  # a mechanism's name, and a place
_surrounding: ContextVar[Chain | None] = ContextVar("overt_chain", default=None)
_rerunning: ContextVar[bool] = ContextVar("overt_again", default=False)
REENTRANT = (
    "reentrant checkpointing cuts the chain of maps and gives wrong gradients; "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class AddsLoss(Protocol):
    """A mechanism, as far as a chain is concerned."""

    def loss_weight(self, step: Tensor | None) -> Tensor | float:
        """λ(t), the factor of its terms."""


class Kept(NamedTuple):
    """Rows of a map kept for later rows, perhaps of a batch that has been reordered since.

    Beam search reorders after every token. Reordering only notes the order, and whoever reads the rows next
    follows it, which saves a copy.

    Attributes:
        rows: (examples, heads, rows, key).
        order: (batch,), whose rows each example has; None if each has its own.
    """

    rows: Tensor
    order: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of examples."""
        return (self.rows if self.order is None else self.order).shape[0]

    def in_order(self) -> Tensor:
        """The rows, (batch, heads, rows, key)."""
        return self.rows if self.order is None else self.rows.index_select(0, self.order)


class Chain:
    """The state of one forward pass: maps of earlier layers, kept rows, KL, and the address of the noise.

    Create a new chain for each forward pass and pass it to every attention of the model; they fill it:

    ```python
    chain = overt.Chain(step=t)
    loss = task_loss(model(x, chain=chain)) + chain.penalty()
    ```

    Inside it, the chains of encoder, decoder-self and cross attention are separate.

    Graph attention also uses the chain of a surrounding `with`, for models whose `forward` takes no chain:

    ```python
    with overt.Chain(step=t) as chain:
        loss = task_loss(model(x, edge_index))
    ```

    Args:
        step: training step t. It addresses the noise and drives `rho` and `ramp_steps`; whatever needs a step
            and has none raises an error.
        seed: key of the noise, any 64-bit integer.
        generator: draws the seed once, in place of `seed`. The global generator is never touched.
        sample: which posterior sample to draw, a number or one number per example, in training or
            evaluation. None draws sample 0 in training mode and uses the mean of the weights in
            evaluation mode.
        examples: global number of each example in the batch, or of the first example. Noise follows an
            example by its number, whatever batch or process it falls into.
        keep: keep the map rows that the next query rows need, so that decoder rows can be fed in pieces, in
            order, one Chain per sequence.
        kl: whether to compute the KL. None computes it in training mode, except with `keep`. With `keep` and
            True, the pieces' KLs are joined into that of all rows so far; under a causal mask, where keys
            arrive with the rows, a contextual prior covers the keys known at each piece.
        gaps: whether layers may be skipped, as layer drop does in training; a map then starts from that of
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
        # Stored as tensors: a Python number would make torch.compile recompile at each step.
        self.step = None if step is None else torch.as_tensor(step, dtype=torch.int64)
        if generator is not None:
            random_seed = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=generator.device)
            self.seed = random_seed.cpu()
            self.seed_number = int(self.seed)
        else:
            wrapped = (seed + 2**63) % 2**64 - 2**63  # the low 64 bits of any integer
            self.seed = torch.tensor(wrapped, dtype=torch.int64)
            self.seed_number = wrapped
        self.sample = None if sample is None else torch.as_tensor(sample, dtype=torch.int64)
        self.examples = torch.as_tensor(examples, dtype=torch.int64)
        self.keep, self.wants_kl, self.gaps = keep, kl, gaps
        self.maps: dict[Owned, Tensor] = {}
        self.rows: dict[Owned, Kept] = {}
        self.edges: dict[Place, Tensor] = {}
        self.fed: dict[Place, int] = {}
        self._owners: dict[Place, object] = {}
        self._losses: dict[Owned, tuple[Tensor, AddsLoss]] = {}
        self._pieces: dict[Owned, tuple[Tensor, Tensor | None]] = {}
        self._called: dict[object, list[int]] = {}
        self._entered: list[Token[Chain | None]] = []
        self._constants: dict[Hashable, Any] = {}
        self._off: str | None = None
        self._begun = False

    def __enter__(self) -> Self:
        self._entered.append(_surrounding.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        _surrounding.reset(self._entered.pop())

    @property
    def switched_off(self) -> str | None:
        """Why this pass uses no faster forms; decided when it starts, so that recomputed blocks agree."""
        if not self._begun:
            self._off, self._begun = backend.switched_off(), True
        return self._off

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What several layers need, and what does not change in this pass; the first that asks makes it."""
        if torch.compiler.is_compiling():  # compilers merge equal constants, and some refuse side effects
            return make()
        if key not in self._constants:
            self._constants[key] = make()
        made: T = self._constants[key]
        return made

    def previous(self, site: Site, owner: str) -> Tensor | None:
        """What the layer below left (`carry`); None where layers may be skipped and all below were."""
        below = self.maps.get((owner, site.kind, site.layer - 1))
        if below is None and self.gaps:
            layers = [layer for name, kind, layer in self.maps if (name, kind) == (owner, site.kind)]
            layers = [layer for layer in layers if layer < site.layer]
            return self.maps[owner, site.kind, max(layers)] if layers else None
        if below is None and recomputing() and (site.kind, site.layer - 1) in self._owners:
            raise RuntimeError(REENTRANT)  # the map existed, but was freed, as no gradient needed it
        if below is None:
            raise ValueError(
                f"layer {site.layer} of the {site.kind} chain found no map of layer {site.layer - 1}: "
                "number the attentions layer=0, 1, 2, …, pass them all the same Chain, and let each layer "
                "call Chain.carry"
            )
        return below

    def claim(self, site: Site, owner: object) -> None:
        """Refuse a second attention in the same place: the two would share noise and overwrite each other."""
        if self._owners.setdefault(site.place, owner) is not owner:
            raise ValueError(
                f"two attentions are both layer {site.layer} of the {site.kind} chain: "
                "number them layer=0, 1, 2, …"
            )

    @property
    def used(self) -> bool:
        """Whether attentions with mechanisms have run in it."""
        return bool(self._owners)

    def layer_number(self, owner: object) -> int:
        """The layer of an attention made without one: the number of such calls before it in this pass."""
        calls = self._called.setdefault(owner, [])
        if not recomputing():
            calls.append(sum(map(len, self._called.values())))
        elif len(calls) != 1:
            raise ValueError(
                "a checkpointed attention that is called more than once in a pass cannot be numbered by its "
                "calls: give each call its own layer"
            )
        return calls[-1]

    def carry(self, site: Site, owner: str, left: Tensor) -> None:
        """Leave something, such as evolved logits, for the same mechanism in the layer above."""
        place = owner, *site.place
        if recomputing() and place in self.maps:
            _refuse_reentrant(self.maps[place], left)
            return  # the autograd graph is attached to the first pass's map
        self.maps[place] = left
        if not torch.is_grad_enabled():
            self.maps.pop((owner, site.kind, site.layer - 1), None)

    def keep_rows(self, site: Site, owner: str, rows: Tensor, count: int) -> Tensor | None:
        """The rows above these that an earlier piece left, if any; keeps those that the next piece will read.

        With `keep=False`, where all rows come at once, it returns None and keeps nothing. Near the start it
        returns fewer than `count` rows. Columns that did not exist when a row was kept are zero.

        Args:
            site: where the map is.
            owner: name of the mechanism, `MechanismLayer.name`.
            rows: (batch, heads, query, key), of this piece.
            count: how many rows above each row are read.
        """
        if not self.keep:
            return None
        place = owner, *site.place
        kept = self.rows.get(place)
        rows_above = None if kept is None else as_wide(kept.in_order(), rows)
        if count <= rows.shape[-2] or rows_above is None:
            first = max(rows.shape[-2] - count, 0)
            left = rows[..., first:, :].clone() if first else rows  # a view would keep the map in memory
        else:
            first = max(rows_above.shape[-2] + rows.shape[-2] - count, 0)
            left = stacked(rows_above[..., first:, :], rows)
        self.rows[place] = Kept(left)
        return rows_above

    def kept_rows(self, site: Site, owner: str, shape: tuple[int, int, int, int]) -> Kept | None:
        """The rows that an earlier piece left for a map of this shape, not yet in order; None without any.

        For forms that read and replace them by themselves (`put_rows`), in place of `keep_rows`.
        """
        kept = self.rows.get((owner, *site.place)) if self.keep else None
        if kept is not None and (
            kept.batch != shape[0] or kept.rows.shape[1] != shape[1] or kept.rows.shape[3] > shape[3]
        ):
            raise ValueError(
                f"kept rows of shape {(kept.batch, *kept.rows.shape[1:])} do not fit on top of {shape}: "
                "make a new Chain for each sequence"
            )
        return kept

    def put_rows(self, site: Site, owner: str, rows: Tensor) -> None:
        """Keep these rows, (batch, heads, rows, key), in place of any others; nothing with `keep=False`."""
        if self.keep:
            self.rows[owner, *site.place] = Kept(rows)

    def add_loss(self, site: Site, term: Tensor, mechanism: AddsLoss, cells: Tensor | None = None) -> None:
        """Record what one layer adds to the loss, per example, (batch,), before `Mechanism.loss_weight`.

        With `keep`, where rows are fed in pieces, a layer's terms are joined: averaged where they are means,
        else added up.

        Args:
            site: where the map is.
            term: (batch,).
            mechanism: the layer's settings.
            cells: (batch,), how many cells of the map `term` is the mean of; None for a sum.
        """
        if not hasattr(mechanism, "loss_weight"):
            raise TypeError(
                f"add_loss takes the mechanism's settings, self.config, got {type(mechanism).__name__}"
            )
        if term.dim() != 1:
            name = type(mechanism).__name__
            raise ValueError(f"{name} must add a term of shape (batch,) to the loss, got {tuple(term.shape)}")
        place = type(mechanism).__name__, *site.place
        if recomputing() and place in self._losses:
            _refuse_reentrant(self._losses[place][0], term)
            return
        self._losses[place] = (self._joined(place, term, cells) if self.keep else term, mechanism)

    def _joined(self, place: Owned, term: Tensor, cells: Tensor | None) -> Tensor:
        """The term of all rows so far, of which the last piece has this one."""
        total = term if cells is None else term * cells
        if place in self._pieces:
            earlier, earlier_cells = self._pieces[place]
            total = earlier + total
            cells = None if cells is None or earlier_cells is None else earlier_cells + cells
        self._pieces[place] = total, cells
        return total if cells is None else total / cells.clamp(min=1)

    def first_row(self, site: Site, queries: int, keys: int) -> int:
        """Absolute position of the first of these query rows; counts them when rows are kept."""
        first = keys - queries if site.kind == "decoder" else 0
        if not self.keep or recomputing():
            return first
        fed = self.fed.get(site.place, 0)
        if site.kind == "decoder" and first != fed:
            raise ValueError(
                f"after {fed} rows fed in pieces, {queries} more need {fed + queries} keys, got {keys}: "
                "pass every key so far, and make a new Chain for each sequence"
            )
        self.fed[site.place] = fed + queries
        return fed

    def kl(self, per_example: bool = False) -> Tensor:
        """Unweighted KL of the last forward pass: summed over layers, averaged over the batch; 0 without one.

        Terms that other mechanisms add to the loss are included. `per_example=True` skips the average and
        returns shape (batch,).
        """
        return _total([term for term, _ in self._losses.values()], per_example)

    def penalty(self, per_example: bool = False) -> Tensor:
        """The term to add to the loss: λ(t)·KL, summed over layers, averaged over examples by default."""
        by_mechanism: list[tuple[AddsLoss, list[Tensor]]] = []
        for term, mechanism in self._losses.values():
            terms = next((terms for other, terms in by_mechanism if other is mechanism), None)
            if terms is None:
                by_mechanism.append((mechanism, [term]))
            else:
                terms.append(term)
        weighted = [
            _weighted(_total(terms, per_example), mechanism.loss_weight(self.step))
            for mechanism, terms in by_mechanism
        ]
        return _total(weighted, per_example=True)

    def mechanism(self) -> AddsLoss | None:
        """The mechanism that all loss terms belong to; None if there are several mechanisms or no terms."""
        mechanisms = [mechanism for _, mechanism in self._losses.values()]
        if not mechanisms or any(mechanism is not mechanisms[0] for mechanism in mechanisms):
            return None
        return mechanisms[0]

    def weight(self) -> Tensor | float | None:
        """The factor of the terms in the loss; None if they belong to several mechanisms."""
        mechanism = self.mechanism()
        return None if mechanism is None else mechanism.loss_weight(self.step)

    @property
    def has_loss(self) -> bool:
        """Whether any layer added a term to the loss."""
        return len(self._losses) > 0


def around() -> Chain | None:
    """The chain of the innermost `with chain:` around the caller, if any."""
    return _surrounding.get()


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


@contextmanager
def running_again() -> Iterator[None]:
    """Inside, layers run a second time in the same pass and keep their places in the chain."""
    token = _rerunning.set(True)
    try:
        yield
    finally:
        _rerunning.reset(token)


def recomputing() -> bool:
    """Whether a block is being rerun: by checkpointing in the backward pass, or in `running_again`."""
    if torch.compiler.is_compiling():
        return False
    return _rerunning.get() or bool(torch._C._current_graph_task_id() != -1)
