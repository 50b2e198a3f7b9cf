"""Fused forms: from queries to outputs in one step, each for the set of mechanisms that it covers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from overt.mechanisms import backend
from overt.mechanisms.call import AttentionCall, repeat_heads
from overt.mechanisms.chain import Chain
from overt.mechanisms.maps import transformed
from overt.mechanisms.mechanism import MechanismLayer

WIDEST = 128
MOST_EXAMPLES = 65_535
ROOM_FOR_WIDE = 180_224  # bytes of shared memory


def attend_limits(call: AttentionCall) -> str | None:
    """Why the attention kernels do not take a call; None if they do."""
    query, key, value = call.query, call.key, call.value
    if value.shape[:-1] != key.shape[:-1]:
        return f"values {tuple(value.shape)} and keys {tuple(key.shape)} differ in shape"
    width = max(query.shape[-1], value.shape[-1])
    if width > WIDEST:
        return f"heads are {width} wide, kernels take up to {WIDEST}"
    wide = query.dtype == torch.float32 and width > 64
    if wide and backend.room(query.device) < ROOM_FOR_WIDE:
        return "float32 heads of more than 64 need more shared memory than this GPU has"
    if not call.scale > 0.0:
        return f"the scale must be positive, got {call.scale}"
    if call.dropout >= 1.0:
        return "every weight is dropped"
    if query.shape[0] > MOST_EXAMPLES:
        return f"kernels take up to {MOST_EXAMPLES} examples, got {query.shape[0]}"
    if min(query.shape) == 0 or min(key.shape) == 0:
        return "there is nothing to attend"
    return None


def of_equal_widths(call: AttentionCall) -> AttentionCall:
    """The call with the narrower of keys and values filled up with zeros, as kernels take it.

    Zeros change no score, and give outputs of zeros in the columns that they add.
    """
    width, value_width = call.key.shape[-1], call.value.shape[-1]
    if width == value_width:
        return call
    if value_width < width:
        return replace(call, value=F.pad(call.value, (0, width - value_width)))
    query, key = (F.pad(x, (0, value_width - width)) for x in (call.query, call.key))
    return replace(call, query=query, key=key, prior_key=call.keys_of_prior)


Layers = Mapping[str, MechanismLayer]


@dataclass(frozen=True)
class FusedForm:
    """A fused form, and what it is for.

    Attributes:
        covers: names of the mechanisms that it computes, all of them together.
        attend: layers by name, call, chain → output (batch, heads, query, dim). It leaves in the chain what
            the layers would have left.
        draw: the same with a number of samples → (samples, batch, heads, query, dim), without gradients; None
            where it draws one sample at a time.
        runs_on: the kind of backend.
        limits: call → why it does not take it, None if it does; `MechanismLayer.unfit` is checked as well.
        attends_padding: whether it already gives padded queries plain attention's output where the call
            requires it, and zeros to those that see no key. Otherwise all of them get zeros.
        any_width: whether `attend` takes values of another width than keys, where `call.left_alone` is None.
            Otherwise the narrower are filled up first.
        attend_row: `attend` for a single query row of a decoder, which may be fed after others
            (`Chain(keep=True)`), without gradients. It gives every row that mechanisms leave alone what
            `call.left_alone` says, and adds `call.bias`. None where there is no such form.
        row_limits: layers by name, call, chain → why `attend_row` does not take the call, None if it does;
            `limits` is checked as well.
    """

    covers: frozenset[str]
    attend: Callable[[Layers, AttentionCall, Chain], Tensor]
    draw: Callable[[Layers, AttentionCall, Chain, int], Tensor] | None = None
    runs_on: backend.Backend = backend.KERNELS
    limits: Callable[[AttentionCall], str | None] = attend_limits
    attends_padding: bool = False
    any_width: bool = False
    attend_row: Callable[[Layers, AttentionCall, Chain], Tensor] | None = None
    row_limits: Callable[[Layers, AttentionCall, Chain], str | None] | None = None


_forms: dict[frozenset[str], FusedForm] = {}


def register_fused(form: FusedForm) -> None:
    """Register a fused form; it replaces any other that covers the same mechanisms."""
    _forms[form.covers] = form


def form_of(names: frozenset[str]) -> FusedForm | None:
    """The form that covers exactly these mechanisms, or None."""
    return _forms.get(names)


def why_plain(
    layers: Sequence[MechanismLayer], call: AttentionCall, chain: Chain, draws: bool = False
) -> str | None:
    """Why plain operations rather than a fused form compute a call; None if a fused form does.

    Args:
        layers: the layers of all mechanisms.
        call: the attention call.
        chain: of this forward pass.
        draws: whether many samples are requested at once.
    """
    if not layers:
        return "there is no mechanism"
    form = form_of(frozenset(layer.name for layer in layers))
    if form is None:
        return f"no fused form covers {' and '.join(layer.name for layer in layers)}"
    if draws and form.draw is None:
        return "its fused form draws one sample at a time"
    if chain.keep:
        return "rows may be fed in pieces"
    if reason := backend.unfit(form.runs_on, call.query, call.key, call.value, off=chain.switched_off):
        return reason
    if reason := call.why_not_products() or form.limits(call):
        return reason
    for layer in layers:
        if reason := layer.unfit(call):
            return reason
    return None


def why_not_row(form: FusedForm | None, layers: Layers, call: AttentionCall, chain: Chain) -> str | None:
    """Why a form's `attend_row` does not compute a call; None if it does."""
    query, key, value = call.query, call.key, call.value
    if form is None or form.attend_row is None or query.shape[2] != 1 or call.site.kind == "encoder":
        return "rows may be fed in pieces"
    if reason := backend.unfit(form.runs_on, query, key, value, off=chain.switched_off):
        return reason
    if torch.compiler.is_compiling():
        return "the kernel for single rows is not an operator that a compiler can take"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "the kernel for single rows has no gradients"
    if call.dropout > 0.0:
        return "the kernel for single rows has no dropout"
    if call.logits is not None:
        return "logits are more than products and a bias"
    if call.mask is not None:
        return "masks are more than padding and causality"
    reason = form.limits(call)
    return reason or (None if form.row_limits is None else form.row_limits(layers, call, chain))


