"""One forward pass through an attached model: its chains, and what decoding stores from step to step.

A hook on the outermost model creates the pass. It reaches the attentions as a keyword argument, which a
checkpointed layer stores for its recomputation. If a family drops keyword arguments on the way, attentions
use the innermost running pass: in a recomputation, the one that their layer was called with.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overt.attaching.mask_origin import MaskOrigin
from overt.mechanisms.chain import Chain, Kept, Owned, Place
from overt.mechanisms.seen import Seen

if TYPE_CHECKING:
    from transformers import Cache

KEYWORD = "overt_pass"
# Chains of one model must not share noise: the seed of chain n is n strides away from the model's.
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass
class DecodingState:
    """What decoding stores with a cache: the map rows that later rows will read.

    Attributes:
        token: token of the model that filled the cache.
        layer: the cache layer whose length gives the number of tokens.
        rows: chain → mechanism and place → (batch, heads, rows, key), in whatever order.
        fed: chain → place → number of rows fed so far.
        length: number of tokens in the cache.
    """

    token: str = ""
    layer: int = 0
    rows: dict[str, dict[Owned, Kept]] = field(default_factory=dict)
    fed: dict[str, dict[Place, int]] = field(default_factory=dict)
    length: int = 0

    def chain(self, name: str) -> tuple[dict[Owned, Kept], dict[Place, int]]:
        """Rows and counts of one chain."""
        return self.rows.setdefault(name, {}), self.fed.setdefault(name, {})

    def select(self, index: Tensor) -> None:
        """Select examples of the batch, as beam search does."""
        # One index for all places, copied: its owner may change it before the rows are read.
        orders: dict[tuple[int | None, torch.device], Tensor] = {}
        for rows in self.rows.values():
            for place, kept in rows.items():
                device, before = kept.rows.device, kept.order
                key = None if before is None else id(before), device
                if key not in orders:
                    moved = index.to(device, copy=True)
                    orders[key] = moved if before is None else before.index_select(0, moved)
                rows[place] = Kept(kept.rows, orders[key])

    def repeat(self, repeats: int) -> None:
        """Repeat each example of the batch."""
        for rows in self.rows.values():
            for place, kept in rows.items():
                rows[place] = Kept(kept.in_order().repeat_interleave(repeats, dim=0))

    def refuse_to_crop(self) -> None:
        """Refuse if map rows are stored: those of the remaining tokens would be needed, and are gone."""
        if mechanisms := {name for rows in self.rows.values() for name, *_ in rows}:
            raise RuntimeError(
                f"a cache with {' and '.join(sorted(mechanisms))} "
                "cannot be cropped, rows of earlier maps being gone: generate without assisted decoding and "
                "prompt lookup"
            )

    def crop(self, length: int) -> None:
        """Drop tokens from the end."""
        for counts in self.fed.values():
            for place in counts:
                counts[place] = length
        self.length = length

    def clear(self) -> None:
        """Drop everything."""
        self.rows.clear()
        self.fed.clear()
        self.length = 0


class Pass:
    """The state of one forward pass.

    Attributes:
        token: token of the model that it belongs to.
        training: whether the model is in training mode; decides once what is drawn and stored.
        wants_kl: whether to compute the KL.
        chains: chain name → Chain.
        real: list of layers → (batch, query), which of its queries are not padding; None if none is padding.
        past: stack → number of tokens in the cache before this pass.
        decoding: stack → the decoding state stored with its cache.
        cached: stack → the cache passed to it. No KL is computed with a cache: the prior would know only the
            keys so far.
        sizes: stack → number of inputs passed to it.
        passed: names of the callers' keyword arguments, which are passed all the way down.
        ran: whether any attached attention has run.
        calls: chain and kind → how many attentions have run, for modules that layers share.
        done: attentions that have run.
        batch: number of examples, once known.
        weights: whether attention weights were requested.
        masks: under a compiler, masks and how they were built.
        looked_at: under a compiler, masks whose values are checked, and for which kind of attention.
    """

    def __init__(
        self,
        token: str,
        training: bool,
        wants_kl: bool,
        address: dict[str, Any],
        seed: int,
        seen: Tensor | None = None,
    ) -> None:
        self.token, self.training, self.wants_kl = token, training, wants_kl
        self.address, self.seed, self.seen = address, seed, seen
        self.chains: dict[str, Chain] = {}
        self.real: dict[str, Tensor | None] = {}
        self.past: dict[str, int] = {}
        self.decoding: dict[str, DecodingState] = {}
        self.cached: dict[str, Cache] = {}
        self.sizes: dict[str, int] = {}
        self.passed: set[str] = set()
        self.ran = False
        self.calls: dict[tuple[str, str], int] = {}
        self.done: set[str] = set()
        self.batch: int | None = None
        self.weights = False
        self.masks: list[tuple[Tensor, MaskOrigin]] = []
        self.looked_at: list[tuple[Tensor, str]] = []
        self._visible: dict[tuple[object, ...], tuple[Tensor | None, Tensor | None, Seen]] = {}

    def chain(self, name: str, number: int, stack: str, keeps: bool) -> Chain:
        """The chain of this name, created on first use."""
        chain = self.chains.get(name)
        if chain is not None:
            return chain
        keep = keeps and not self.training
        wants_kl = self.wants_kl and (self.training or stack not in self.cached)
        address = _row_address(self.address, self.batch)
        if self.seen is not None:
            address["examples"] = first_example(self.seen, self.batch or 0)
        seed = self.seed + number * SEED_STRIDE
        chain = Chain(seed=seed, keep=keep, kl=wants_kl, gaps=self.training, **address)
        decoding = self.decoding.get(stack)
        if keep and decoding is not None:
            chain.rows, chain.fed = decoding.chain(name)
        self.chains[name] = chain
        return chain

    def may_hold(self, stack: str, layer: int, keys: int, total: int) -> bool:
        """Whether a layer of the stack's cache may return this many keys after `total` tokens.

        A static cache has room for more keys; a sliding cache has dropped the first ones.
        """
        cache = self.cached.get(stack)
        cache = getattr(cache, "self_attention_cache", cache)
        layers = getattr(cache, "layers", ())
        if layer >= len(layers):
            return False
        cache_layer = layers[layer]
        room = int(cache_layer.get_max_length())
        return keys == room if keys > total else bool(getattr(cache_layer, "is_sliding", False))

    def visible(
        self,
        shown: Tensor | None,
        real: Tensor | None,
        causal: bool,
        batch: int,
        queries: int,
        keys: int,
        device: torch.device,
    ) -> Seen:
        """Which cells are visible, from the keys and queries that are not padding; shared by all layers.

        `real`, (batch or 1, tokens), may begin with tokens before the queries.
        """

        def make() -> Seen:
            there = None if shown is None else shown.to(device)
            rows = None
            if real is not None:  # kernels read it in one piece
                rows = real[:, real.shape[1] - queries :].to(device).expand(batch, queries).contiguous()
            return Seen(there, rows, causal)

        if torch.compiler.is_compiling():
            return make()
        place = id(shown), id(real), causal, batch, queries, keys, device
        if place not in self._visible:  # the tensors are stored too, so that their ids stay taken
            self._visible[place] = shown, real, make()
        return self._visible[place][2]


def tokens_in(cache: Cache | None, layer: int) -> int:
    """Number of tokens in a cache, from a layer that attends; others of a hybrid model may not count."""
    return 0 if cache is None else int(cache.get_seq_length(layer))


def _row_address(address: dict[str, Any], batch: int | None) -> dict[str, Any]:
    """The noise address of each row of the batch.

    An example may have several rows: the choices of a question, the windows of an image.
    """
    examples, sample = address.get("examples"), address.get("sample")
    if not isinstance(examples, Tensor) or examples.dim() == 0 or not batch or batch % examples.shape[0]:
        return dict(address)
    count = batch // examples.shape[0]
    rows = examples.view(-1, 1) * count + torch.arange(count, device=examples.device)
    if isinstance(sample, Tensor) and sample.dim() > 0:
        sample = sample.repeat_interleave(count)
    return {**address, "examples": rows.view(-1), "sample": sample}


def first_example(seen: Tensor, batch: int) -> Tensor:
    """Number of this process's first example, if processes take batches in turn, as data loaders do."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seen
    return seen * torch.distributed.get_world_size() + torch.distributed.get_rank() * batch


