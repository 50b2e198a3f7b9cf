"""Watching a model attend: one forward pass, with a callback for every attention that runs in it.

Five kinds of attention are watched: those that transformers dispatches, plain or attached;
`torch.nn.MultiheadAttention`; Overt's own; those beside convolutions, over pixels; and maps that a recurrent
decoder makes row by row. Attention of any other model is recognised as it runs (`recognised`).
Everything that is changed for this (hooks, attention implementation, torch's fast path, training mode) is
restored, even if the forward pass fails.
"""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overt._modes import evaluating, in_this_thread
from overt.attaching.attention import AttachedAttention
from overt.attaching.attention import register as register_attached
from overt.attaching.find import Dispatched, dispatched, eager_of, is_plain, name_of, undispatched
from overt.attaching.plain import split_mask
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.backend import wanting_maps
from overt.mechanisms.call import AttentionCall, repeat_heads
from overt.mechanisms.mechanism import MechanismLayer
from overt.mechanisms.rows import Rows
from overt.mechanisms.site import Kind
from overt.models.augmented_conv import AugmentedConv2d
from overt.tracing.asked import HIDDEN, Asked, Sight, version_of
from overt.tracing.copies import Copies, Edit, as_it_is
from overt.tracing.options import check_bytes

if TYPE_CHECKING:
    from overt.tracing.budget import Budget
    from overt.tracing.recognised import Mixer, Recognised

NAME = "overt-trace"
# Arguments of eager attentions that change what a softmax of scaled products would be.
OWN_ARGUMENTS = {"softcap", "position_bias", "s_aux", "head_mask"}
# Families whose eager attention is more than that softmax; a test derives them.
OWN_EAGER = frozenset(
    {
        "deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash",
        "openai_privacy_filter", "vjepa2",
    }
)  # fmt: skip
FUSED = "fused"  # the part that is the map in use
# Positional arguments of torch's MultiheadAttention and of ours.
ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights",
    "is_causal",
)  # fmt: skip


@dataclass(eq=False)
class CapturedAttention:
    """One run of one attention.

    Attributes:
        path: its name in the model.
        chain: name of the list of layers that it is in.
        kind: "encoder", "decoder" or "cross".
        weights: (batch, head, query, key), as used.
        visible: boolean (batch or 1, query, key), or None for all.
        value: (batch, head, key, dim), if requested.
        output: weight of the projection that follows, (width, head·dim), if requested.
        parts: those of its mechanisms, name → (batch, head, query, key), if requested.
        part_names: names of all parts that its mechanisms can expose.
        sums_to_one: whether rows of visible weights sum to one.
        signed: whether weights may be negative.
        recurrent: whether a recurrent decoder made the map row by row: there is no self-attention beside it.
        grid: height and width of the image whose pixels it attends to, beside a convolution; else None.
        asked: its queries and keys, with the mask in parts; None if unknown.
        token: a number of its own among recognised calls; 0 for others.
        after: tokens of the calls that its queries were made from; None if unknown.
        reads: tokens of the calls that its values were made from; None if unknown.
        why_maps: why queries and keys cannot take the place of its weights, as a clause; empty if unknown.
        refused: why it has no weights; empty if it has.
        number: its place among the traced calls of the pass.
    """

    path: str
    chain: str
    kind: Kind
    weights: Tensor
    visible: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    part_names: tuple[str, ...] = ()
    sums_to_one: bool = True
    signed: bool = False
    recurrent: bool = False
    grid: tuple[int, int] | None = None
    asked: Asked | None = None
    token: int = 0
    after: frozenset[int] | None = None
    reads: frozenset[int] | None = None
    why_maps: str = ""
    refused: str = ""
    number: int = -1

    @property
    def of_states(self) -> bool:
        """Whether only queries and keys were captured: there are no weights."""
        return self.asked is not None and self.weights.numel() == 0

    def made_by(self, map: AttentionMap | None) -> None:
        """Record the properties that a map's mechanisms declare for its weights."""
        if map is not None:
            self.sums_to_one, self.signed = map.sums_to_one, map.signed
            self.part_names = tuple(name for layer in map.layers for name in layer.part_names)


Seen = Callable[[CapturedAttention], None]
Inside = Callable[[str, str], bool]


