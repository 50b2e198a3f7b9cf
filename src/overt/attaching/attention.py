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
from overt.attaching.masks import mask as make_mask
from overt.attaching.masks import origin_of
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
# Keyword arguments of attention calls that do not change the result, or that the mask already covers.
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
    """The submodule `overt` that `attach` adds to an attention: its mechanisms and its place in the model."""

    left_alone: Literal["sdpa", "eager"] = "sdpa"  # how the plain model fills rows of padding
    layer_of_cache: int = 0
    chunked: bool = False  # whether its mask may separate chunks of tokens

    def __init__(
        self,
        site: AttentionSite,
        chain: int,
        mechanisms: tuple[Mechanism, ...],
        layer: int,
        token: str,
        pair: bool,
    ) -> None:
        super().__init__()
        self.path, self.stack, self.kind = site.path, site.stack, site.kind
        self.shared, self.layers, self.token = site.shared, site.layers, token
        self.chain_name, self.chain_number = site.chain, chain
        # Cross-attention looks up the padding of its self-attention under this name.
        self.layer_list = site.chain.split("#")[0]
        index = getattr(site.module, "layer_idx", None)
        self.layer_of_cache = index if isinstance(index, int) else 0
        config = getattr(site.module, "config", None)
        self.chunked = getattr(config, "attention_chunk_size", None) is not None
        self.keeps = False  # whether its stack decodes with convolutions, which read earlier rows
        # A module that several layers share needs a convolution, whichever layer calls it first.
        place = max(layer, 1) if site.shared else layer
        self.left_alone = "eager" if site.eager else "sdpa"
        self.site = Site(site.heads, site.head_dim, site.kind, place, site.key_heads, pair)
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

        The map is None where fused kernels ran, which do not compute it.

        Args:
            query: (batch, heads, query, dim).
            key: (batch, key heads, key, dim).
            value: like `key`.
            mask: additive or boolean, (batch or 1, heads or 1, query or 1, key).
            current: the pass that this call belongs to.
            scaling: factor of the scores.
            dropout: dropout rate of the weights, in training.
            position_bias: added to the logits; broadcasts to them.
            softcap: soft limit of the scores.
        """
        site = self._site_of_this_call(query, key, current)
        origin = _origin(mask, current)
        simple = None if self.map is None else self._simple_mask(query, key, mask, origin, current)
        past = 0 if self.kind == "encoder" else current.past.get(self.stack, 0)
        call = AttentionCall(
            site,
            query,
            key,
            value,
            scaling,
            seen=Seen() if simple is None else simple,  # explicit: compilers do not follow the default
            first_row=past,
            logits=None if softcap is None else logits_of(query, key, scaling, softcap, None),
            bias=position_bias,
            dropout=dropout if self.training else 0.0,
            scale_products=True,
            # The type that adding the mask gives; masks are float32 under autocast.
            dtype=mask.dtype if mask is not None and mask.is_floating_point() else None,
            # With a bias, sdpa's mask is additive too: a row without a key is the mean of all values.
            left_alone="biased"
            if position_bias is not None and self.left_alone == "sdpa"
            else self.left_alone,
        )
        if self.map is None:
            weights = self._plain(call, mask, current, origin)
        else:
            chain = current.chain(self.chain_name, self.chain_number, self.stack, self.keeps)
            if simple is None:
                call = self._with_any_mask(call, mask, current, origin)
            hindrance = self._hindrance(call, simple is not None, current)
            pieces = "rows come in pieces" if self.kind == "decoder" and call.first_row else None
            fused = self.map.attend(call, chain, hindrance, pieces)
            if fused is not None:
                chain.first_row(call.site, *call.shape[2:])  # counts rows if they are stored
                return fused.transpose(1, 2).contiguous(), None
            self._check_mask(call, mask, origin, current)
            chain.first_row(call.site, *call.shape[2:])  # counts rows if they are stored
            weights = self.map(call, chain)
        keys, total = key.shape[-2], weights.shape[-1]
        if total != keys:
            # Back to the cache's columns: a sliding cache has dropped the first, a static one has more.
            weights = F.pad(weights[..., max(total - keys, 0) :], (0, max(keys - total, 0)))
        weights = weights.to(query.dtype)
        return mix_values(F.dropout(weights, dropout, self.training), value), weights

    def _biased(self) -> Literal["eager", "biased"]:
        return "eager" if self.left_alone == "eager" else "biased"

    def _plain(
        self, call: AttentionCall, mask: Tensor | None, current: Pass, origin: MaskOrigin | None
    ) -> Tensor:
        """Weights where nothing is attached; notes the padding, which cross-attention may need."""
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
        if mask is not None:
            visible, call = _apply_mask(call, mask, origin)
        if self.kind != "cross" and keys >= queries:
            total = min(keys, call.first_row + queries) if self.kind == "decoder" else keys
            self._real_queries(visible, mask, queries, total, current, origin)
        call, logits = replace(call, mask=visible), call.scores()
        weights, alone = softmax(logits, visible), rows_left_alone(call, logits, visible)
        return weights if alone is None else alone(weights)

    def _simple_mask(
        self, query: Tensor, key: Tensor, mask: Tensor | None, origin: MaskOrigin | None, current: Pass
    ) -> Seen | None:
        """What a mask lets queries see if it is known to be padding and causality; else None.

        Rows must be whole sequences or, with a cache, single.
        """
        (batch, _, queries, _), keys = query.shape, key.shape[-2]
        past = current.past.get(self.stack, 0)
        if origin is None or not origin.simple or (self.kind == "decoder") != (origin.pattern == "causal"):
            return None
        if origin.keys is not None and origin.keys.shape != (batch, keys):
            return None
        if self.kind == "decoder" and (keys != past + queries or (past and queries > 1)):
            return None
        if mask is not None and mask.shape[-1] != keys:
            return None
        real = current.real.get(self.layer_list) if self.kind == "cross" else origin.keys
        causal = origin.pattern == "causal" and queries > 1  # a single row sees all keys so far
        seen = current.visible(origin.keys, real, causal, batch, queries, keys, query.device)
        current.real[self.layer_list] = seen.query_real
        return seen

    def _with_any_mask(
        self, call: AttentionCall, mask: Tensor | None, current: Pass, origin: MaskOrigin | None
    ) -> AttentionCall:
        """The call with any mask: additive or boolean, (batch or 1, heads or 1, query or 1, key)."""
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        past = call.first_row
        total = past + queries if self.kind == "decoder" else keys
        if total != keys and not current.may_hold(self.stack, self.layer_of_cache, keys, total):
            raise ValueError(
                f"{self.path} attends over {keys} keys after {past} cached tokens, with {queries} queries: "
                "they do not add up, so which keys belong to its map is unknown"
            )
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
        if mask is not None:
            visible, call = _apply_mask(call, mask, origin)
        if total != keys:
            logits, visible = _whole_sequence(call.scores(), visible, total)
            call = call.with_logits(logits)
        real = self._real_queries(visible, mask, queries, total, current, origin)
        return replace(call, mask=visible, seen=Seen(None, real))

    def _hindrance(self, call: AttentionCall, simple_mask: bool, current: Pass) -> str | None:
        """What rules out fused kernels, apart from what the call itself holds."""
        if current.weights:
            return "weights are wanted (output_attentions)"
        if simple_mask:
            return None
        pieces = self.kind == "decoder" and (call.first_row or call.key.shape[-2] != call.query.shape[-2])
        return "rows come in pieces" if pieces else "masks are more than padding and causality"

    def _site_of_this_call(self, query: Tensor, key: Tensor, current: Pass) -> Site:
        """The mechanisms' site, with the layer of this call; refuses calls that do not fit it."""
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
                    f"{self.path} is shared by several layers: it does not support gradient checkpointing, "
                    "or anything else that runs a layer again"
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
        expected = current.sizes.get(self.stack, batch)
        if expected != batch and (self.map.reads_below or self.map.reads_rows):
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
        origin: MaskOrigin | None,
    ) -> Tensor | None:
        """Which queries are not padding, boolean (batch, query); None if none is padding.

        Masks hide only keys. A query of self-attention is padding if its own key is hidden from every query;
        cross-attention has the same queries as the self-attention before it.
        """
        batch = visible.shape[0]
        if self.kind == "cross":
            real = current.real.get(self.layer_list)
        elif mask is None:
            real = None
        elif origin is not None and origin.keys is not None and origin.keys.shape[-1] == total:
            real = origin.keys[:, total - queries :].to(visible.device)
        else:
            shown = visible.any(dim=-2).any(dim=1)
            real = shown.expand(batch, total)[:, total - queries :]
        current.real[self.layer_list] = real
        return real

    def _check_mask(
        self, call: AttentionCall, mask: Tensor | None, origin: MaskOrigin | None, current: Pass
    ) -> None:
        """Refuse a mask that does not fit the attention's kind.

        If it is known how the mask was built, that decides; otherwise its values are checked.
        """
        _, _, queries, total = call.shape
        if self.kind == "cross" or queries == 1:
            return
        compiling = torch.compiler.is_compiling()
        if origin is not None and origin.pattern is not None:
            if complaint := self._complaint(origin.pattern):
                raise ValueError(f"{self.path}{complaint}")
            return
        if compiling and mask is not None:
            if any(known is mask and kind == self.kind for known, kind in current.looked_at):
                return
            current.looked_at.append((mask, self.kind))
        shown = call.shown()
        square = shown.expand(*shown.shape[:-2], queries, total)
        # Under a compiler, the pattern of a mask built here is unknown if it has windows, for example. Its
        # values do not tell it from one that separates tokens: rows are not checked.
        rows = not compiling or origin is None
        for complaint, wrong in self._complaints(square, call.seen.query_real, rows):
            if compiling:
                torch._assert_async(~wrong, f"{self.path}{complaint}")
            elif bool(wrong):
                raise ValueError(f"{self.path}{complaint}")

    def _complaint(self, pattern: Pattern) -> str | None:
        """What is wrong with a mask of this pattern, if anything; follows the attention's path in errors."""
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
        """What may be wrong with a mask (…, query, key), and whether its values show that it is."""
        queries, total = square.shape[-2:]
        diagonal = square.diagonal(total - queries, dim1=-2, dim2=-1)
        packed = diagonal.new_zeros(())
        if total == queries and not self.chunked:
            before = square.diagonal(-1, dim1=-2, dim2=-1)
            packed = (diagonal[..., 1:] & diagonal[..., :-1] & ~before).any()
        ahead = (square & ~causal(queries, total, square.device)).any()
        several = (diagonal.sum(dim=-1) > 1).any()  # a single token sees itself under any mask
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
        """The same for masks that separate tokens, where rows of a map would read each other."""
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
            partial = (square.any(dim=-2, keepdim=True) & ~square & seeing).any()
            yield f": its mask is neither full nor causal{end}", partial & bidirectional
            itself = itself & ~bidirectional
        yield f": its mask hides tokens from themselves{end}", itself


