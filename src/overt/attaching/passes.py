"""One forward pass through an attached model: its chains, and what decoding keeps from step to step.

The pass is made by a hook on the outermost model and travels to the attentions as a keyword argument, which a
checkpointed layer keeps for its second run. Where a family drops keyword arguments on the way, the attentions
find the pass as the innermost one that is running: in a second run, the one that their layer was called with.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overt.attaching.mask_origin import MaskOrigin
from overt.mechanisms.chain import Chain, Owned, Place
from overt.mechanisms.seen import Seen

if TYPE_CHECKING:
    from transformers import Cache

KEYWORD = "overt_pass"
# Chains of one model must not share noise: each takes the next of these steps away from the seed.
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass
class DecodingState:
    """What decoding keeps beside a cache: the map rows that the next rows will read.

    Attributes:
        token: of the model that filled the cache.
        rows: chain → mechanism and place → (batch, heads, rows, key).
        fed: chain → place → number of rows fed so far.
        length: number of tokens in the cache.
        layer: the cache's layer that they are counted by.
    """

    token: str = ""
    layer: int = 0
    rows: dict[str, dict[Owned, Tensor]] = field(default_factory=dict)
    fed: dict[str, dict[Place, int]] = field(default_factory=dict)
    length: int = 0

    def chain(self, name: str) -> tuple[dict[Owned, Tensor], dict[Place, int]]:
        """Rows and counts of one chain."""
        return self.rows.setdefault(name, {}), self.fed.setdefault(name, {})

    def select(self, index: Tensor) -> None:
        """Take these examples of the batch, as beam search does."""
        for rows in self.rows.values():
            for place, kept in rows.items():
                rows[place] = kept.index_select(0, index.to(kept.device))

    def repeat(self, repeats: int) -> None:
        """Repeat each example of the batch."""
        for rows in self.rows.values():
            for place, kept in rows.items():
                rows[place] = kept.repeat_interleave(repeats, dim=0)

    def refuse_to_crop(self) -> None:
        """Refuse where rows of the tokens that stay would be needed."""
        if keeping := {name for kept in self.rows.values() for name, *_ in kept}:
            raise RuntimeError(
                f"a cache with {' and '.join(sorted(keeping))} "
                "cannot be cropped, rows of earlier maps being gone: generate without assisted decoding and "
                "prompt lookup"
            )

    def crop(self, length: int) -> None:
        """Forget tokens from the end."""
        for counts in self.fed.values():
            for place in counts:
                counts[place] = length
        self.length = length

    def clear(self) -> None:
        """Start anew."""
        self.rows.clear()
        self.fed.clear()
        self.length = 0


class Pass:
    """What one forward pass holds.

    Attributes:
        token: of the model it belongs to.
        training: whether the model trains, so that what is drawn and kept is decided once.
        wants_kl: whether the KL is to be computed.
        chains: chain name → Chain.
        real: list of layers → (batch, query), which of its queries are not padding; None where all are.
        past: stack → number of tokens in the cache before this pass.
        kept: stack → what its cache keeps.
        cached: stack → the cache it was given. Its KL is of no use: the prior knows the keys so far alone.
        sizes: stack → number of inputs it was given.
        passed: names of the keywords that callers gave, which go all the way down.
        ran: whether any attached attention has run.
        calls: chain and kind → how many attentions have run, for modules that layers share.
        done: attentions that have run.
        batch: number of examples, once known.
        weights: whether attention weights were asked for.
        masks: while a compiler looks on, masks and how they were made.
        looked_at: while a compiler looks on, masks whose values are checked, and for which kind of attention.
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
        self.kept: dict[str, DecodingState] = {}
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
        """The Chain of this name, made when first asked for."""
        chain = self.chains.get(name)
        if chain is not None:
            return chain
        keep = keeps and not self.training
        wants_kl = self.wants_kl and (self.training or stack not in self.cached)
        address = _of_rows(self.address, self.batch)
        if self.seen is not None:
            address["examples"] = first_example(self.seen, self.batch or 0)
        seed = self.seed + number * SEED_STRIDE
        chain = Chain(seed=seed, keep=keep, kl=wants_kl, gaps=self.training, **address)
        kept = self.kept.get(stack)
        if keep and kept is not None:
            chain.rows, chain.fed = kept.chain(name)
        self.chains[name] = chain
        return chain

    def may_hold(self, stack: str, layer: int, keys: int, total: int) -> bool:
        """Whether a layer of the stack's cache may hand out so many keys where there were `total` tokens.

        A static one has room for more, a sliding one has dropped the first.
        """
        cache = self.cached.get(stack)
        cache = getattr(cache, "self_attention_cache", cache)
        layers = getattr(cache, "layers", ())
        if layer >= len(layers):
            return False
        held = layers[layer]
        most = int(held.get_max_length())
        return keys == most if keys > total else bool(getattr(held, "is_sliding", False))

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
        """Which cells are visible, by keys and by queries that are not padding; one object for all layers."""

        def make() -> Seen:
            there = None if shown is None else shown.to(device)
            rows = None if real is None else real.to(device).expand(batch, queries)
            return Seen(there, rows, causal)

        if torch.compiler.is_compiling():
            return make()
        place = id(shown), id(real), causal, batch, queries, keys, device
        if place not in self._visible:  # kept beside it are the tensors whose identity is meant
            self._visible[place] = shown, real, make()
        return self._visible[place][2]


