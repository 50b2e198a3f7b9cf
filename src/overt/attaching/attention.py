"""The attention that transformers dispatches to in an attached model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.attaching.find import AttentionSite, eager_of
from overt.attaching.mask_origin import MaskOrigin, Pattern
from overt.attaching.masks import made_of
from overt.attaching.masks import mask as make_mask
from overt.attaching.passes import KEYWORD, Pass, pass_in
from overt.attaching.plain import logits_of, mix_values, split_mask
from overt.mechanisms.attention_map import AttentionMap, rows_left_alone
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import recomputing
from overt.mechanisms.maps import causal, softmax
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site

NAME = "overt"
# Keywords of attention calls that say nothing about what to compute, or what the mask says already.
HARMLESS = {
    KEYWORD,
    "is_causal",
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "past_key_values",
    "sliding_window",
    "deterministic",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "layer_idx",
    "num_items_in_batch",
}


class AttachedAttention(nn.Module):
    """What `attach` puts into an attention, under the name `overt`: its mechanisms and its place."""

    left_alone: Literal["sdpa", "eager"] = "sdpa"  # whose rows of padding the model had before
    layer_of_cache: int = 0
    chunked: bool = False  # whether its mask may keep chunks of tokens apart

    def __init__(
        self,
        found: AttentionSite,
        chain: int,
        mechanisms: tuple[Mechanism, ...],
        layer: int,
        token: str,
        pair: bool,
    ) -> None:
        super().__init__()
        self.path, self.stack, self.kind = found.path, found.stack, found.kind
        self.shared, self.layers, self.token = found.shared, found.layers, token
        self.chain_name, self.chain_number = found.chain, chain
        self.layer_list = found.chain.split("#")[
            0
        ]  # where cross-attention finds its self-attention's padding
        index = getattr(found.module, "layer_idx", None)
        self.layer_of_cache = index if isinstance(index, int) else 0
        config = getattr(found.module, "config", None)
        self.chunked = getattr(config, "attention_chunk_size", None) is not None
        self.keeps = False  # whether its stack decodes with convolutions, which read earlier rows
        # A module that several layers share needs a convolution, whichever layer calls it first.
        place = max(layer, 1) if found.shared else layer
        self.left_alone = "eager" if found.eager else "sdpa"
        self.site = Site(found.heads, found.head_dim, found.kind, place, found.key_heads, pair)
        self.map = AttentionMap(mechanisms, self.site) if mechanisms else None

    def extra_repr(self) -> str:
        """Place and size, for `print(model)`."""
        return f"{self.site.kind} {self.site.layer}, heads={self.site.heads}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        current: Pass,
        scaling: float,
        dropout: float,
        position_bias: Tensor | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: output (batch, query, heads, dim), and the map used, before dropout.

        There is no map where fused kernels ran, which make none.

        Args:
            query: (batch, heads, query, dim).
            key: (batch, key heads, key, dim).
            value: like `key`.
            mask: additive or boolean, (batch or 1, heads or 1, query or 1, key).
            current: the pass that this call belongs to.
            scaling: of the scores.
            dropout: on the weights, in training.
            position_bias: added to the logits; broadcasts to them.
            softcap: limit of the scores, softly.
        """
        call = AttentionCall(
            self._site_of_this_call(query, key, current),
            query,
            key,
            value,
            scaling,
            seen=Seen(),  # said here: compilers do not follow a default
            logits=None if softcap is None else logits_of(query, key, scaling, softcap, None),
            bias=position_bias,
            dropout=dropout if self.training else 0.0,
            scale_products=True,
            # As adding the mask would, which is float32 under autocast.
            dtype=mask.dtype if mask is not None and mask.is_floating_point() else None,
            # Beside a bias sdpa's mask is additive, too: a row without a key is the mean of all values.
            left_alone="biased"
            if position_bias is not None and self.left_alone == "sdpa"
            else self.left_alone,
        )
        if self.map is None:
            weights = self._plain(call, mask, current)
        else:
            made = _made(mask, current)
            chain = current.chain(self.chain_name, self.chain_number, self.stack, self.keeps)
            known = self._in_parts(call, made, current)
            call = self._by_mask(call, mask, current, made) if known is None else known
            fused = self.map.attend(call, chain, self._hindrance(call, known is not None, current))
            if fused is not None:
                return fused.transpose(1, 2).contiguous(), None
            self._check_mask(call, mask, made, current)
            chain.first_row(call.site, *call.shape[2:])  # counts rows where they are kept
            weights = self.map(call, chain)
        keys, total = key.shape[-2], weights.shape[-1]
        if total != keys:
            # Back to the cache's columns: a sliding one has dropped the first, a static one has more.
            weights = F.pad(weights[..., max(total - keys, 0) :], (0, max(keys - total, 0)))
        weights = weights.to(query.dtype)
        return mix_values(F.dropout(weights, dropout, self.training), value), weights

    def _biased(self) -> Literal["eager", "biased"]:
        return "eager" if self.left_alone == "eager" else "biased"

    def _plain(self, call: AttentionCall, mask: Tensor | None, current: Pass) -> Tensor:
        """Weights where nothing is attached; cross-attention beside it may want to know the padding."""
        queries, keys, made = call.query.shape[-2], call.key.shape[-2], _made(mask, current)
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
        if mask is not None:
            visible, call = _masked(call, mask, made)
        if self.kind != "cross" and keys >= queries:
            past = current.past.get(self.stack, 0)
            total = min(keys, past + queries) if self.kind == "decoder" else keys
            self._real_queries(visible, mask, queries, total, current, made)
        call, logits = replace(call, mask=visible), call.scores()
        weights, alone = softmax(logits, visible), rows_left_alone(call, logits, visible)
        return weights if alone is None else alone(weights)

    def _in_parts(self, call: AttentionCall, made: MaskOrigin | None, current: Pass) -> AttentionCall | None:
        """The call where its mask is known to be padding and causality, of whole sequences; else None."""
        (batch, _, queries, _), keys = call.query.shape, call.key.shape[-2]
        past = current.past.get(self.stack, 0)
        if made is None or not made.simple or (self.kind == "decoder") != (made.pattern == "causal"):
            return None
        if made.keys is not None and made.keys.shape != (batch, keys):
            return None
        if self.kind == "decoder" and (past or keys != queries):
            return None
        real = current.real.get(self.layer_list) if self.kind == "cross" else made.keys
        causal = made.pattern == "causal"
        seen = current.visible(made.keys, real, causal, batch, queries, keys, call.query.device)
        current.real[self.layer_list] = real
        return replace(call, seen=seen, first_row=past if self.kind == "cross" else 0)

    def _by_mask(
        self, call: AttentionCall, mask: Tensor | None, current: Pass, made: MaskOrigin | None
    ) -> AttentionCall:
        """The call under any mask: additive or boolean, (batch or 1, heads or 1, query or 1, key)."""
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        past = 0 if self.kind == "encoder" else current.past.get(self.stack, 0)
        total = past + queries if self.kind == "decoder" else keys
        if total != keys and not current.may_hold(self.stack, self.layer_of_cache, keys, total):
            raise ValueError(
                f"{self.path} attends over {keys} keys after {past} cached tokens, with {queries} queries: "
                "they do not add up, so its map cannot be told apart from its cache's room"
            )
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
        if mask is not None:
            visible, call = _masked(call, mask, made)
        if total != keys:
            logits, visible = _absolute(call.scores(), visible, total)
            call = call.with_logits(logits)
        real = self._real_queries(visible, mask, queries, total, current, made)
        return replace(call, mask=visible, seen=Seen(None, real), first_row=past)

    def _hindrance(self, call: AttentionCall, in_parts: bool, current: Pass) -> str | None:
        """What stands against a fused form, beside what is in the call."""
        if current.weights:
            return "weights are wanted (output_attentions)"
        if in_parts:
            return None
        pieces = self.kind == "decoder" and (call.first_row or call.key.shape[-2] != call.query.shape[-2])
        return "rows come in pieces" if pieces else "masks are more than padding and causality"

    def _site_of_this_call(self, query: Tensor, key: Tensor, current: Pass) -> Site:
        batch, heads, queries, width = query.shape
        site = self.site
        current.batch = batch
        if self.map is None:
            return site
        if (heads, key.shape[1], width) != (site.heads, site.key_heads, site.head_dim):
            raise ValueError(
                f"{self.path} was attached for {site.heads} heads, {site.key_heads} key heads of width "
                f"{site.head_dim}, and attends with {heads}, {key.shape[1]} and {width}"
            )
        if self.kind == "encoder" and queries != key.shape[-2]:
            raise ValueError(
                f"{self.path} was taken for self-attention; it has {queries} queries and {key.shape[-2]} keys"
            )
        again = not torch.compiler.is_compiling() and recomputing()
        if self.shared:
            if again:
                raise RuntimeError(
                    f"{self.path} is shared by several layers, which gradient checkpointing cannot tell "
                    "apart, nor whatever else runs one of them again"
                )
            call = current.calls.get((self.chain_name, self.kind), 0)
            current.calls[self.chain_name, self.kind] = call + 1
            site = replace(site, layer=call)
        elif not again:
            if self.path in current.done:
                raise RuntimeError(
                    f"{self.path} ran twice in one forward pass; its chain has one place for it"
                )
            current.done.add(self.path)
        if self.map.reads_below or self.map.reads_rows:
            expected = current.sizes.get(self.stack)
            if expected is not None and expected != batch:
                raise ValueError(
                    f"{self.path} attends over {batch} windows or groups of its {expected} inputs; "
                    f"{' and '.join(sorted(self.map.names))} would mix maps of different ones"
                )
        return site

    def _real_queries(
        self,
        visible: Tensor,
        mask: Tensor | None,
        queries: int,
        total: int,
        current: Pass,
        made: MaskOrigin | None,
    ) -> Tensor | None:
        """Which queries are no padding, boolean (batch, query): masks hide keys only; None where all are.

        A query of self-attention is padding if its own key is hidden from every query; cross-attention has
        the queries of the self-attention before it.
        """
        batch = visible.shape[0]
        if self.kind == "cross":
            real = current.real.get(self.layer_list)
        elif mask is None:
            real = None
        elif made is not None and made.keys is not None and made.keys.shape[-1] == total:
            real = made.keys[:, total - queries :].to(visible.device)
        else:
            shown = visible.any(dim=-2).any(dim=1)
            real = shown.expand(batch, total)[:, total - queries :]
        current.real[self.layer_list] = real
        return real

    def _check_mask(
        self, call: AttentionCall, mask: Tensor | None, made: MaskOrigin | None, current: Pass
    ) -> None:
        """Refuse a mask that does not fit what the attention was taken for, before it does harm.

        What is known of its making is taken at its word; of other masks the values are looked at.
        """
        _, _, queries, total = call.shape
        if self.kind == "cross" or queries == 1:
            return
        compiling = torch.compiler.is_compiling()
        if made is not None and made.pattern is not None:
            if complaint := self._complaint(made.pattern):
                raise ValueError(f"{self.path}{complaint}")
            return
        if compiling and mask is not None:
            if any(known is mask and kind == self.kind for known, kind in current.looked_at):
                return
            current.looked_at.append((mask, self.kind))
        shown = call.shown()
        square = shown.expand(*shown.shape[:-2], queries, total)
        # What a compiler cannot tell of a mask's making, as windows, it cannot tell from what is odd in rows.
        rows = not compiling or made is None
        for complaint, wrong in self._complaints(square, call.seen.query_real, rows):
            if compiling:
                torch._assert_async(~wrong, f"{self.path}{complaint}")
            elif bool(wrong):
                raise ValueError(f"{self.path}{complaint}")

    def _complaint(self, pattern: Pattern) -> str | None:
        """What is wrong with a mask of a pattern, to be said behind the attention's path."""
        if pattern == "packed":
            return (
                ": packed sequences are not supported, windows and priors would reach across "
                "their borders; pad them instead"
            )
        if self.kind == "decoder" and pattern == "bidirectional":
            return (
                " was taken for causal, but its mask lets queries see later keys "
                "(a prefix, or image tokens): such masks are not supported"
            )
        if self.kind == "encoder" and pattern == "causal":
            return " was taken for bidirectional, but its mask is causal: not supported"
        return None

    def _complaints(self, square: Tensor, real: Tensor | None, rows: bool) -> Iterator[tuple[str, Tensor]]:
        """What may be wrong with a mask (…, query, key), and whether it is, by its values."""
        queries, total = square.shape[-2:]
        own = square.diagonal(total - queries, dim1=-2, dim2=-1)
        packed = own.new_zeros(())
        if total == queries and not self.chunked:
            before = square.diagonal(-1, dim1=-2, dim2=-1)
            packed = (own[..., 1:] & own[..., :-1] & ~before).any()
        ahead = (square & ~causal(queries, total, square.device)).any()
        several = (own.sum(dim=-1) > 1).any()  # one token sees itself, whatever the mask
        if rows and self.map is not None and self.map.reads_rows:
            yield from self._complaints_of_rows(square, real, ahead & ~packed)
        patterns: dict[Pattern, Tensor] = {
            "packed": packed,
            "bidirectional": ahead & ~packed,
            "causal": several & ~ahead & ~packed,
        }
        for pattern, present in patterns.items():
            if complaint := self._complaint(pattern):
                yield complaint, present

    def _complaints_of_rows(
        self, square: Tensor, real: Tensor | None, bidirectional: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Of masks that keep tokens apart, where rows of a map would read each other."""
        assert self.map is not None
        seeing = square.new_ones(()) if real is None else real[:, None, :, None].to(square.device)
        names = " and ".join(sorted(layer.name for layer in self.map.layers if layer.reads_rows))
        end = (
            f", and {names} would carry what it hides from row to row; mechanisms that keep to their row, "
            "such as Bayesian, will do"
        )
        offset = square.shape[-1] - square.shape[-2]
        itself = (~square.diagonal(offset, dim1=-2, dim2=-1).unsqueeze(-1) & seeing).any()
        if self.kind == "encoder":
            some = (square.any(dim=-2, keepdim=True) & ~square & seeing).any()
            yield f": its mask is neither full nor causal{end}", some & bidirectional
            itself = itself & ~bidirectional
        yield f": its mask hides tokens from themselves{end}", itself


def _made(mask: Tensor | None, current: Pass) -> MaskOrigin | None:
    return MaskOrigin("bidirectional", True, None) if mask is None else made_of(mask, current)


def _masked(call: AttentionCall, mask: Tensor, made: MaskOrigin | None) -> tuple[Tensor, AttentionCall]:
    """What a mask shows, and the call with what it adds.

    Of an additive mask that is not ours sdpa makes no boolean one either: a row without a key is uniform.
    """
    visible, bias = split_mask(mask[..., : call.key.shape[-2]])
    if bias is None:
        return visible, call
    if made is None and (torch.compiler.is_compiling() or mask._base is None or made_of(mask._base) is None):
        call = replace(call, left_alone="eager" if call.left_alone == "eager" else "biased")
    return visible, replace(call, bias=bias if call.bias is None else call.bias + bias)


def _absolute(logits: Tensor, visible: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Columns of the whole sequence, so that rows of maps line up whatever a cache keeps.

    A static cache has room for keys to come, which are cut off; a sliding one has dropped the first keys,
    whose columns come back hidden.
    """
    keys = logits.shape[-1]
    if keys == total:
        return logits, visible
    visible = visible.expand(*visible.shape[:-1], keys)
    if keys > total:
        return logits[..., :total], visible[..., :total]
    return F.pad(logits, (total - keys, 0)), F.pad(visible, (total - keys, 0))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function registered with transformers; `module.overt` does the work."""
    here = getattr(module, "overt", None)
    if here is None:  # a plain model that shares its config with an attached one
        eager = eager_of(module)
        if eager is None:
            raise RuntimeError(f"nothing is attached to this {type(module).__name__}: overt.attach does that")
        more = {"position_bias": position_bias, "softcap": softcap, **kwargs}
        given = {name: value for name, value in more.items() if value is not None}
        plain: tuple[Tensor, Tensor] = eager(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given
        )
        return plain
    current = pass_in(kwargs, here.token)
    if current is None:
        raise RuntimeError(
            f"{here.path} ran outside of a forward pass of its model; call the model, not its layers "
            "(gradient checkpointing of a family that drops keyword arguments ends here too)"
        )
    for name, argument in kwargs.items():
        if argument is not None and name not in HARMLESS and name not in current.passed:
            raise ValueError(
                f"{here.path} ({type(module).__name__}) hands its attention {name}, which is not honoured: "
                "it cannot be attached to"
            )
    current.ran = True
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: tuple[Tensor, Tensor | None] = here(
        query, key, value, attention_mask, current, scaling, dropout, position_bias, softcap
    )
    return output


def register() -> None:
    """Make the attention and its masks known to transformers; again does no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
