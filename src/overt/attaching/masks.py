"""Masks for attached models, and a record of how each was built.

The mask that reaches an attention is a (batch, 1, query, key) tensor, from which its components (padding,
causality, a window, something else) cannot be recovered cheaply. They are known when the mask is built, and
recorded then: attentions check the record against their kind, and the KL's closed form uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from overt.attaching.mask_origin import MaskOrigin, Pattern
from overt.attaching.passes import Pass, innermost

# Names of transformers' mask functions, by what they do. About any other function nothing is known.
CAUSAL = {"causal_mask_function"}
BIDIRECTIONAL = {"bidirectional_mask_function", "sliding_window_bidirectional_overlay.<locals>.inner_mask"}
NARROWING = {
    "sliding_window_overlay.<locals>.inner_mask",
    "chunked_overlay.<locals>.inner_mask",
    "padding_mask_function.<locals>.inner_mask",
}
CHUNKED = "chunked_overlay.<locals>.inner_mask"
PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


_origins: WeakIdKeyDictionary = WeakIdKeyDictionary()


def origin_of(mask: Tensor, current: Pass | None = None) -> MaskOrigin | None:
    """How a mask was built; None if it was not built here, or was changed since.

    Changes go unnoticed under a compiler.
    """
    if torch.compiler.is_compiling():
        for known, origin in () if current is None else current.masks:
            if known is mask:
                return origin
        return None
    record: tuple[MaskOrigin, int] | None = _origins.get(mask)  # type: ignore[no-untyped-call]
    return record[0] if record is not None and record[1] == _version(mask) else None


def _version(mask: Tensor) -> int:
    return 0 if mask.is_inference() else mask._version


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions whose intersection a mask function is."""
    name = getattr(function, "__qualname__", "")
    if name != "and_masks.<locals>.and_mask":
        yield name
        return
    for cell in function.__closure__ or ():
        for part in cell.cell_contents if isinstance(cell.cell_contents, tuple) else ():
            yield from _parts(part)


def _pattern(function: Callable[..., Any]) -> tuple[Pattern | None, bool]:
    """The pattern of a mask function, and whether the function does nothing else."""
    parts = set(_parts(function))
    if PACKED in parts:
        return "packed", False
    if parts & CAUSAL and parts <= CAUSAL | NARROWING:
        return "causal", parts <= CAUSAL
    if parts & BIDIRECTIONAL and parts <= (BIDIRECTIONAL | NARROWING) - {CHUNKED}:
        return "bidirectional", parts <= {"bidirectional_mask_function"}
    return None, False


def _pattern_by_name(function: Callable[..., Any]) -> tuple[Pattern | None, bool]:
    """The same under a compiler, which cannot inspect closures."""
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
    """transformers' additive mask; how it was built is recorded."""
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
    from_start = isinstance(q_offset, int) and isinstance(kv_offset, int) and kv_offset == 0
    to_end = q_offset + q_length == kv_length if pattern == "causal" else q_offset == 0
    fits = keys is None or keys.shape == (batch_size, kv_length)
    origin = MaskOrigin(pattern, simple and from_start and to_end and fits, keys)
    if not compiling:
        _origins[result] = origin, _version(result)
    elif (current := innermost()) is not None:
        current.masks.append((result, origin))
    return result