@dataclass(eq=False)
class Watch:
    """The callback, and what to capture for it.

    Attributes:
        seen: called with each attention that ran.
        values: whether to capture values and output projections.
        parts: whether to capture the parts of mechanisms.
        edit: if set, takes an attention's path and its values, (batch, head, key, dim), and returns the
            values to mix instead; there are no callbacks while it is set.
        copies: while a layer runs on copies of its batch that differ in one attention's values: those.
        takes_copies: paths of attentions that make the weights of such copies once.
        budget: decides between maps and states; None for maps.
        inside: whether the call at a path, in a chain, is traced; others need not be captured.
    """

    seen: Seen
    values: bool
    parts: bool
    edit: Edit | None = None
    copies: Copies | None = None
    takes_copies: set[str] = field(default_factory=set)
    budget: Budget | None = None
    inside: Inside = lambda *_: True
    # By the storage of their output, until it is projected; holding the output keeps its memory from reuse.
    waiting: dict[int, tuple[CapturedAttention, Tensor]] = field(default_factory=dict)
    wrappers: dict[int, nn.Module] = field(default_factory=dict)  # projection → PEFT's wrapper around it
    parts_shown: dict[str, Tensor] = field(default_factory=dict)  # parts of the map being computed
    places: dict[int, Dispatched] = field(default_factory=dict)
    # By masks, which layers may share, and what else matters; a mask that is held keeps its id.
    masks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    sights: dict[tuple[int, ...], tuple[Tensor, Sight]] = field(default_factory=dict)
    turned: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)  # as they are added
    # By queries and keys: whether masks that transformers did not make, as sdpa needs none, are causal.
    unmade: dict[tuple[int, int], set[bool]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)  # implementations that a model was loaded with
    sdpa: bool = False  # whether all of a model's attention may be torch's
    recognises: bool = False  # whether attention is recognised as it runs
    takes_sdpa: bool = True  # whether a model reads the masks that are made for it
    eager: bool = False  # whether eager attention is the model's own
    rows: list[tuple[str, int, list[Tensor]]] = field(default_factory=list)  # path, all rows, those made
    tokenwise: set[str] = field(default_factory=set)  # layers that do not attend, nor mix tokens otherwise
    mixers: list[Mixer] = field(default_factory=list)  # modules that mix tokens without attention
    missed: dict[str, str] = field(default_factory=dict)  # path → class of attentions that cannot be watched
    repeated: set[str] = field(default_factory=set)  # paths of modules that attended twice in one call
    attended: set[int] = field(default_factory=set)  # ids of modules that have, since they were called
    borrowed: dict[str, str] = field(default_factory=dict)  # path → path of the call whose values it has
    values_seen: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict)  # by their id

    def copies_at(self, path: str, value: Tensor) -> tuple[Copies | None, Tensor]:
        """Values of the attention at a path, which runs now, and the copies of a batch that differ in them.

        Where there are such copies, their values are side by side, and no longer edited in this run.
        """
        if self.edit is None:
            return None, value
        value = self.edit(path, value)
        if self.copies is None or self.copies.path != path:
            return None, value
        self.copies.begin()
        self.edit = as_it_is  # some attentions are also recognised as they run
        return self.copies, self.copies.side_by_side(value)

    def expect(self, path: str, kind: Kind) -> None:
        """Count an attention that is to run."""
        if self.budget is not None:
            self.budget.expect(path, _chain(path), kind)

    def wants_states(self, path: str, shape: tuple[int, ...], cell: int, why_maps: str | None = None) -> bool:
        """Whether a call is to leave queries and keys; an error where it should and cannot."""
        if self.budget is None or self.edit is not None:
            return False
        return self.budget.wants_states(shape, cell, why_maps, path)

    def note_values(self, path: str, value: Tensor) -> None:
        """Note a call that has the values of an earlier one, as layers that share keys and values do."""
        ref, earlier = self.values_seen.get(id(value), (None, ""))
        if ref is not None and ref() is value and earlier != path:
            self.borrowed[path] = earlier
        else:
            self.values_seen[id(value)] = weakref.ref(value), path

    def say_replaced(self, by: str) -> None:
        """Warn, once, that a model's attention is not the one that it was loaded with."""
        if self.replaced:
            names, self.replaced = ", ".join(sorted(self.replaced)), set()
            warnings.warn(
                f"the model was loaded with {names}: while it is traced, its attention is {by}", stacklevel=3
            )

    def check_rows(self) -> None:
        """Refuse maps that were made row by row, but not to the end."""
        for path, queries, made in self.rows:
            if len(made) != queries:
                raise ValueError(
                    f"{path} was to have {queries} rows, and only {len(made)} were made: ask "
                    "AttentionMap.rows for as many as are made"
                )

    def check_projected(self) -> None:
        """Refuse attentions whose output went into no projection, if projections are captured."""
        if self.waiting:
            call, _ = next(iter(self.waiting.values()))
            raise ValueError(
                f"{call.path} is not followed by a linear projection of its output, which this mixing needs"
            )

    def visible(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """A mask from transformers as visibility, computed once for the layers that share it."""
        if mask is None:
            return None
        place = id(mask), version_of(mask), keys
        if place not in self.masks:
            shown, _ = split_mask(mask.detach()[..., :keys])
            self.masks[place] = mask, shown.any(dim=1).cpu()
        return self.masks[place][1]

    def room(self, path: str) -> Callable[[int], None]:
        """Refuses bytes of a mask that is kept whole, if they exceed the budget."""
        most = None if self.budget is None else self.budget.most
        what = f"the mask of {path}, which is more than padding, causality, a window or chunks,"
        return lambda count: check_bytes(what, count, most, "give more memory=…")

    def sight(self, path: str, mask: Tensor, queries: int, keys: int) -> Sight:
        """A mask from transformers in parts, computed once for the layers that share it."""
        from overt.tracing.masks import sight_of

        place = id(mask), version_of(mask), queries, keys, False
        if place not in self.sights:
            self.sights[place] = mask, sight_of(mask, queries, keys, room=self.room(path))
        return self.sights[place][1]

    def is_causal(self, module: nn.Module, queries: int, keys: int, given: bool | None) -> bool:
        """Whether a call without a mask, which sdpa does not always need, is causal.

        What was asked when the mask was not made tells; a module's own word, which eager attention does not
        read, only where masks of one size were of both kinds.

        Args:
            module: the attention.
            queries: their number.
            keys: their number.
            given: the call's own argument; None if it has none.
        """
        if queries < 2:
            return False
        kinds = self.unmade.get((queries, keys), {False})
        if len(kinds) == 1:
            return next(iter(kinds))
        return bool(getattr(module, "is_causal", True) if given is None else given)

    def added(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """A mask as eager attention adds it: one that shows what is True is for torch's attention alone.

        A model with eager attention of its own adds it as 0 and 1, and so it is traced.
        """
        if mask is None or mask.dtype != torch.bool or self.eager:
            return mask
        place = id(mask), version_of(mask)
        if place not in self.turned:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            turned = zeros.masked_fill(~mask, torch.finfo(dtype).min)
            if self.edit is not None:  # a layer runs again, with a mask that no other shares
                return turned
            self.turned[place] = mask, turned
        return self.turned[place][1]

    def sight_of_eager(self, mask: Tensor | None, queries: int, keys: int) -> Sight:
        """What eager attention shows, in parts where these make the same weights, also of padding."""
        from overt.tracing.masks import sight_of

        if mask is None:
            return Sight()
        place = id(mask), version_of(mask), queries, keys, True
        if place not in self.sights:
            self.sights[place] = mask, sight_of(mask.detach(), queries, keys, exact=True)
        return self.sights[place][1]

    def sight_of_call(self, path: str, call: AttentionCall) -> Sight:
        """What one of Overt's own attentions shows, in parts; its masks are kept whole if they fit."""
        from overt.tracing.masks import cells_of

        queries, keys = call.shape[2:]
        seen, bias = call.seen, call.bias
        if call.mask is not None:
            bias = torch.zeros((), device=call.mask.device) if bias is None else bias
        if bias is not None:
            cells = bias.numel() if call.mask is None else cells_of(bias, call.mask)
            self.room(path)(cells * bias.element_size())
            bias = bias if call.mask is None else torch.where(call.mask, bias, HIDDEN)
        return Sight(seen.causal, keys - queries if seen.causal else 0, None, seen.key_visible, bias)


_thread_state = threading.local()
_one_at_a_time = threading.RLock()
# By a config's id, what its model was loaded with: other threads go on with it while one traces.
_loaded: dict[int, tuple[weakref.ref[Any], str | None]] = {}


def _loaded_with(config: Any) -> str:
    """The attention that the model of a config was loaded with."""
    ref, name = _loaded.get(id(config), (None, None))
    return name if ref is not None and ref() is config and name is not None else "eager"


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Torch's attention, whose queries and keys are captured, or the eager one, whose weights are.

    Eager attention runs where it is more than a softmax of scaled products, or more than weights is needed.
    """
    watch: Watch | None = getattr(_thread_state, "now", None)
    eager = eager_of(module)
    if watch is None:  # a thread that does not trace
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        loaded = _loaded_with(getattr(module, "config", None))
        attend: Any = ALL_ATTENTION_FUNCTIONS.get(loaded, eager)
        if loaded in ("eager", "sdpa"):
            attention_mask = _of_chosen(module, query, key, attention_mask, kwargs)
        found: tuple[Tensor, Tensor | None] = attend(module, query, key, value, attention_mask, **kwargs)
        return found
    if eager is None:
        raise ValueError(f"{type(module).__name__} has no eager attention, so its weights cannot be captured")
    place = watch.places.get(id(module))
    attention_mask = _of_chosen(module, query, key, attention_mask, kwargs)
    if place is not None and id(module) in watch.attended:
        watch.repeated.add(place.path)
    watch.attended.add(id(module))
    if place is not None and watch.edit is None:
        watch.note_values(place.path, value)
    copies, rows = None, len(query)
    if place is not None:
        copies, value = watch.copies_at(place.path, value)
    if copies is not None:
        query, key, attention_mask = (copies.first(each, rows) for each in (query, key, attention_mask))
        kwargs = copies.first_of(kwargs, rows)
    output: Tensor
    if watch.budget is not None and watch.edit is None and place is not None:
        shape, why = (*query.shape[:3], key.shape[2]), _why_eager(module, kwargs)
        states = watch.budget.wants_states(shape, query.element_size(), why, place.path)
        if states or (why is None and _maps_from_states(watch, query, attention_mask, kwargs)):
            output, call = _ask(watch, place, module, query, key, value, attention_mask, kwargs, states)
            watch.seen(call)
            return output, None
    watch.say_replaced("its family's eager attention")
    attention_mask = watch.added(attention_mask, query.dtype)
    output, weights = eager(module, query, key, value, attention_mask, **kwargs)[:2]
    if copies is not None:
        return copies.apart(output), None
    if watch.edit is None and place is not None:
        call = CapturedAttention(place.path, place.chain, place.kind, weights)
        call.visible = watch.visible(attention_mask, key.shape[-2])
        if _why_eager(module, kwargs) is not None:
            from overt.tracing.asking import sum_to_one

            call.sums_to_one = sum_to_one(weights)
        if watch.values:
            output = output.contiguous()  # so that the caller's reshape is a view, which is recognised later
        _projected_later(watch, call, value, output)
    return output, weights


def _of_chosen(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """A mask that also hides the keys that a family with sparse attention has not chosen for each query.

    Such a family puts its choice into the mask itself, but only where its attention is called eager or sdpa.

    Args:
        module: the attention.
        query: (batch, head, query, dim).
        key: (batch, key head, key, dim).
        mask: of the call, (batch, 1, query, key).
        kwargs: of the call.
    """
    if kwargs.get("block_indices") is not None:
        raise ValueError(
            f"{type(module).__name__} cannot be traced: it chooses blocks of keys (block_indices), which is "
            "not supported"
        )
    chosen = kwargs.get("indices")
    if chosen is None:
        return mask
    cells = torch.ones(*chosen.shape[:2], key.shape[2], dtype=torch.bool, device=chosen.device)
    hidden = cells.scatter_(-1, chosen.long(), False).unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        return mask & ~hidden
    added = torch.zeros((), dtype=query.dtype, device=query.device) if mask is None else mask
    return added.expand(hidden.shape).masked_fill(hidden, torch.finfo(added.dtype).min)


def _why_eager(module: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Why a module's attention is not a softmax of scaled products under a mask, as a clause; None if it is.

    Families known for it are in `OWN_EAGER`; any other is compared with that softmax on random numbers.
    """
    name = type(module).__name__
    given = sorted(set(kwargs) & OWN_ARGUMENTS)
    if given := [argument for argument in given if kwargs[argument] is not None]:
        return f"{name} attends with {', '.join(given)}"
    family = type(module).__module__.split(".")[-2]
    if family in OWN_EAGER or not is_plain(module):
        return f"the eager attention of {name} is more than a softmax of scaled products under a mask"
    return None


def _maps_from_states(watch: Watch, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether a map that is kept may be made from queries and keys, the model running torch's attention."""
    assert watch.budget is not None
    if watch.budget.why_maps is not None or not watch.sdpa or torch.is_grad_enabled():
        return False
    if kwargs.get("output_attentions") or kwargs.get("dropout"):
        return False
    if mask is None:
        return True
    if mask.dim() != 4 or mask.dtype not in (query.dtype, None if watch.eager else torch.bool):
        return False
    # Eager attention alone says what becomes of queries that see nothing at all.
    return mask.dtype == torch.bool or bool((mask.amax(dim=-1) > HIDDEN).all())


def _ask(
    watch: Watch,
    place: Dispatched,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    states: bool,
) -> tuple[Tensor, CapturedAttention]:
    """Attention as transformers' sdpa computes it, and what it was asked.

    Args:
        watch: what is captured.
        place: of the module.
        module: the attention.
        query: (batch, head, query, dim).
        key: (batch, key head, key, dim).
        value: (batch, key head, key, dim).
        mask: that of sdpa if states are kept, and that of eager attention if maps are made.
        kwargs: of the call.
        states: whether states are kept.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from overt.tracing.summed import attend

    watch.say_replaced("torch's scaled_dot_product_attention")
    queries, keys = query.shape[2], key.shape[2]
    call = CapturedAttention(place.path, place.chain, place.kind, torch.empty(0))
    if not states:
        mask = watch.added(mask, query.dtype)
        call.visible = watch.visible(mask, keys)
        sight = watch.sight_of_eager(mask, queries, keys)
        if not sight.needs_mask:
            mask, kwargs = None, {**kwargs, "is_causal": sight.causal}
        elif mask is not None:
            mask = mask[..., :keys]
    elif mask is not None:
        sight = watch.sight(place.path, mask, queries, keys)
    else:
        sight = Sight(causal=watch.is_causal(module, queries, keys, kwargs.get("is_causal")))
        kwargs = {**kwargs, "is_causal": sight.causal}
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    made = attend(query, key, value, sight.causal, scale) if states and mask is None else None
    if made is None:
        output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    else:
        output = made[0].transpose(1, 2).contiguous()
    call.asked = Asked(query, key, scale, sight, None if made is None else made[1])
    return output, call


def _projected_later(watch: Watch, call: CapturedAttention, value: Tensor, output: Tensor) -> None:
    """Report a call; if values are captured, only once the projection that takes its output is known."""
    if not watch.values:
        watch.seen(call)
        return
    call.value = repeat_heads(value, call.weights.shape[1])
    watch.waiting[output.untyped_storage().data_ptr()] = call, output


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of eager attention, or that of sdpa, often none at all, where maps would not fit."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    watch: Watch | None = getattr(_thread_state, "now", None)
    if watch is None:  # a thread that does not trace
        make: Any = ALL_MASK_ATTENTION_FUNCTIONS.get(_loaded_with(kwargs.get("config")), eager_mask)
        made: Tensor | None = make(batch_size, q_length, kv_length, *args, **kwargs)
        return made
    budget = watch.budget
    if budget is not None and budget.why_maps is None:
        config: Any = kwargs.get("config")
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = getattr(config, "num_attention_heads", 1)
        shape = batch_size, heads if isinstance(heads, int) else 1, q_length, kv_length
        cell = kwargs.get("dtype", torch.float32).itemsize
        if budget.states or budget.needed_next(shape, cell, config) > budget.most:
            budget.states = True
            if not watch.takes_sdpa:  # attention of its own may add it
                return eager_mask(batch_size, q_length, kv_length, *args, **kwargs)
            kwargs.pop("dtype", None)
            mask = sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)
            if mask is None:
                causal = bool(kwargs.get("allow_is_causal_skip", True))
                watch.unmade.setdefault((q_length, kv_length), set()).add(causal)
            return mask
    return eager_mask(batch_size, q_length, kv_length, *args, **kwargs)


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _dispatch)
    AttentionMaskInterface.register(NAME, _mask)
    register_attached()  # the traced model may be attached, and come from another process


@contextmanager
def watching(
    model: nn.Module,
    seen: Seen,
    *,
    values: bool = False,
    parts: bool = False,
    edits: bool = False,
    budget: Budget | None = None,
    inside: Inside = lambda *_: True,
) -> Iterator[Watch]:
    """Call `seen` for each attention of a model that runs inside, in evaluation mode.

    Args:
        model: any module with attentions of the five kinds.
        seen: called with each.
        values: also capture values and output projections.
        parts: also capture the parts of mechanisms that expose them.
        edits: whether values will be edited.
        budget: decides between maps and states; None for maps.
        inside: whether the call at a path, in a chain, is traced; others need not be captured.
    """
    watch = Watch(seen, values, parts, budget=budget, inside=inside)
    # One trace at a time: configs, hooks and torch's fast path belong to all threads.
    with _one_at_a_time, ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(wanting_maps())  # fused kernels make none
        traceable = _watch_dispatched(model, watch, stack)
        within: set[nn.Module | None] = set()  # maps that belong to an attention module
        for path, module in model.named_modules():
            if isinstance(module, AttachedAttention):
                _watch_attached(path, module, watch, stack)
                within.add(module.map)
                traceable = True
            elif isinstance(module, MultiheadAttention):
                _watch_own(path, module, watch, stack, edits)
                within.add(module.map)
                traceable = True
            elif isinstance(module, AugmentedConv2d):
                _watch_pixels(path, module, watch, stack)
                within.add(module.map)
                traceable = True
            elif isinstance(module, nn.MultiheadAttention):
                _watch_torch(path, module, watch, stack)
                traceable = True
            elif isinstance(module, AttentionMap) and module not in within and module.site.kind == "cross":
                _watch_rows(path, module, watch, stack)
                traceable = True
            elif isinstance(module, MechanismLayer) and module.part_names and parts:
                stack.enter_context(
                    _hook(module.register_forward_pre_hook(in_this_thread(_look_at_parts(watch))))
                )
            elif isinstance(inner := getattr(module, "base_layer", None), nn.Module) and values:
                watch.wrappers[id(inner)] = module
            elif values and _is_projection(module):
                stack.enter_context(
                    _hook(module.register_forward_pre_hook(in_this_thread(_look_at_projection(watch))))
                )
        _watch_others(model, watch, stack, traceable)
        before = getattr(_thread_state, "now", None)
        _thread_state.now = watch
        try:
            yield watch
        finally:
            _thread_state.now = before
        watch.check_projected()
        watch.check_rows()


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _watch_dispatched(model: nn.Module, watch: Watch, stack: ExitStack) -> bool:
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    outer = [m for m in models if not any(m is not o and _holds(o, m) for o in models)]
    places: list[Dispatched] = []
    for root in outer:
        prefix = next(path for path, module in model.named_modules() if module is root)
        for place in dispatched(root):
            path, chain = (f"{prefix}.{name}" if prefix else name for name in (place.path, place.chain))
            places.append(place._replace(path=path, chain=chain))
    if places:
        _register()
    for root in outer:
        _note_missed(model, root, [place.path for place in places], watch, stack)
    plain = [place for place in places if "overt" not in place.module._modules]
    if not plain:
        return bool(places)
    for place in plain:
        begin = in_this_thread(partial(_begin, watch.attended))
        stack.enter_context(_hook(place.module.register_forward_pre_hook(begin)))
    watch.places = {id(place.module): place for place in plain}
    watch.takes_copies |= {place.path for place in plain}
    if watch.budget is not None:
        for place in plain:
            config = getattr(place.module, "config", None)
            watch.budget.expect(place.path, place.chain, place.kind, _times(outer, plain), config)
    attached = {id(place.module) for place in places} - set(watch.places)
    if attached:
        return True  # all attentions of an attached model have their own module
    configs = {id(c): c for m in (*models, *(p.module for p in plain)) if (c := getattr(m, "config", None))}
    loaded = {getattr(config, "_attn_implementation_internal", None) for config in configs.values()}
    watch.eager = "eager" in loaded
    watch.replaced = {name for name in loaded if isinstance(name, str) and "flash" in name}
    asks = any(getattr(config, "output_attentions", None) for config in configs.values())
    watch.takes_sdpa = all(getattr(model, "_supports_sdpa", False) for model in models)
    watch.sdpa = not asks and watch.takes_sdpa
    stack.enter_context(_implementation(list(configs.values())))
    return True


def _begin(attended: set[int], module: nn.Module, _: Any) -> None:
    """A module is called, and has not attended yet."""
    attended.discard(id(module))


def _note_missed(
    model: nn.Module, root: nn.Module, dispatched: list[str], watch: Watch, stack: ExitStack
) -> None:
    """Note attentions in layers of a model that run, and are not dispatched though others of it are."""
    prefix = next(path for path, module in model.named_modules() if module is root)
    inside = [path for path in dispatched if not prefix or path.startswith(prefix + ".")]
    if not inside:
        return  # then they are recognised

    def note(path: str, module: nn.Module, _: Any) -> None:
        watch.missed[path] = type(module).__name__

    for path, module in undispatched(model, dispatched):
        known = isinstance(module, nn.MultiheadAttention) or type(module).__module__.startswith("overt.")
        if known or not re.search(r"\.\d+(\.|$)", path) or (prefix and not path.startswith(prefix + ".")):
            continue
        stack.enter_context(_hook(module.register_forward_pre_hook(in_this_thread(partial(note, path)))))


def _times(models: list[Any], places: list[Dispatched]) -> int:
    """How often each attention runs, in a model whose layers share them (ALBERT); once in any other."""
    config: Any = getattr(models[0], "config", None)
    if len(models) > 1 or not isinstance(getattr(config, "num_hidden_groups", None), int):
        return 1
    calls = int(config.num_hidden_layers) * int(getattr(config, "inner_group_num", 1))
    return max(1, -(-calls // len(places)))


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


@contextmanager
def _implementation(configs: list[Any]) -> Iterator[None]:
    """Dispatch to the watching attention; every config gets its implementation back."""
    implementations = [
        (c, c._attn_implementation_internal) for c in configs if hasattr(c, "_attn_implementation_internal")
    ]
    try:
        for config, implementation in implementations:
            if implementation != NAME:
                forget = partial(lambda key, _: _loaded.pop(key, None), id(config))
                _loaded[id(config)] = weakref.ref(config, forget), implementation
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation_internal = implementation


def _chain(path: str) -> str:
    """The list of layers that a path leads through; the path itself if there is none."""
    return re.split(r"\.\d+(?:\.|$)", path)[0]


def _watch_others(model: nn.Module, watch: Watch, stack: ExitStack, traceable: bool) -> None:
    """Recognise attention in those parts of a model in which it is not watched otherwise."""
    from transformers import PreTrainedModel

    from overt.tracing.recognised import Recogniser, recognising
    from overt.tracing.running import uncompiled

    stack.enter_context(uncompiled(model))
    known = {
        module
        for module in model.modules()
        if type(module).__module__.startswith("overt.")
        or isinstance(module, nn.MultiheadAttention)
        or (traceable and isinstance(module, PreTrainedModel) and dispatched(module))
    }
    if model in known:
        return

    def report(found: Recognised) -> None:
        call = CapturedAttention(found.path, _chain(found.path), found.kind, found.weights, found.visible)
        call.asked, call.why_maps, call.refused = found.asked, found.why_maps, found.refused
        call.token, call.after, call.reads = found.token, found.after, found.reads
        call.sums_to_one, call.signed = found.sums_to_one, found.signed
        if found.output is None or found.value is None:
            call.value, call.output = found.value, found.projection
            watch.seen(call)
        else:
            _projected_later(watch, call, found.value, found.output)

    recogniser = Recogniser(
        model,
        known,
        report,
        lambda: watch.edit,
        watch.values,
        "" if traceable else name_of(model),
        watch.budget,
        lambda path: watch.inside(path, _chain(path)),
    )
    recogniser.tokenwise, recogniser.mixers = watch.tokenwise, watch.mixers
    watch.recognises = True

    def seen(call: CapturedAttention) -> None:
        """Note the calls that one that was not recognised reads."""
        if not call.token:
            reading = recogniser.reading(call.path)
            call.token, call.after, call.reads = reading.token, reading.after, reading.reads
            if call.kind == "cross" and reading.same:
                call.kind = "decoder" if _is_causal(call.visible) else "encoder"
        collect(call)

    collect, watch.seen = watch.seen, seen
    stack.enter_context(recognising(recogniser))


def _watch_attached(path: str, module: AttachedAttention, watch: Watch, stack: ExitStack) -> None:
    name = path.removesuffix(".overt")
    chain = _chain(name)

    def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
        if watch.edit is None:
            return None
        query, key, value, *others = args
        rows = len(query)
        copies, value = watch.copies_at(name, value)
        if copies is not None:
            query, key, *others = (copies.first(each, rows) for each in (query, key, *others))
        return query, key, value, *others

    def look(part: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if watch.edit is not None:
            watch.parts_shown = {}
            if watch.copies is not None and watch.copies.path == name:
                return watch.copies.apart(output[0]), None
            return None
        mixed, weights = output
        if weights is None:
            return None  # queries and keys were captured
        call = CapturedAttention(name, chain, kind, weights, parts=watch.parts_shown)
        call.made_by(part.map)
        watch.parts_shown = {}
        call.visible = watch.visible(args[3], weights.shape[-1])
        _projected_later(watch, call, args[2], mixed)
        return None

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        current: Any,
        scaling: float,
        *more: Any,
    ) -> Any:
        """Torch's attention, where queries and keys are kept."""
        heads, shape = query.shape[1], (*query.shape[:3], key.shape[2])
        why = acting or (
            "it has a softcap or a bias of positions" if any(x is not None for x in more[1:]) else None
        )
        if not watch.wants_states(name, shape, query.element_size(), why):
            return run(query, key, value, mask, current, scaling, *more)
        module._site_of_this_call(query, key, current)
        mask = None if mask is None else mask[..., : key.shape[2]]
        output = nn.functional.scaled_dot_product_attention(
            query, repeat_heads(key, heads), repeat_heads(value, heads), mask, scale=scaling
        )
        sight = Sight() if mask is None else watch.sight(name, mask, *shape[2:])
        call = CapturedAttention(name, chain, kind, torch.empty(0), asked=Asked(query, key, scaling, sight))
        watch.seen(call)
        return output.transpose(1, 2).contiguous(), None

    kind, run = module.kind, module.forward
    acting = _acting(name, module.map)
    watch.takes_copies.add(name)
    if watch.budget is not None:
        object.__setattr__(module, "forward", in_this_thread(forward, run))
        stack.callback(object.__delattr__, module, "forward")
        watch.expect(name, kind)
    stack.enter_context(_hook(module.register_forward_pre_hook(in_this_thread(before))))
    stack.enter_context(_hook(module.register_forward_hook(in_this_thread(look))))


def _acting(path: str, map: AttentionMap | None) -> str | None:
    """Which mechanisms make weights that are no softmax, as a clause; None if none do."""
    changing = sorted({layer.name for layer in (map.layers if map else ()) if not layer.mean_is_softmax})
    return f"{' and '.join(changing)} of {path} makes its own weights of them" if changing else None


def _watch_own(path: str, module: MultiheadAttention, watch: Watch, stack: ExitStack, edits: bool) -> None:
    """Overt's own attention: the map is a separate module, whose call has the visibility."""
    kind, chain = module.map.site.kind, _chain(path)
    inputs: list[tuple[Tensor, Tensor, Tensor]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        inputs[:] = [(named["query"], named["key"], named["value"])]

    def edited(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(query, key, value)
        return q, k, v if watch.edit is None else watch.edit(path, v)

    def look(part: Any, args: tuple[Any, ...], weights: Tensor) -> None:
        if watch.edit is not None:
            watch.parts_shown = {}
            return
        visible = args[0].visible().expand(weights.shape).any(dim=1).cpu()
        call = CapturedAttention(path, chain, kind, weights, visible, parts=watch.parts_shown)
        call.made_by(part)
        watch.parts_shown = {}
        if watch.values:
            query, key, value = inputs[0]
            if query.dim() == 2:
                query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            elif not module.batch_first:
                query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
            call.value = repeat_heads(module._project(query, key, value)[2], weights.shape[1])
            call.output = module.out_proj.weight
        watch.seen(call)

    def attend(call: AttentionCall, current: Any, *reasons: str | None) -> Tensor | None:
        """Torch's attention, where queries and keys are kept."""
        why = acting or ("scores are more than products" if call.logits is not None else None)
        if not watch.wants_states(path, call.shape, call.query.element_size(), why):
            return run(call, current, *reasons)
        from overt.tracing.asking import attended

        current.claim(call.site, module.map)
        asked = Asked(call.query, call.key, call.scale, watch.sight_of_call(path, call))
        watch.seen(CapturedAttention(path, chain, kind, torch.empty(0), asked=asked))
        return attended(asked, call.value)

    acting, run = _acting(path, module.map), module.map.attend
    if watch.budget is not None:
        object.__setattr__(module.map, "attend", in_this_thread(attend, run))
        stack.callback(object.__delattr__, module.map, "attend")
        watch.expect(path, kind)
    project = module._project
    stack.enter_context(_hook(module.register_forward_pre_hook(in_this_thread(before), with_kwargs=True)))
    stack.enter_context(_hook(module.map.register_forward_hook(in_this_thread(look))))
    if edits:
        object.__setattr__(module, "_project", in_this_thread(edited, project))
        stack.callback(object.__delattr__, module, "_project")


def _watch_pixels(path: str, module: AugmentedConv2d, watch: Watch, stack: ExitStack) -> None:
    """An attention beside a convolution; those over images of one size form a stack, whatever their stage."""
    sizes: list[tuple[int, int]] = []

    def measure(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del args
        sizes[:] = [(output.shape[-2], output.shape[-1])]

    def look(part: Any, args: tuple[Any, ...], weights: Tensor) -> None:
        del args
        height, width = sizes[0]
        call = CapturedAttention(path, f"{height}x{width}", "encoder", weights, grid=(height, width))
        call.made_by(part)
        call.parts, watch.parts_shown = watch.parts_shown, {}
        watch.seen(call)

    stack.enter_context(_hook(module.qkv.register_forward_hook(in_this_thread(measure))))
    stack.enter_context(_hook(module.map.register_forward_hook(in_this_thread(look))))


def _watch_rows(path: str, module: AttentionMap, watch: Watch, stack: ExitStack) -> None:
    """A recurrent decoder's map: its rows are kept, and the map is reported with the last one."""
    chain = _chain(path)

    def rows(key: Tensor, queries: int, *args: Any, **kwargs: Any) -> Rows:
        rows = make(key, queries, *args, **kwargs)
        next_row, made = rows.weights, list[Tensor]()
        watch.rows.append((path, queries, made))

        def look(logits: Tensor, query: Tensor | None = None) -> Tensor:
            made.append(next_row(logits, query))
            if len(made) == queries:
                call = CapturedAttention(path, chain, "cross", torch.cat(made, dim=2), recurrent=True)
                call.made_by(module)
                shown = rows.seen.key_visible
                call.visible = None if shown is None else shown.unsqueeze(1).expand(-1, queries, -1).cpu()
                watch.seen(call)
            return made[-1]

        object.__setattr__(rows, "weights", look)
        return rows

    make = module.rows
    object.__setattr__(module, "rows", in_this_thread(rows, make))
    stack.callback(object.__delattr__, module, "rows")


def _watch_torch(path: str, module: nn.MultiheadAttention, watch: Watch, stack: ExitStack) -> None:
    """torch's attention: request its weights, and return to the caller what the caller requested."""
    if module.add_zero_attn or module.bias_k is not None:
        raise ValueError(f"{path}: add_bias_kv and add_zero_attn add keys that are not tokens: not supported")
    chain = _chain(path)
    requests: list[tuple[bool, bool] | None] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        query = named["query"]
        axis = 0 if module.batch_first else 1
        batch = query.shape[axis] if query.dim() == 3 else 1
        tokens = [named[name].shape[1 - axis if query.dim() == 3 else 0] for name in ("query", "key")]
        if watch.wants_states(path, (batch, module.num_heads, *tokens), query.element_size()):
            requests.append(None)
            return (), named
        requests.append((named.get("need_weights", True), named.get("average_attn_weights", True)))
        return (), {**named, "need_weights": True, "average_attn_weights": False}

    def ask(kwargs: dict[str, Any], mixed: Tensor) -> None:
        """Report queries and keys."""
        from overt.tracing.asking import hides_later, sight_of_torch_in_parts
        from overt.tracing.recognised import asked_of_torch, shape_of_torch
        from overt.tracing.sights import Refusal

        turned = module.batch_first and mixed.dim() == 3
        given = _arguments_of_torch(module, kwargs, turned)
        sight = sight_of_torch_in_parts(given, shape_of_torch(given), watch.room(path))
        try:
            asked = asked_of_torch(given, sight, mixed.transpose(0, 1) if turned else mixed)
        except Refusal as refusal:
            raise ValueError(f"{path} cannot be traced: {refusal}") from None
        query, key = kwargs["query"], kwargs["key"]
        same = key is query or (key.shape == query.shape and torch.equal(key, query))
        kind: Kind = "cross" if not same else "decoder" if hides_later(asked) else "encoder"
        watch.seen(CapturedAttention(path, chain, kind, torch.empty(0), asked=asked))

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        from overt.tracing.asking import without_blind

        del args
        mixed, weights = output
        request = requests.pop()
        if request is None:
            ask(kwargs, mixed)
            return output
        need, average = request
        query, key = kwargs["query"], kwargs["key"]
        seeing = weights if need else without_blind(weights, query, key)
        unbatched = weights.dim() == 3
        whole = seeing.unsqueeze(0) if unbatched else seeing
        kind: Kind = "cross" if key is not query and key.shape != query.shape else "encoder"
        if key is not query and not torch.equal(key, query):
            kind = "cross"
        call = CapturedAttention(path, chain, kind, whole, _visible_of_torch(kwargs, whole))
        if kind == "encoder" and _is_causal(call.visible):
            call.kind = "decoder"
        if watch.values or watch.edit is not None or torch.is_grad_enabled() or seeing is not weights:
            call.value, call.output = (
                _value_of_torch(module, kwargs["value"], unbatched),
                module.out_proj.weight,
            )
            if watch.edit is not None:
                call.value = watch.edit(path, call.value)
            # The weights that torch returns are not on the path to its output; the output is computed again
            # from them, so that they have gradients.
            joined = (whole @ call.value).transpose(1, 2).flatten(2)
            again = nn.functional.linear(joined, module.out_proj.weight, module.out_proj.bias)
            mixed = again[0] if unbatched else again if module.batch_first else again.transpose(0, 1)
        if watch.edit is None:
            watch.seen(call)
        if not need:
            return mixed, None
        return mixed, weights.mean(dim=-3) if average else weights

    expected: Kind = "decoder" if "decoder" in chain else "encoder"
    watch.expect(path, "cross" if path.endswith("multihead_attn") else expected)  # as torch's layers call it
    stack.enter_context(
        _hook(module.register_forward_pre_hook(in_this_thread(before), with_kwargs=True, prepend=True))
    )
    stack.enter_context(_hook(module.register_forward_hook(in_this_thread(look), with_kwargs=True)))
    stack.enter_context(_slow_path())


def _arguments_of_torch(module: nn.MultiheadAttention, given: dict[str, Any], turned: bool) -> dict[str, Any]:
    """Those that torch's functional attention gets from a module."""
    states = {name: given[name].transpose(0, 1) if turned else given[name] for name in ARGUMENTS[:3]}
    return {
        **states,
        "embed_dim_to_check": module.embed_dim,
        "num_heads": module.num_heads,
        "in_proj_weight": module.in_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "use_separate_proj_weight": module.in_proj_weight is None,
        **{f"{name}_proj_weight": getattr(module, f"{name}_proj_weight", None) for name in "qkv"},
        "out_proj_weight": module.out_proj.weight,
        "out_proj_bias": module.out_proj.bias,
        "attn_mask": given.get("attn_mask"),
        "key_padding_mask": given.get("key_padding_mask"),
    }


@contextmanager
def _slow_path() -> Iterator[None]:
    """torch's evaluation fast path computes no weights and calls no hooks."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _visible_of_torch(arguments: Mapping[str, Any], weights: Tensor) -> Tensor | None:
    from overt.tracing.masks import shown_cells

    batch, heads, queries, keys = weights.shape
    visible = torch.ones(1, queries, keys, dtype=torch.bool, device=weights.device)
    mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    if mask is None and padding is None:
        return None
    if mask is not None:
        shown = ~mask if mask.dtype == torch.bool else shown_cells(mask)
        shown = shown.view(batch, heads, queries, keys).any(dim=1) if shown.dim() == 3 else shown
        visible = visible & shown
    if padding is not None:
        hidden = padding if padding.dtype == torch.bool else ~shown_cells(padding)
        visible = visible & ~hidden.view(-1, 1, keys)
    return visible.cpu()


def _is_causal(visible: Tensor | None) -> bool:
    return visible is not None and visible.shape[-1] > 1 and not bool(visible.triu(1).any())


def _value_of_torch(module: nn.MultiheadAttention, value: Tensor, unbatched: bool) -> Tensor:
    width = module.embed_dim
    packed: Tensor | None = module.in_proj_weight
    weight = module.v_proj_weight if packed is None else packed[2 * width :]
    bias = None if module.in_proj_bias is None else module.in_proj_bias[2 * width :]
    values: Tensor = nn.functional.linear(value, weight, bias)
    values = values.unsqueeze(0) if unbatched else values if module.batch_first else values.transpose(0, 1)
    return values.view(*values.shape[:2], module.num_heads, module.head_dim).transpose(1, 2)


def _look_at_parts(watch: Watch) -> Callable[..., None]:
    def look(layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Capture the parts of a mechanism's layer before it runs."""
        assert isinstance(layer, MechanismLayer)
        parts = layer.parts(*args)
        if unknown := sorted(set(parts) - set(layer.part_names)):
            raise ValueError(f"{layer.name} exposes {', '.join(unknown)}, which its part_names lack")
        watch.parts_shown |= parts

    return look


def _is_projection(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _adapter_weight(wrapper: Any, path: str) -> Any:
    """What PEFT's adapters add to a projection's weight."""
    if wrapper.merged:
        return 0.0
    names = [name for name in wrapper.active_adapters if name in getattr(wrapper, "lora_A", {})]
    plain = hasattr(wrapper, "get_delta_weight") and not any(getattr(wrapper, "use_dora", {}).values())
    if not names or not plain:
        raise ValueError(f"the adapter on the projection after {path} is not LoRA: merge it before tracing")
    return sum(wrapper.get_delta_weight(name) for name in names)


def _look_at_projection(watch: Watch) -> Callable[..., None]:
    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        """The first projection that reads what an attention wrote is the one that follows it."""
        if not args or not isinstance(args[0], Tensor):
            return
        call, _ = watch.waiting.pop(args[0].untyped_storage().data_ptr(), (None, None))
        if call is None:
            return
        weight: Any = module.weight
        call.output = weight if isinstance(module, nn.Linear) else weight.T  # Conv1D keeps it transposed
        wrapper: Any = watch.wrappers.get(id(module))
        if wrapper is not None:
            call.output = call.output + _adapter_weight(wrapper, call.path)
        watch.seen(call)

    return look
