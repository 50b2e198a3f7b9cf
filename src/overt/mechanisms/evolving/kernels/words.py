"""Rows of maps as tiles of columns, for convolutions of any number of heads and any precision.

The convolution over all heads is a matrix product (heads × heads) for each tap. Its operand for a tap one
column to the side would be a misaligned load, so columns are separated by phase instead. A *word* is four
columns of a row, one aligned load; its columns are four tiles (heads, words), and a shift by one column is a
different choice among the tiles of a word and its neighbours.

Columns of two bytes are loaded a word at a time, as one 64-bit integer; columns of four bytes (WIDE) one by
one. *Bits* mark where the ReLU passed values: a byte for each word, bit p for its column p.
"""

from __future__ import annotations

import triton.language as tl

from overt.mechanisms.kernels.launch import helper

PHASES = 4  # columns of a word


@helper
def as_words(map, WIDE: tl.constexpr):
    """A map's pointer as it is loaded: whole words of 2-byte columns, or columns."""
    if not WIDE:
        map = map.to(tl.pointer_type(tl.int64))
    return map


@helper
def _column(word, PHASE: tl.constexpr, DTYPE: tl.constexpr):
    """One column out of words of 2-byte columns."""
    return (word >> (16 * PHASE)).to(tl.int16).to(DTYPE, bitcast=True)


@helper
def _spread(bits):
    """Four bits as a word with all ones in the columns whose bits are on."""
    wide = bits.to(tl.int64)
    low = (wide & 1) | ((wide & 2) << 15) | ((wide & 4) << 30) | ((wide & 8) << 45)
    return (low << 16) - low


@helper
def codes_of(bits, row, inside, word, words, row_words):
    """Bits of the words before, at and after `word` in a row, in a byte each: int32 (heads, words).

    Args:
        bits: pointers to each head's first byte, (heads, 1).
        row: which row.
        inside: which words exist, (heads, words).
        word: number of each word in its row, (1, words).
        words: number of words of a row that contain a key.
        row_words: number of words of a row.
    """
    at = bits + row * row_words + word
    before = tl.load(at - 1, mask=inside & (word > 0), other=0).to(tl.int32)
    here = tl.load(at, mask=inside, other=0).to(tl.int32)
    after = tl.load(at + 1, mask=inside & (word + 1 < words), other=0).to(tl.int32)
    return before | (here << 8) | (after << 16)


@helper
def columns_of(
    source, row, inside, word, codes, keys, row_length,
    SHIFT: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Columns START … END − 1 of the words at offset SHIFT from `word` in a row, each a tile (heads, words).

    Returns them as stored, and as used: a column is zero outside the map and, where MASKED, where its bit is
    off.

    Args:
        source: pointers to each head's first cell, or first word (`as_words`), (heads, 1).
        row: which row.
        inside: which words are loaded, (heads, words).
        word: number of each word in its row, (1, words).
        codes: from `codes_of`, where MASKED.
        keys: columns of the map.
        row_length: columns of its rows in memory.
        SHIFT: −1, 0 or 1.
        START: first column.
        END: last column + 1.
        DTYPE: of cells.
        WIDE: whether cells have 4 bytes.
        MASKED: whether bits are applied.
        EXACT: whether no column is outside the map.
    """
    plain = ()
    counted = ()
    if WIDE:
        at = source + row * row_length + 4 * (word + SHIFT)
    else:
        whole = tl.load(source + row * (row_length // 4) + (word + SHIFT), mask=inside, other=0)
        let = whole
        if MASKED:
            let = whole & _spread(codes >> (8 * (SHIFT + 1)))
    for phase in tl.static_range(START, END):
        if WIDE:
            tile = tl.load(at + phase, mask=inside, other=0.0)
            plain = plain + (tile,)  # type: ignore[assignment]
            if MASKED:
                tile = tl.where(((codes >> (8 * (SHIFT + 1) + phase)) & 1) != 0, tile, 0.0)
        else:
            plain = plain + (_column(whole, phase, DTYPE),)  # type: ignore[assignment]
            tile = _column(let, phase, DTYPE)
        if not EXACT:
            tile = tl.where(4 * (word + SHIFT) + phase < keys, tile, 0.0)
        counted = counted + (tile,)  # type: ignore[assignment]
    return plain, counted


@helper
def windows_of(
    source, row, inside, word, words, codes, keys, row_length,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DTYPE: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Words of a row as stored (4 tiles), and as used, with LEFT columns before and RIGHT after.

    `inside` is whether the row (or which of its words) is used at all, and `words` the number of words of a
    row that contain a key; the other arguments are those of `columns_of`.
    """
    plain, tiles = columns_of(
        source, row, inside, word, codes, keys, row_length, 0, 0, 4, DTYPE, WIDE, MASKED, EXACT
    )
    if LEFT > 0:
        mask = inside & (word > 0)
        _, before = columns_of(
            source, row, mask, word, codes, keys, row_length, -1, 4 - LEFT, 4, DTYPE, WIDE, MASKED, True
        )
        tiles = before + tiles
    if RIGHT > 0:
        mask = inside & (word + 1 < words)
        _, after = columns_of(
            source, row, mask, word, codes, keys, row_length, 1, 0, RIGHT, DTYPE, WIDE, MASKED, EXACT
        )
        tiles = tiles + after
    return plain, tiles


@helper
def store_words(to, inside, a, b, c, d, WIDE: tl.constexpr):
    """Four phases, tiles (heads, words), as words."""
    if WIDE:
        tl.store(to, a, mask=inside)
        tl.store(to + 1, b, mask=inside)
        tl.store(to + 2, c, mask=inside)
        tl.store(to + 3, d, mask=inside)
    else:
        low = a.to(tl.uint16, bitcast=True).to(tl.uint32) | (
            b.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        )
        high = c.to(tl.uint16, bitcast=True).to(tl.uint32) | (
            d.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        )
        word = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        tl.store(to, word.to(tl.int64, bitcast=True), mask=inside)