def torchs_own_suffices(layers: Sequence[MechanismLayer], call: AttentionCall, chain: Chain) -> bool:
    """Whether torch's own attention suffices: no layer does anything, and no gradient is needed.

    Where gradients are needed plain operations run, since the gradients of torch's fused forms cannot be
    differentiated again.
    """
    if not layers or chain.keep or chain.switched_off is not None or call.why_not_products() is not None:
        return False
    inputs = call.query, call.key, call.value
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return False
    if any(x.dtype != call.query.dtype or x.device != call.query.device for x in inputs):
        return False
    if transformed() or call.dropout > 0.0 or min(call.shape) == 0:
        return False
    return all(layer.idle(chain) for layer in layers)


def torchs_own(call: AttentionCall) -> Tensor:
    """Output (batch, heads, query, dim) of plain attention; padded rows as `call.left_alone` says."""
    heads, (_, _, queries, keys), seen = call.query.shape[1], call.shape, call.seen
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    mask = seen.for_sdpa(queries, keys, call.query.device)
    causal = seen.causal and mask is None
    out = F.scaled_dot_product_attention(
        call.query, key, value, attn_mask=mask, dropout_p=call.dropout, is_causal=causal, scale=call.scale
    )
    blind = seen.blind(queries, keys) if call.left_alone is None else seen.unseeing(queries, keys)
    if blind is None:
        return out
    rows = blind.view(-1, 1, queries, 1)
    if call.left_alone == "eager":
        return torch.where(rows, _uniform(call).to(out.dtype), out)
    return out.masked_fill(rows, 0.0)


def _uniform(call: AttentionCall) -> Tensor:
    """The mean of all values for each query, as in eager attention where no key is shown.

    There the added mask rounds the scores away, yet they have gradients. Here scores minus their detached
    selves have the same effect.
    """
    heads = call.query.shape[1]
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    if not torch.is_grad_enabled() or not (call.query.requires_grad or call.key.requires_grad):
        return value.mean(dim=-2, keepdim=True)
    query = torch.cat([call.query, -call.query.detach()], dim=-1)
    key = torch.cat([key, key.detach()], dim=-1)
    return F.scaled_dot_product_attention(query, key, value, scale=call.scale)


def with_rows_left_alone(out: Tensor, call: AttentionCall, form: FusedForm) -> Tensor:
    """A fused form's output, with the rows that mechanisms leave alone set as `call.left_alone` says."""
    if call.left_alone is None or (call.left_alone == "sdpa" and form.attends_padding):
        return out
    queries, keys = call.shape[2:]
    seen = call.seen
    rows = seen.unseeing(queries, keys) if form.attends_padding else seen.blind(queries, keys)
    if rows is None:
        return out
    plain = _uniform(call) if form.attends_padding else torchs_own(call)
    return torch.where(rows.view(-1, 1, queries, 1), plain.to(out.dtype), out)
