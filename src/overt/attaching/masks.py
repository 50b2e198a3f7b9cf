"""Masks for attached models, and what is known of how each was made.

The mask that reaches an attention is a (batch, 1, query, key) tensor, and what it is made of (padding,
causality, a window, something else) cannot be read from it cheaply. It was known when the mask was made, so
it is noted then: attentions check it against what they were taken for, and the KL's closed form asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from overt.attaching.mask_origin import MaskOrigin, Pattern
from overt.attaching.passes import Pass, innermost

# Names of transformers' mask functions, by what they do. Anything else may do anything.
CAUSAL = {"causal_mask_function"}
BIDIRECTIONAL = {"bidirectional_mask_function", "sliding_window_bidirectional_overlay.<locals>.inner_mask"}
NARROWING = {
    "sliding_window_overlay.<locals>.inner_mask",
    "chunked_overlay.<locals>.inner_mask",
    "padding_mask_function.<locals>.inner_mask",
}
CHUNKED = "chunked_overlay.<locals>.inner_mask"
PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def made_of(mask: Tensor, current: Pass | None = None) -> MaskOrigin | None:
    """How a mask was made, if it was made here and not changed since (which a compiler cannot tell)."""
    if torch.compiler.is_compiling():
        for known, made in () if current is None else current.masks:
            if known is mask:
                return made
        return None
    found: tuple[MaskOrigin, int] | None = _made.get(mask)  # type: ignore[no-untyped-call]
    return found[0] if found is not None and found[1] == _version(mask) else None


def _version(mask: Tensor) -> int:
    return 0 if mask.is_inference() else mask._version


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions that a mask function is the intersection of."""
    name = getattr(function, "__qualname__", "")
    if name != "and_masks.<locals>.and_mask":
        yield name
        return
    for cell in function.__closure__ or ():
        for part in cell.cell_contents if isinstance(cell.cell_contents, tuple) else ():
            yield from _parts(part)


def _pattern(
    function: Callable[..., Any],
) -> tuple[Pattern | None, bool]:
    """Pattern, and whether there is nothing else to it."""
    parts = set(_parts(function))
    if PACKED in parts:
        return "packed", False
    if parts & CAUSAL and parts <= CAUSAL | NARROWING:
        return "causal", parts <= CAUSAL
    if parts & BIDIRECTIONAL and parts <= (BIDIRECTIONAL | NARROWING) - {CHUNKED}:
        return "bidirectional", parts <= {"bidirectional_mask_function"}
    return None, False


def _pattern_by_name(function: Callable[..., Any]) -> tuple[Pattern | None, bool]:
    """The same where a compiler looks on, which does not see into closures."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return "causal", True
    if function is bidirectional_mask_function:
        return "bidirectional", True
    return None, False


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
    from transformers.masking_utils import causal_mask_function, eager_mask

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
    if result is None:
        return result
    compiling = torch.compiler.is_compiling()
    pattern, simple = _pattern_by_name(function) if compiling else _pattern(function)
    keys = None if attention_mask is None else attention_mask.to(torch.bool, copy=True)
    whole = isinstance(q_offset, int) and q_offset == kv_offset == 0
    fits = keys is None or keys.shape == (batch_size, kv_length)
    made = MaskOrigin(pattern, simple and whole and fits, keys)
    if not compiling:
        _made[result] = made, _version(result)
    elif (current := innermost()) is not None:
        current.masks.append((result, made))
    return result
