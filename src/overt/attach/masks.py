"""Masks for attached models, and what is known of how each was made.

The mask that reaches an attention is a (batch, 1, query, key) tensor, and whether it is no more than padding
and causality cannot be read from it cheaply. It was known when the mask was made, so that is noted then: it
is what the KL's closed form asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Made(NamedTuple):
    """How a mask was made, when it is only padding and perhaps causal.

    Attributes:
        keys: (batch, key), False at padding; None where there is none.
        causal: whether later keys are hidden.
    """

    keys: Tensor | None
    causal: bool


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def made_of(mask: Tensor) -> Made | None:
    """How a mask was made, if it was made here and simply."""
    if torch.compiler.is_compiling():
        return None
    made: Made | None = _made.get(mask)  # type: ignore[no-untyped-call]
    return made


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' additive mask, with a note of how it was made."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask

    function = causal_mask_function if mask_function is None else mask_function
    result: Tensor | None = eager_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        **kwargs,
    )
    causal = function is causal_mask_function
    simple = causal or function is bidirectional_mask_function
    if result is None or not simple or torch.compiler.is_compiling():
        return result
    plain = isinstance(q_offset, int) and q_offset == kv_offset == 0
    if plain and (attention_mask is None or attention_mask.shape == (batch_size, kv_length)):
        _made[result] = Made(None if attention_mask is None else attention_mask.bool(), causal)
    return result