class _ThreadPasses(threading.local):
    """The passes running in a thread, innermost last; compilers also see the current thread's list."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_running = _ThreadPasses()


def _running_here() -> list[Pass]:
    return _running.passes


def push(current: Pass) -> None:
    """Start a pass in this thread, inside those that are running."""
    _running_here().append(current)


def pop(current: Pass) -> None:
    """End a pass, and any inner passes that an interrupted model left behind."""
    passes = _running_here()
    while passes:
        if passes.pop() is current:
            return


def pass_in(kwargs: dict[str, Any], token: str) -> Pass | None:
    """The pass among the keyword arguments, or else the running pass of this model."""
    current: Pass | None = kwargs.get(KEYWORD)
    return running(token) if current is None else current


def innermost() -> Pass | None:
    """The innermost pass running in this thread."""
    passes = _running_here()
    return passes[-1] if passes else None


def running(token: str) -> Pass | None:
    """The innermost pass of this model running in this thread."""
    for current in reversed(_running_here()):
        if current.token == token:
            return current
    return None


_classes: dict[type, type] = {}


def store_on(cache: Cache, decoding: DecodingState) -> None:
    """Store a decoding state on a cache; it is reordered, repeated, cropped, reset and copied with it."""
    cache.overt_decoding = decoding  # type: ignore[attr-defined]
    if not isinstance(cache, _CacheMixin):
        cache.__class__ = _cache_class(type(cache))


def _cache_class(plain: type) -> type:
    """A cache's class with `_CacheMixin` mixed in."""
    if plain not in _classes:
        names = {"__module__": plain.__module__, "overt_plain": plain}
        _classes[plain] = type(plain.__name__, (_CacheMixin, plain), names)
    return _classes[plain]


def _unpickle_cache(plain: type, state: dict[str, Any]) -> Any:
    cache: Any = object.__new__(plain)
    cache.__dict__.update(state)
    cache.__class__ = _cache_class(plain)
    return cache


class _CacheMixin:
    """Mixed into a cache's class, so that the stored map rows follow what happens to the cache."""

    overt_decoding: DecodingState
    overt_plain: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickle_cache, (self.overt_plain, self.__dict__)

    # generate() would compile the step for a static cache; the number of stored rows changes with each step.
    is_compileable = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.overt_decoding.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.overt_decoding.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.overt_decoding.repeat(repeats)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        if any(value != 0 for value in (*args, *kwargs.values())):
            self.overt_decoding.refuse_to_crop()
        super().crop(*args, **kwargs)  # type: ignore[misc]
        self.overt_decoding.crop(int(self.get_seq_length(self.overt_decoding.layer)))  # type: ignore[attr-defined]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.overt_decoding.clear()
