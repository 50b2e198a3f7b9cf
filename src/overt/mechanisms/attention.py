"""Multi-head attention with mechanisms, called like `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt._modes import evaluating
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.backend import maps_wanted
from overt.mechanisms.call import AttentionCall, repeat_heads
from overt.mechanisms.chain import Chain
from overt.mechanisms.maps import transformed
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.scores import AdditiveScore, RelativePosition, RelativePosition2d
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Kind, Site

# Masks often use a large negative number for −inf: −1e4, −1e9, the dtype's minimum. Such a number must not
# enter a convolution or a KL; no meaningful bias is this low.
FINITE_HIDDEN = -1e4


class MultiheadAttention(nn.Module):
    """Multi-head attention whose map passes through `mechanisms`.

    Arguments, call and parameter names are those of `torch.nn.MultiheadAttention`, whose `state_dict` loads
    into it; without mechanisms it computes the same. The differences:

    - a query that sees no key gets zeros rather than NaN;
    - the returned weights are those before dropout;
    - a finite mask value of −10,000 or less hides a key, as −inf does;
    - `kind="decoder"` hides later keys without a mask.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads.
        dropout: on the weights, in training.
        bias: whether projections have biases.
        add_bias_kv: torch's argument; only False.
        add_zero_attn: torch's argument; only False.
        kdim: width of keys, if not `embed_dim`.
        vdim: width of values, if not `embed_dim`.
        batch_first: (batch, sequence, feature) rather than (sequence, batch, feature).
        device: of the parameters.
        dtype: of the parameters.
        mechanisms: such as `Evolving()` and `Bayesian()`, at most one of each kind.
        kind: "encoder", "decoder" (causal self-attention) or "cross".
        layer: place in the chain of its kind, from 0.
        encoder_decoder: whether the model has both an encoder and a decoder; see `Evolving.decoder_alpha`.
        num_key_heads: number of key and value heads; fewer than `num_heads` makes grouped-query attention.
        score: "dot" (scaled dot product) or "additive" (Bahdanau).
        position: a relative position term, added to the logits before mixing (equation 2).
        start: whether a chain starts here, whatever the layer. Two stacks of one kind share one numbering, so
            that their noise differs, and the first layer of the second takes nothing from the first stack.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanisms: Sequence[Mechanism] = (),
        kind: Kind = "encoder",
        layer: int = 0,
        encoder_decoder: bool = False,
        num_key_heads: int | None = None,
        score: Literal["dot", "additive"] = "dot",
        position: RelativePosition | RelativePosition2d | None = None,
        start: bool = False,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn must be False: a map has no room for extra keys")
        _check.whole("embed_dim", embed_dim, 1)
        _check.whole("num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim ({embed_dim}), got {num_heads}")
        _check.fraction("dropout", dropout)
        _check.one_of("score", score, ("dot", "additive"))
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.key_heads = num_heads if num_key_heads is None else num_key_heads
        site = Site(num_heads, self.head_dim, kind, layer, num_key_heads, encoder_decoder, start)

        key_width = self.key_heads * self.head_dim
        self.kdim, self.vdim = kdim, vdim = kdim or embed_dim, vdim or embed_dim
        self.packed = kdim == vdim == embed_dim and key_width == embed_dim
        if self.packed:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
            self.k_proj_weight = nn.Parameter(torch.empty(key_width, kdim))
            self.v_proj_weight = nn.Parameter(torch.empty(key_width, vdim))
        self.in_proj_bias = nn.Parameter(torch.empty(embed_dim + 2 * key_width)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.score = AdditiveScore(num_heads, self.head_dim) if score == "additive" else None
        self.position = position
        self.map = AttentionMap(mechanisms, site)
        self._reset_projections()
        self.to(device=device, dtype=dtype)

    def _reset_projections(self) -> None:
        weights = (
            [self.in_proj_weight]
            if self.packed
            else [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        )
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        chain: Chain | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `torch.nn.MultiheadAttention.forward` for the shared arguments.

        Args:
            query: (batch, query, embed_dim), in the order set by `batch_first`, or without a batch.
            key: (batch, key, kdim).
            value: (batch, key, vdim).
            key_padding_mask: (batch, key), True (or −inf) at padding.
            need_weights: whether to return the weights.
            attn_mask: (query, key) or (batch·heads, query, key); True hides, floats are added to the logits.
            average_attn_weights: return the mean over heads, (batch, query, key), rather than each head's
                weights, (batch, heads, query, key).
            is_causal: hide later keys. Unlike in torch, no `attn_mask` is needed with it.
            query_padding_mask: boolean (batch, query), True at padding. None takes it from `key_padding_mask`
                in self-attention, and means no padding with kind="cross".
            chain: the forward pass's `Chain`; needed by random weights, and by Evolving above layer 0.

        Returns:
            output: shaped like `query`.
            weights: the map used (a sample in training), before dropout; None unless `need_weights`.
        """
        batched = self._check(query, key, value)
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            query_padding_mask = None if query_padding_mask is None else query_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        chain = Chain() if chain is None else chain

        q, k, v = self._project(query, key, value)
        masks = key_padding_mask, query_padding_mask, attn_mask
        first_row = chain.first_row(self.map.site, q.shape[-2], k.shape[-2])
        call = self._call(q, k, v, *masks, is_causal, first_row, chain)
        hindrance = "weights are wanted; need_weights=False avoids that" if need_weights else None
        if hindrance is None and maps_wanted():
            hindrance = "maps are wanted"
        fused = self.map.attend(call, chain, hindrance)
        if fused is not None:
            return self._project_output(fused, call.seen.blind(*call.shape[2:]), batched), None
        weights = self.map(call, chain)
        dropped = F.dropout(weights, call.dropout).to(v.dtype)
        output = self._project_output(dropped @ repeat_heads(v, self.num_heads), call.blind(), batched)
        if not need_weights:
            return output, None
        weights = weights.to(output.dtype)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return output, weights if batched else weights.squeeze(0)

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        first_row: int,
        chain: Chain,
    ) -> AttentionCall:
        """The call that a forward pass makes to its map."""
        queries, keys = q.shape[-2], k.shape[-2]
        if is_causal and self.map.site.kind != "decoder":
            first_row = keys - queries
        seen, bias = self._seen(q, k, key_padding_mask, query_padding_mask, is_causal, chain)
        logits = mask = prior_key = None
        scale, position = self.head_dim**-0.5, self.position
        if self.score is not None:
            logits = self.score(q, repeat_heads(k, self.num_heads))
        if isinstance(position, RelativePosition2d) and logits is None and self.map.reads_logits_only:
            prior_key, (q, k), scale = k, position.widen(q, k, scale), 1.0
        elif position is not None:
            if logits is None:
                logits = (q * scale) @ repeat_heads(k, self.num_heads).mT
            logits = logits + position(q, keys, first_row)
        if attn_mask is not None:
            mask, mask_bias = self._split_mask(attn_mask, q.shape[0], queries, keys)
            bias = bias if mask_bias is None else mask_bias if bias is None else bias + mask_bias
        bias = None if bias is None else bias.to((q if logits is None else logits).dtype)
        dropout = self.dropout if self.training else 0.0
        site = self.map.site
        return AttentionCall(site, q, k, v, scale, logits, prior_key, seen, mask, bias, first_row, dropout)

    @torch.no_grad()
    def draws(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        samples: int = 20,
        key_padding_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        query_padding_mask: Tensor | None = None,
        chain: Chain | None = None,
    ) -> Tensor:
        """Outputs under draws 0 … samples − 1 of the weights: (samples, …), followed by the axes of `query`.

        They equal those of `forward` with `Chain(sample=s)`, without dropout and without gradients. On a GPU,
        the projections are computed once for all draws, and keys and values are read once.

        Args:
            query: as in `forward`.
            key: as in `forward`.
            value: as in `forward`.
            samples: number of draws.
            key_padding_mask: as in `forward`.
            is_causal: as in `forward`.
            query_padding_mask: as in `forward`.
            chain: gives the noise its step, seed and examples; by default a chain at step 0.
        """
        if not self.map.random:
            raise ValueError("draws needs random weights: give mechanisms=[Bayesian(…)]")
        _check.whole("samples", samples, 1)
        chain = Chain(step=0) if chain is None else chain
        if chain.keep or chain.sample is not None:
            raise ValueError(
                "draws numbers the samples itself and takes whole sequences: "
                "pass a chain without sample and keep"
            )
        batched = self._check(query, key, value)
        if batched:
            drawn = self._draw_fused(
                query, key, value, samples, key_padding_mask, chain, is_causal, query_padding_mask
            )
            if drawn is not None:
                return drawn
        masks: dict[str, Any] = {"is_causal": is_causal, "query_padding_mask": query_padding_mask}
        outputs = []
        with evaluating(self):
            for number in range(samples):
                sample_chain = copy(chain)
                sample_chain.sample = torch.tensor(number)
                inputs = (query, key, value, key_padding_mask, False)
                outputs.append(self(*inputs, chain=sample_chain, **masks)[0])
        return torch.stack(outputs)

    def _draw_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        samples: int,
        key_padding_mask: Tensor | None,
        chain: Chain,
        is_causal: bool,
        query_padding_mask: Tensor | None,
    ) -> Tensor | None:
        """`draws` by fused kernels; None where they do not apply."""
        if not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._project(query, key, value)
        queries, keys = q.shape[-2], k.shape[-2]
        first_row = keys - queries if is_causal or self.map.site.kind == "decoder" else 0
        masks = key_padding_mask, query_padding_mask, None
        call = replace(self._call(q, k, v, *masks, is_causal, first_row, chain), dropout=0.0)
        drawn = self.map.draw(call, chain, samples)
        if drawn is None:
            return None
        blind = call.seen.blind(queries, keys)
        return torch.stack([self._project_output(sample, blind, True) for sample in drawn])

    def _project_output(self, mixed: Tensor, blind: Tensor | None, batched: bool) -> Tensor:
        """Project the heads' outputs (batch, heads, query, dim), with axes in the order of the queries'."""
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if blind is not None:  # queries that see no key: zeros, not the projection's bias
            output = output.masked_fill(blind.unsqueeze(-1), 0.0)
        if not batched:
            return output.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project and split into heads: (batch, heads or key heads, sequence, head_dim)."""
        widths = [self.embed_dim, self.key_heads * self.head_dim, self.key_heads * self.head_dim]
        if self.packed and query is key and key is value:  # self-attention: one product instead of three
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            packed = packed.view(*query.shape[:2], 3, self.num_heads, self.head_dim)
            q, k, v = packed.transpose(1, 3).unbind(2)
            return q, k, v
        weights = (
            torch.split(self.in_proj_weight, widths)
            if self.packed
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, widths)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _seen(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        is_causal: bool,
        chain: Chain,
    ) -> tuple[Seen, Tensor | None]:
        """What padding and causality leave visible; and padding's finite bias, if any, (batch, 1, 1, key)."""
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        kind = self.map.site.kind
        if is_causal and kind != "decoder" and self.map.reads_rows:
            names = " and ".join(layer.name for layer in self.map.layers if layer.reads_rows)
            raise ValueError(
                f'is_causal=True with {names} needs kind="decoder": the windows of {kind!r} look ahead'
            )
        is_causal = is_causal or kind == "decoder"
        if is_causal and keys < queries:
            raise ValueError(f"a causal map needs at least as many keys as queries, got {keys} and {queries}")
        if key_padding_mask is not None:
            _check_shape("key_padding_mask", key_padding_mask, (batch, keys))
        if query_padding_mask is not None:
            _check_shape("query_padding_mask", query_padding_mask, (batch, queries))
            if query_padding_mask.dtype != torch.bool:
                raise TypeError(f"query_padding_mask must be boolean, got {query_padding_mask.dtype}")
        # Whether padded keys are padded queries, too.
        shared = query_padding_mask is None and key_padding_mask is not None
        shared = shared and kind != "cross" and self.map.has_mechanism
        if shared and queries != keys and kind == "encoder":
            raise ValueError(
                f'kind="encoder" is self-attention, got {queries} queries and {keys} keys: '
                'use kind="cross", or give query_padding_mask'
            )

        def made() -> tuple[Seen, Tensor | None]:
            key_visible = key_bias = query_real = None
            if key_padding_mask is not None:
                key_visible, key_bias = _split(key_padding_mask)
            if query_padding_mask is not None:
                query_real = ~query_padding_mask
            elif key_visible is not None and shared:
                query_real = key_visible[:, keys - queries :]
            bias = None if key_bias is None else key_bias.view(batch, 1, 1, keys)
            return Seen(key_visible, query_real, is_causal), bias

        masks = [mask for mask in (key_padding_mask, query_padding_mask) if mask is not None]
        if not masks or not all(_lasts(mask, chain) for mask in masks):
            return made()
        # Layers that are given the same masks share what is derived from them. The masks are kept beside it:
        # another one, made after they were gone, could have the identity of one of them.
        identities = tuple((id(mask), mask._version) for mask in masks)
        key = "seen", identities, query_padding_mask is None, shared and queries, is_causal
        return chain.once(key, lambda: (made(), masks))[0]

    def _split_mask(self, mask: Tensor, batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor | None]:
        """Split `attn_mask` into visibility and finite bias, both (batch or 1, heads or 1, query, key)."""
        if mask.dim() == 3:
            _check_shape("attn_mask", mask, (batch * self.num_heads, queries, keys))
            return _split(mask.view(batch, self.num_heads, queries, keys))
        _check_shape("attn_mask", mask, (queries, keys))
        return _split(mask.view(1, 1, queries, keys))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Refuse wrong ranks, lengths and dtypes; return whether there is a batch axis."""
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key and value must all have 3 axes, or 2 without a batch, got {shapes}")
        if query.shape[-1] != self.embed_dim:
            raise ValueError(f"query must be {self.embed_dim} wide (embed_dim), got {query.shape[-1]}")
        if key.shape[-1] != self.kdim or value.shape[-1] != self.vdim:
            widths = f"{key.shape[-1]} and {value.shape[-1]}"
            raise ValueError(
                f"key and value must be {self.kdim} and {self.vdim} wide (kdim, vdim), got {widths}"
            )
        if min(query.shape) == 0 or min(key.shape) == 0:
            raise ValueError(f"nothing to attend: query is {tuple(query.shape)}, key {tuple(key.shape)}")
        if key.shape[:-1] != value.shape[:-1]:
            shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
            raise ValueError(f"key and value must have the same batch and length, got {shapes}")
        if query.dim() == 3:
            axis = 0 if self.batch_first else 1
            if query.shape[axis] != key.shape[axis]:
                sizes = f"{query.shape[axis]} and {key.shape[axis]}"
                raise ValueError(f"query and key must have the same batch size, got {sizes}")
        dtype = self.out_proj.weight.dtype
        if query.device.type == "meta" or not torch.is_autocast_enabled(query.device.type):
            for name, x in (("query", query), ("key", key), ("value", value)):
                if x.dtype != dtype:
                    raise TypeError(
                        f"{name} is {x.dtype} but the module's weights are {dtype}: "
                        "convert one of them, or use torch.autocast"
                    )
        return query.dim() == 3


def _lasts(mask: Tensor, chain: Chain) -> bool:
    """Whether what is derived from a mask can be shared by the layers of a pass."""
    if torch.compiler.is_compiling() or transformed() or chain.keep:
        return False
    # A finite bias may have a gradient. Inference tensors do not tell when they are written to.
    inference = mask.is_inference() or torch.is_inference_mode_enabled()
    return type(mask) is Tensor and mask.dtype == torch.bool and not inference


def _check_shape(name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    if mask.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(mask.shape)}")


def _split(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split a torch mask, boolean (True hides) or additive (−inf hides), into visibility and finite bias."""
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise TypeError(f"a mask must be boolean or floating-point, got {mask.dtype}")
    shown = (mask > FINITE_HIDDEN) | mask.isnan()
    return shown, mask.masked_fill(~shown, 0.0)