def tokens_in(cache: Cache | None, layer: int) -> int:
    """Number of tokens in a cache, by a layer of its that attends; others of a mixed model may not count."""
    return 0 if cache is None else int(cache.get_seq_length(layer))


def _of_rows(address: dict[str, Any], batch: int | None) -> dict[str, Any]:
    """The address of each row; an example may have several: the choices of a question, an image's windows."""
    examples, sample = address.get("examples"), address.get("sample")
    if not isinstance(examples, Tensor) or examples.dim() == 0 or not batch or batch % examples.shape[0]:
        return dict(address)
    count = batch // examples.shape[0]
    rows = examples.view(-1, 1) * count + torch.arange(count, device=examples.device)
    if isinstance(sample, Tensor) and sample.dim() > 0:
        sample = sample.repeat_interleave(count)
    return {**address, "examples": rows.view(-1), "sample": sample}


def first_example(seen: Tensor, batch: int) -> Tensor:
    """Number of this process's first example: batches are dealt to processes in turn, as data loaders do."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seen
    return seen * torch.distributed.get_world_size() + torch.distributed.get_rank() * batch


class _OfThread(threading.local):
    """The passes that are running in a thread, innermost last; compilers see the thread's own, too."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_running = _OfThread()


def _of_this_thread() -> list[Pass]:
    return _running.passes


def push(current: Pass) -> None:
    """A model begins."""
    _of_this_thread().append(current)


def pop(current: Pass) -> None:
    """A model ends; whatever an interrupted one left above it goes too."""
    passes = _of_this_thread()
    while passes:
        if passes.pop() is current:
            return


def pass_in(kwargs: dict[str, Any], token: str) -> Pass | None:
    """The pass that came as a keyword, or the one of this model that is running."""
    current: Pass | None = kwargs.get(KEYWORD)
    return running(token) if current is None else current


def innermost() -> Pass | None:
    """The innermost pass that is running in this thread."""
    passes = _of_this_thread()
    return passes[-1] if passes else None


def running(token: str) -> Pass | None:
    """The innermost pass of this model that is running in this thread."""
    for current in reversed(_of_this_thread()):
        if current.token == token:
            return current
    return None


_classes: dict[type, type] = {}


def keep_on(cache: Cache, kept: DecodingState) -> None:
    """Make `kept` live on a cache: reordered, repeated, cropped, reset and copied with it."""
    cache.overt_kept = kept  # type: ignore[attr-defined]
    if not isinstance(cache, _Keeping):
        cache.__class__ = _keeping(type(cache))


def _keeping(plain: type) -> type:
    if plain not in _classes:
        names = {"__module__": plain.__module__, "overt_plain": plain}
        _classes[plain] = type(plain.__name__, (_Keeping, plain), names)
    return _classes[plain]


def _restored(plain: type, state: dict[str, Any]) -> Any:
    cache: Any = object.__new__(plain)
    cache.__dict__.update(state)
    cache.__class__ = _keeping(plain)
    return cache


class _Keeping:
    """Mixed into a cache's class, so that kept rows follow what happens to it."""

    overt_kept: DecodingState
    overt_plain: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.overt_plain, self.__dict__)

    # generate() would compile the step for a static cache; the number of kept rows changes with each.
    is_compileable = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.overt_kept.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.overt_kept.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.overt_kept.repeat(repeats)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        if any(value != 0 for value in (*args, *kwargs.values())):
            self.overt_kept.refuse_to_crop()
        super().crop(*args, **kwargs)  # type: ignore[misc]
        self.overt_kept.crop(int(self.get_seq_length(self.overt_kept.layer)))  # type: ignore[attr-defined]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.overt_kept.clear()