def _origin(mask: Tensor | None, current: Pass) -> MaskOrigin | None:
    return MaskOrigin("bidirectional", True, None) if mask is None else origin_of(mask, current)


def _apply_mask(call: AttentionCall, mask: Tensor, origin: MaskOrigin | None) -> tuple[Tensor, AttentionCall]:
    """Which cells a mask shows, and the call with the finite bias that it adds.

    An additive mask that was not built here stays additive under sdpa: a row without a key is uniform.
    """
    visible, bias = split_mask(mask[..., : call.key.shape[-2]])
    if bias is None:
        return visible, call
    unknown = torch.compiler.is_compiling() or mask._base is None or origin_of(mask._base) is None
    if origin is None and unknown:
        call = replace(call, left_alone="eager" if call.left_alone == "eager" else "biased")
    return visible, replace(call, bias=bias if call.bias is None else call.bias + bias)


def _whole_sequence(logits: Tensor, visible: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Logits and visibility with a column for each token so far, so that rows of maps line up.

    A static cache has room for future keys, which is cut off; a sliding cache has dropped the first keys,
    whose columns are restored as hidden.
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
            raise RuntimeError(
                f"nothing is attached to this {type(module).__name__}: call overt.attach on its model"
            )
        optional = {"position_bias": position_bias, "softcap": softcap, **kwargs}
        optional = {name: value for name, value in optional.items() if value is not None}
        plain: tuple[Tensor, Tensor] = eager(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **optional
        )
        return plain
    current = pass_in(kwargs, here.token)
    if current is None:
        raise RuntimeError(
            f"{here.path} ran outside a forward pass of its model; call the model, not its layers "
            "(gradient checkpointing fails this way in a family that drops keyword arguments)"
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
    """Register the attention and its masks with transformers; may be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
