"""Evolving Attention's maps as GPU kernels, forwards and backwards; `naive.py` has the definition.

A map here is a view [..., :N] of storage (batch, heads, query, Np), Np a multiple of 16, so that every row
starts aligned. What lies in the padding columns is unspecified, and no kernel relies on it.

The convolution over all heads is a matrix product (heads × heads) for each tap. Its operand for the tap
one column to the side would be a misaligned load; so columns are taken apart by phase instead. A *word* is
four columns of a row, one aligned load; its columns are four tiles (heads × words), and a shift by a column
is another choice among the tiles of a word and its neighbours'. A program walks down rows: each row is loaded
once and multiplied into the sums of all the output rows whose windows hold it. Half precision has a faster
way, for up to 16 heads and windows of up to 3, and for all weights' gradients: `_runs_triton`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms._attend_triton import bytes_of, heads_last, heads_last_strides, precision_of
from overt.mechanisms._launch import MOST, Ready, helper, power_of_two
from overt.mechanisms._launch import blocks as blocks_of
from overt.mechanisms.evolving import _runs_triton as runs
from overt.mechanisms.evolving._runs_triton import taps_of
from overt.mechanisms.seen import Seen

_ALIGN = 16
_PHASES = 4
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
Shape = tuple[int, ...]


def _width(keys: int) -> int:
    """Columns of a padded map's rows."""
    return blocks_of(keys, _ALIGN) * _ALIGN


def padded(
    batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised map (batch, heads, queries, keys) whose rows start aligned."""
    width = _width(keys)
    whole = torch.empty(batch, heads, queries, width, dtype=dtype, device=device)
    return whole if width == keys else whole[..., :keys]


def is_padded(map: Tensor) -> bool:
    """Whether a map lies in memory as `padded` lays it out, from an aligned address on."""
    batch, heads, queries, keys = map.shape
    width = _width(keys)
    strides = heads * queries * width, queries * width, width, 1
    # the stride of an axis of length 1 says nothing
    if map.stride() != strides and not all(
        n == 1 or a == b for n, a, b in zip(map.shape, map.stride(), strides, strict=True)
    ):
        return False
    end = map.storage_offset() + batch * strides[0]
    return map.data_ptr() % 16 == 0 and end * map.element_size() <= map.untyped_storage().nbytes()


def as_padded(map: Tensor) -> Tensor:
    """The map itself if it is padded, otherwise a padded copy."""
    if is_padded(map):
        return map
    batch, heads, queries, keys = map.shape
    copy = padded(batch, heads, queries, keys, map.dtype, map.device)
    _whole(copy)[..., keys:] = 0  # for the interpreter, which warns of odd bits as it converts them
    return copy.copy_(map)


def convolvable(heads: int, kernel_size: int, dtype: torch.dtype) -> str | None:
    """Why these kernels do not do a convolution; None if they do."""
    if kernel_size not in (1, 3, 5):
        return f"the kernels convolve with kernel_size 1, 3 or 5, got {kernel_size}"
    if dtype not in _TYPES:
        return f"the kernels convolve maps of float32, float16 or bfloat16, got {dtype}"
    # float32 takes three products for each; with more heads its sums do not fit in registers
    most = 32 if dtype != torch.float32 or kernel_size == 1 else 16
    if heads > most:
        return (
            f"the kernels convolve up to {most} heads in {dtype} with kernel_size {kernel_size}, got {heads}"
        )
    return None


def _whole(map: Tensor) -> Tensor:
    """A padded map with its padding columns."""
    batch, heads, queries, _ = map.shape
    width = _width(map.shape[-1])
    return map.as_strided(
        (batch, heads, queries, width), (heads * queries * width, queries * width, width, 1)
    )


def _masks(seen: Seen, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """The two masks as bytes; a kernel wants a pointer for each."""
    return bytes_of(seen.key_visible, stand_in), bytes_of(seen.query_real, stand_in)


def _there(seen: Seen) -> tuple[bool, bool, bool]:
    return seen.key_visible is not None, seen.query_real is not None, seen.causal


def _named(there: tuple[bool, bool, bool]) -> dict[str, bool]:
    return dict(zip(("HAS_KEYS", "HAS_QUERIES", "CAUSAL"), there, strict=True))


# mixing ---------------------------------------------------------------------------------------------------


@helper
def _visible(
    keys, queries, batch, m, n, M, N,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which cells of a tile are visible."""
    seen = (m < M)[:, None] & (n < N)[None, :]
    if HAS_KEYS:
        seen &= (tl.load(keys + batch * N + n, mask=n < N, other=0) != 0)[None, :]
    if HAS_QUERIES:
        seen &= (tl.load(queries + batch * M + m, mask=m < M, other=0) != 0)[:, None]
    if CAUSAL:
        seen &= n[None, :] <= m[:, None] + (N - M)
    return seen


@triton.jit
def _mix(
    query, key, previous, mixed, keys, queries, numbers, scale, hidden,
    q_batch, q_head, q_row, k_batch, k_head, k_row, heads, group, M, N, NP, D, tiles_m, tiles_n,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    m0 = pid // tiles_n % tiles_m * BM
    n0 = pid % tiles_n * BN
    place = (pid // (tiles_n * tiles_m)).to(tl.int64)
    batch, head = place // heads, place % heads
    m, n, d = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BD)
    rows, columns = m < M, n < N
    if CAUSAL:  # nothing is read for a tile that is hidden as a whole
        live = n0 <= m0 + BM - 1 + N - M
        rows, columns = rows & live, columns & live
    q = tl.load(
        query + batch * q_batch + head * q_head + m[:, None] * q_row + d[None, :],
        mask=rows[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    k = tl.load(
        key + batch * k_batch + head // group * k_head + n[:, None] * k_row + d[None, :],
        mask=columns[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    value = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    cell = place * M * NP + m[:, None] * NP + n[None, :]
    if HAS_PREVIOUS:
        alpha = tl.load(numbers)
        past = tl.load(previous + cell, mask=rows[:, None] & (n < NP)[None, :], other=0.0).to(tl.float32)
        carried = past != -float("inf")
        past = tl.where(carried, past, 0.0)
        if ADD:
            value += alpha * past
        else:
            value = tl.where(carried, alpha * past + (1.0 - alpha) * value, value)
    seen = _visible(keys, queries, batch, m, n, M, N, HAS_KEYS, HAS_QUERIES, CAUSAL)
    value = tl.where(seen, value, hidden).to(mixed.dtype.element_ty)
    tl.store(mixed + cell, value, mask=(m < M)[:, None] & (n < NP)[None, :])


@lru_cache(MOST)
def _mix_ready(
    queried: Shape, keyed: Shape, query: Shape, key: Shape,
    has_previous: bool, add: bool, there: tuple[bool, bool, bool], precision: str,
) -> Ready:  # fmt: skip
    (B, H, M, D), (_, Hk, N, _) = queried, keyed
    BM, BN = 64, 64
    tiles = blocks_of(M, BM), blocks_of(N, BN)
    sizes = {"BM": BM, "BN": BN, "BD": power_of_two(D), "PRECISION": precision}
    return Ready(
        _mix,
        (tiles[0] * tiles[1] * B * H, 1, 1),
        (*query[:3], *key[:3], H, H // Hk, M, N, _width(N), D, *tiles),
        {"HAS_PREVIOUS": has_previous, "ADD": add, **_named(there), **sizes},
    )


def mix(
    query: Tensor,
    key: Tensor,
    scale: float,
    previous: Tensor | None,
    seen: Seen,
    numbers: Tensor,
    add: bool,
    hidden: float,
) -> Tensor:
    """`naive.mix` of the logits scale · query · keyᵀ, which are never held.

    Args:
        query: (batch, heads, query, width), last stride 1.
        key: (batch, key heads, key, width), last stride 1; each head is shared by heads / key heads queries'.
        scale: factor of the logits.
        previous: the padded map before; None starts a chain.
        seen: which cells are visible.
        numbers: float32 (α, β) on the device.
        add: RealFormer's sum.
        hidden: what hidden cells hold.

    Returns:
        A padded map.
    """
    (batch, heads, queries, _), keyed = query.shape, key.shape
    mixed = padded(batch, heads, queries, keyed[2], query.dtype, query.device)
    if not mixed.numel():
        return mixed
    ready = _mix_ready(
        query.shape, keyed, query.stride(), key.stride(),
        previous is not None, add, _there(seen), precision_of(query.dtype),
    )  # fmt: skip
    before = mixed if previous is None else previous
    ready.run((query, key, before, mixed, *_masks(seen, mixed), numbers), (scale, hidden))
    return mixed


@helper
def _to_current(gradient, previous, cell, inside, seen, alpha, HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr):
    """Of one tile of `_mix`: the gradients of the current logits and of the previous map."""
    g = tl.load(gradient + cell, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(seen, g, 0.0)
    current, past = g, g
    if HAS_PREVIOUS:
        carried = tl.load(previous + cell, mask=inside, other=0.0).to(tl.float32) != -float("inf")
        past = tl.where(carried, alpha * g, 0.0)
        if not ADD:
            current = tl.where(carried, (1.0 - alpha) * g, g)
    return current, past


@triton.jit
def _mix_to_key(
    gradient, previous, query, to_key, keys, queries, numbers, scale,
    q_batch, q_head, q_row, o_batch, o_head, o_row, key_heads, group, M, N, NP, D, tiles_m, tiles_n,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n0 = pid % tiles_n * BN
    place = (pid // tiles_n).to(tl.int64)
    batch, key_head = place // key_heads, place % key_heads
    n, d = n0 + tl.arange(0, BN), tl.arange(0, BD)
    alpha = tl.load(numbers)
    first = 0
    if CAUSAL:
        first = tl.maximum(n0 - (N - M), 0) // BM
    tiles = tl.maximum(tiles_m - first, 0)
    total = tl.full((BN, BD), 0, tl.float32)
    for step in range(tiles * group):
        head = key_head * group + step // tiles
        m = (first + step % tiles) * BM + tl.arange(0, BM)
        cell = (batch * key_heads * group + head) * M * NP + m[:, None] * NP + n[None, :]
        inside = (m < M)[:, None] & (n < NP)[None, :]
        seen = _visible(keys, queries, batch, m, n, M, N, HAS_KEYS, HAS_QUERIES, CAUSAL)
        current, _ = _to_current(gradient, previous, cell, inside, seen, alpha, HAS_PREVIOUS, ADD)
        q = tl.load(
            query + batch * q_batch + head * q_head + m[:, None] * q_row + d[None, :],
            mask=(m < M)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(current.to(q.dtype)), q, total, input_precision=PRECISION)
    to = to_key + batch * o_batch + key_head * o_head + n[:, None] * o_row + d[None, :]
    tl.store(to, (total * scale).to(to_key.dtype.element_ty), mask=(n < N)[:, None] & (d < D)[None, :])


@triton.jit
def _mix_to_query(
    gradient, previous, key, to_query, keys, queries, numbers, scale,
    k_batch, k_head, k_row, o_batch, o_head, o_row, heads, group, M, N, NP, D, tiles_m, tiles_n,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    m0 = pid % tiles_m * BM
    place = (pid // tiles_m).to(tl.int64)
    batch, head = place // heads, place % heads
    m, d = m0 + tl.arange(0, BM), tl.arange(0, BD)
    alpha = tl.load(numbers)
    tiles = tiles_n
    if CAUSAL:
        tiles = tl.minimum(tiles, (tl.maximum(m0 + BM + N - M, 0) + BN - 1) // BN)
    total = tl.full((BM, BD), 0, tl.float32)
    for tile in range(tiles):
        n = tile * BN + tl.arange(0, BN)
        cell = place * M * NP + m[:, None] * NP + n[None, :]
        inside = (m < M)[:, None] & (n < NP)[None, :]
        seen = _visible(keys, queries, batch, m, n, M, N, HAS_KEYS, HAS_QUERIES, CAUSAL)
        current, past = _to_current(gradient, previous, cell, inside, seen, alpha, HAS_PREVIOUS, ADD)
        k = tl.load(
            key + batch * k_batch + head // group * k_head + n[:, None] * k_row + d[None, :],
            mask=(n < N)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(current.to(k.dtype), k, total, input_precision=PRECISION)
        if WRITE:  # over the gradient just read, which no other program reads
            tl.store(gradient + cell, past.to(gradient.dtype.element_ty), mask=inside)
    if WRITE and CAUSAL:
        for tile in range(tiles, tiles_n):
            n = tile * BN + tl.arange(0, BN)
            cell = place * M * NP + m[:, None] * NP + n[None, :]
            nothing = tl.full((BM, BN), 0, gradient.dtype.element_ty)
            tl.store(gradient + cell, nothing, mask=(m < M)[:, None] & (n < NP)[None, :])
    to = to_query + batch * o_batch + head * o_head + m[:, None] * o_row + d[None, :]
    tl.store(to, (total * scale).to(to_query.dtype.element_ty), mask=(m < M)[:, None] & (d < D)[None, :])


@lru_cache(MOST)
def _mix_backward_ready(
    queried: Shape, keyed: Shape, query: Shape, key: Shape, dtype: torch.dtype,
    has_previous: bool, add: bool, write: bool, there: tuple[bool, bool, bool], precision: str,
) -> tuple[Ready, Ready]:  # fmt: skip
    (B, H, M, D), (_, Hk, N, _) = queried, keyed
    to_query, to_key = heads_last_strides(queried), heads_last_strides(keyed)
    BM, BN, BD = (32 if dtype == torch.float32 else 64), 64, power_of_two(D)
    tiles = blocks_of(M, BM), blocks_of(N, BN)
    past = {"HAS_PREVIOUS": has_previous, "ADD": add}
    sizes = {"BM": BM, "BN": BN, "BD": BD, "PRECISION": precision}
    shape = H // Hk, M, N, _width(N), D, *tiles
    warps = 8 if BD > 64 else 4
    return Ready(
        _mix_to_key,
        (tiles[1] * B * Hk, 1, 1),
        (*query[:3], *to_key[:3], Hk, *shape),
        {**past, **_named(there), **sizes},
        warps,
    ), Ready(
        _mix_to_query,
        (tiles[0] * B * H, 1, 1),
        (*key[:3], *to_query[:3], H, *shape),
        {**past, "WRITE": write, **_named(there), **sizes},
        warps,
    )


def mix_backward(
    gradient: Tensor,
    previous: Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float,
    numbers: Tensor,
    seen: Seen,
    add: bool,
    needs_previous: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of `mix`.

    Args:
        gradient: of `mix`'s result, a padded map. Written over: it is where the previous map's gradient goes.
        previous: as it was given to `mix`, and so the others.
        query: as above.
        key: as above.
        scale: as above.
        numbers: as above.
        seen: as above.
        add: as above.
        needs_previous: whether the previous map's gradient is wanted.

    Returns:
        Gradients of the previous map (None unless it is wanted and there was one), query and key.
    """
    queried, keyed = query.shape, key.shape
    to_query, to_key = heads_last(query, *queried), heads_last(key, *keyed)
    write = needs_previous and previous is not None
    if not gradient.numel():
        return (gradient if write else None), to_query.zero_(), to_key.zero_()
    to_keys, to_queries = _mix_backward_ready(
        queried, keyed, query.stride(), key.stride(), query.dtype,
        previous is not None, add, write, _there(seen), precision_of(query.dtype),
    )  # fmt: skip
    maps, rest = (gradient, gradient if previous is None else previous), (*_masks(seen, gradient), numbers)
    to_keys.run((*maps, query, to_key, *rest), (scale,))
    to_queries.run((*maps, key, to_query, *rest), (scale,))
    return (gradient if write else None), to_query, to_key


# convolution ----------------------------------------------------------------------------------------------


@helper
def _column(word, PHASE: tl.constexpr, DTYPE: tl.constexpr):
    """One column out of words of 2-byte columns."""
    return (word >> (16 * PHASE)).to(tl.int16).to(DTYPE, bitcast=True)


@helper
def _spread(bits):
    """Four bits as a word that has ones in the columns whose bits are on."""
    wide = bits.to(tl.int64)
    low = (wide & 1) | ((wide & 2) << 15) | ((wide & 4) << 30) | ((wide & 8) << 45)
    return (low << 16) - low


@helper
def _codes(bits, y, inside, word, words, W):
    """Bits of the words before, at and after `word` in row y, in a byte each."""
    at = bits + y * W + word
    before = tl.load(at - 1, mask=inside & (word > 0), other=0).to(tl.int32)
    here = tl.load(at, mask=inside, other=0).to(tl.int32)
    after = tl.load(at + 1, mask=inside & (word + 1 < words), other=0).to(tl.int32)
    return before | (here << 8) | (after << 16)


@helper
def _piece(
    source, y, inside, word, codes, N, NP, SHIFT: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Columns START … END − 1 of the words SHIFT beside `word` in row y, each a tile: plain, and as counted.

    A column counts as zero outside the map and, where MASKED, where its bit is off.
    """
    plain = ()
    tiles = ()
    if WIDE:
        at = source + y * NP + 4 * (word + SHIFT)
    else:
        whole = tl.load(source + y * (NP // 4) + (word + SHIFT), mask=inside, other=0)
        counted = whole
        if MASKED:
            counted = whole & _spread(codes >> (8 * (SHIFT + 1)))
    for c in tl.static_range(START, END):
        if WIDE:
            tile = tl.load(at + c, mask=inside, other=0.0)
            plain = plain + (tile,)  # type: ignore[assignment]
            if MASKED:
                tile = tl.where(((codes >> (8 * (SHIFT + 1) + c)) & 1) != 0, tile, 0.0)
        else:
            plain = plain + (_column(whole, c, DTYPE),)  # type: ignore[assignment]
            tile = _column(counted, c, DTYPE)
        if not EXACT:
            tile = tl.where(4 * (word + SHIFT) + c < N, tile, 0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return plain, tiles


@helper
def _tiles(
    source, y, rows, word, words, codes, N, NP,
    L: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Words of row y as they are (4 tiles), and as they count with L columns before and R after.

    `rows` says whether the row (or which of the words) counts at all.
    """
    plain, tiles = _piece(source, y, rows, word, codes, N, NP, 0, 0, 4, DTYPE, WIDE, MASKED, EXACT)
    if L > 0:
        mask = rows & (word > 0)
        _, before = _piece(source, y, mask, word, codes, N, NP, -1, 4 - L, 4, DTYPE, WIDE, MASKED, True)
        tiles = before + tiles
    if R > 0:
        mask = rows & (word + 1 < words)
        _, after = _piece(source, y, mask, word, codes, N, NP, 1, 0, R, DTYPE, WIDE, MASKED, EXACT)
        tiles = tiles + after
    return plain, tiles


@helper
def _as_words(map, WIDE: tl.constexpr):
    """A map as it is loaded: whole words of 2-byte columns."""
    if not WIDE:
        map = map.to(tl.pointer_type(tl.int64))
    return map


@helper
def _taps(taps, tiles, sums, KS: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of four phases, with one line of taps' products added."""
    a, b, c, d = sums
    for dx in tl.static_range(KS):
        a = tl.dot(taps[dx], tiles[dx], a, input_precision=PRECISION)
        b = tl.dot(taps[dx], tiles[dx + 1], b, input_precision=PRECISION)
        c = tl.dot(taps[dx], tiles[dx + 2], c, input_precision=PRECISION)
        d = tl.dot(taps[dx], tiles[dx + 3], d, input_precision=PRECISION)
    return (a, b, c, d)


@helper
def _zeros(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    a, b = tl.full((HEIGHT, WIDTH), 0, DTYPE), tl.full((HEIGHT, WIDTH), 0, DTYPE)
    c, d = tl.full((HEIGHT, WIDTH), 0, DTYPE), tl.full((HEIGHT, WIDTH), 0, DTYPE)
    return (a, b, c, d)


@helper
def _put(to, inside, a, b, c, d, WIDE: tl.constexpr):
    """Four phases as words."""
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


@triton.jit
def _convolve(
    center, weight, bias, numbers, keys, queries, out, bits,
    heads, M, N, NP, strips, blocks,
    KS: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BELOW: tl.constexpr, BACKWARD: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    HP: tl.constexpr, BPIX: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of ROWS rows and BPIX words, all heads: `convolve`, or the same backwards.

    Backwards `center` is the gradient, `bits` is read, and the window is turned round.
    """
    ABOVE: tl.constexpr = KS - 1 - BELOW
    pid = tl.program_id(0)
    j0 = pid % blocks * BPIX
    y0 = pid // blocks % strips * ROWS
    batch = (pid // (blocks * strips)).to(tl.int64)
    W = NP // 4
    words = (N + 3) // 4
    h = tl.arange(0, HP)[:, None]
    word = j0 + tl.arange(0, BPIX)[None, :]
    o, i = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
    real = h < heads
    beta = tl.load(numbers + 1)
    rest = 1.0 - beta
    # Words are counted plainly one after the other, or threads would be dealt out along heads, far apart.
    first = h.to(tl.int64) * M
    source = _as_words(center, WIDE) + batch * heads * M * (NP if WIDE else W) + first * (NP if WIDE else W)
    out = _as_words(out, WIDE)
    out += batch * heads * M * (NP if WIDE else W)
    out += first * (NP if WIDE else W) + (word * 4 if WIDE else word)
    bits += batch * heads * M * W + first * W
    row = NP if WIDE else W
    inside = real & (word < W)
    n = 4 * word
    v0, v1, v2, v3 = n < N, n + 1 < N, n + 2 < N, n + 3 < N
    if HAS_KEYS:
        seen = keys + batch * N + n
        v0 = tl.load(seen, mask=v0, other=0) != 0
        v1 = tl.load(seen + 1, mask=v1, other=0) != 0
        v2 = tl.load(seen + 2, mask=v2, other=0) != 0
        v3 = tl.load(seen + 3, mask=v3, other=0) != 0
    if BACKWARD:
        offset = tl.full((HP, 1), 0, tl.float32)
        hidden = 0.0
    else:
        offset = tl.load(bias + h, mask=real, other=0.0).to(tl.float32)
        hidden = -float("inf")
    rows = tl.minimum(ROWS, M - y0)
    steps, blank = rows + KS - 1, 0
    if CAUSAL:  # a strip that is hidden as a whole is only filled
        gone = 4 * j0 > y0 + rows - 1 + N - M
        steps, blank = tl.where(gone, 0, steps), tl.where(gone, rows, 0)
    w0 = taps_of(weight, heads, 0, KS, BACKWARD, DTYPE, HP)
    if KS > 1:
        w1 = taps_of(weight, heads, 1, KS, BACKWARD, DTYPE, HP)
        w2 = taps_of(weight, heads, 2, KS, BACKWARD, DTYPE, HP)
    if KS > 3:
        w3 = taps_of(weight, heads, 3, KS, BACKWARD, DTYPE, HP)
        w4 = taps_of(weight, heads, 4, KS, BACKWARD, DTYPE, HP)
    nothing = _zeros(HP, BPIX, tl.float32)
    # what the rows so far add to the output rows still open, the next to close last
    s1, s2, s3, s4 = nothing, nothing, nothing, nothing
    eye = (o == i).to(DTYPE)
    codes = word
    if BACKWARD:
        codes = _codes(bits, y0 - ABOVE, inside & (y0 >= ABOVE), word, words, W)
    for step in range(steps):
        y = y0 - ABOVE + step
        now, tiles = _tiles(
            source, y, inside & (y >= 0) & (y < M), word, words, codes, N, NP,
            L, R, DTYPE, WIDE, BACKWARD, EXACT,
        )  # fmt: skip
        if BACKWARD:  # the next row's, ahead of time
            codes = _codes(bits, y + 1, inside & (y >= -1) & (y + 1 < M), word, words, W)
        if KS == 1:
            done = _taps(w0, tiles, nothing, KS, PRECISION)
        elif KS == 3:
            done = _taps(w2, tiles, s2, KS, PRECISION)
            s2 = _taps(w1, tiles, s1, KS, PRECISION)
            s1 = _taps(w0, tiles, nothing, KS, PRECISION)
        else:
            done = _taps(w4, tiles, s4, KS, PRECISION)
            s4 = _taps(w3, tiles, s3, KS, PRECISION)
            s3 = _taps(w2, tiles, s2, KS, PRECISION)
            s2 = _taps(w1, tiles, s1, KS, PRECISION)
            s1 = _taps(w0, tiles, nothing, KS, PRECISION)
        y -= BELOW
        ready = inside & (step >= KS - 1)
        if BELOW == 0:
            kept = now
        else:  # loaded again: it is still in the cache, and to keep it would cost registers
            kept, _ = _piece(
                source, y, inside & (step >= KS - 1), word, codes, N, NP, 0, 0, 4, DTYPE, WIDE, False, True
            )
        x0, x1, x2, x3 = kept
        if not WIDE:  # a product with the identity brings the tiles to where the sums are, exactly
            x0, x1, x2, x3 = tl.dot(eye, x0), tl.dot(eye, x1), tl.dot(eye, x2), tl.dot(eye, x3)
        u0, u1, u2, u3 = v0, v1, v2, v3
        if HAS_QUERIES:
            here = tl.load(queries + batch * M + y, mask=step >= KS - 1, other=0) != 0
            u0, u1, u2, u3 = u0 & here, u1 & here, u2 & here, u3 & here
        if CAUSAL:
            last = y + N - M
            u0, u1 = u0 & (n <= last), u1 & (n + 1 <= last)
            u2, u3 = u2 & (n + 2 <= last), u3 & (n + 3 <= last)
        a, b, c, d = done
        if BACKWARD:
            a, b, c, d = beta * a, beta * b, beta * c, beta * d
        else:
            a, b, c, d = a + offset, b + offset, c + offset, d + offset
            on = (a > 0).to(tl.int32) | ((b > 0).to(tl.int32) << 1)
            on |= ((c > 0).to(tl.int32) << 2) | ((d > 0).to(tl.int32) << 3)
            tl.store(bits + y * W + word, on.to(tl.uint8), mask=ready)
            a, b = beta * tl.maximum(a, 0.0), beta * tl.maximum(b, 0.0)
            c, d = beta * tl.maximum(c, 0.0), beta * tl.maximum(d, 0.0)
        a = tl.where(u0, a + rest * x0, hidden).to(DTYPE)
        b = tl.where(u1, b + rest * x1, hidden).to(DTYPE)
        c = tl.where(u2, c + rest * x2, hidden).to(DTYPE)
        d = tl.where(u3, d + rest * x3, hidden).to(DTYPE)
        _put(out + y * row, ready, a, b, c, d, WIDE)
    if CAUSAL:
        void = tl.full((HP, BPIX), hidden, DTYPE)
        for step in range(blank):
            _put(out + (y0 + step) * row, inside, void, void, void, void, WIDE)
            if not BACKWARD:
                tl.store(bits + (y0 + step) * W + word, tl.full((HP, BPIX), 0, tl.uint8), mask=inside)


@triton.jit
def _convolve_to_weight(
    center, gradient, bits, partial,
    heads, M, N, NP, rows, strips, blocks,
    KS: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ABOVE: tl.constexpr,
    CAUSAL: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr,
    HP: tl.constexpr, BPIX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One strip's part of a line of taps' gradients, and of the bias's, without the factor β, in float32."""
    pid = tl.program_id(0)
    line = tl.program_id(1)
    j0 = pid % blocks * BPIX
    y0 = pid // blocks % strips * rows
    batch = (pid // (blocks * strips)).to(tl.int64)
    words = (N + 3) // 4
    h = tl.arange(0, HP)[:, None]
    word = j0 + tl.arange(0, BPIX)[None, :]
    live = (h < heads) & (word < words)
    first = h.to(tl.int64) * M
    source = center + batch * heads * M * NP + first * NP
    back = gradient + batch * heads * M * NP + first * NP
    bits += batch * heads * M * (NP // 4) + first * (NP // 4)
    end = tl.minimum(y0 + rows, M)
    if CAUSAL:  # rows above are hidden in these columns
        y0 = tl.maximum(y0, 4 * j0 - L - (N - M))
    zero = tl.full((HP, HP), 0, tl.float32)
    sums = (zero,) * KS
    ones = tl.full((BPIX, HP), 1.0, DTYPE)
    constant = zero
    for y in range(y0, end):
        _, tiles = _tiles(
            source, y, live & (y < M), word, words, word, N, NP, L, R, DTYPE, True, False, EXACT
        )
        z = y + ABOVE - line  # the row whose gradient meets this one in the line
        counts = live & (z >= 0) & (z < M)
        codes = tl.load(bits + z * (NP // 4) + word, mask=counts, other=0).to(tl.int32) << 8
        _, g = _tiles(back, z, counts, word, words, codes, N, NP, 0, 0, DTYPE, True, True, EXACT)
        sums = _correlate(g, tiles, sums, KS, PRECISION)
        for p in tl.static_range(4):
            constant = tl.dot(g[p], ones, constant, input_precision=PRECISION)
    o, i = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
    place = (pid * tl.num_programs(1) + line).to(tl.int64) * (KS + 1)
    to = partial + (place * HP + o) * HP + i
    for dx in tl.static_range(KS):
        tl.store(to + dx * HP * HP, sums[dx])
    tl.store(to + KS * HP * HP, constant)


@helper
def _correlate(from_, tiles, sums, KS: tl.constexpr, PRECISION: tl.constexpr):
    """One line of taps' gradients with one row's part added."""
    new = ()
    for dx in tl.static_range(KS):
        total = sums[dx]
        for p in tl.static_range(4):
            total = tl.dot(from_[p], tl.trans(tiles[p + dx]), total, input_precision=PRECISION)
        new = new + (total,)  # type: ignore[assignment]
    return new


@triton.jit
def _add_up(
    partial, numbers, to_weight, to_bias,
    heads, parts, groups, above,
    KS: tl.constexpr, LINES: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One tap's gradients, or the bias's, over all strips."""
    tap = tl.program_id(0)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line, dx = tap // KS, tap % KS
    bias = tap == KS * KS
    group = tl.where(bias, above if LINES == 1 else 0, line // LINES)
    within = tl.where(bias, LINES * KS, line % LINES * KS + dx)
    part = tl.arange(0, PARTS)
    total = tl.full((BLOCK,), 0, tl.float32)
    for start in range(0, parts, PARTS):
        matrix = ((start + part).to(tl.int64) * groups + group) * (LINES * KS + 1) + within
        at = partial + matrix[:, None] * (HP * HP) + cell[None, :]
        total += tl.sum(tl.load(at, mask=(start + part < parts)[:, None], other=0.0), 0)
    total *= tl.load(numbers + 1)
    o, i = cell // HP, cell % HP
    real = (o < heads) & (i < heads)
    to = to_weight + ((o * heads + i) * KS + line) * KS + dx
    tl.store(to, total.to(to_weight.dtype.element_ty), mask=real & (bias == 0))
    tl.store(to_bias + o, total.to(to_bias.dtype.element_ty), mask=real & (i == 0) & bias)


_PAIRS = 4  # of a run, where rows are convolved
_AT_ONCE = 8 * 132  # programs of one warp that a large GPU runs at a time


def _strips(rows: int, strips: int) -> tuple[int, int]:
    """Rows of a strip, and strips, where so many strips are wished for."""
    strips = max(1, min(strips, blocks_of(rows, 8)))
    each = blocks_of(rows, strips)
    return each, blocks_of(rows, each)


@lru_cache(MOST)
def _convolve_ready(
    shape: Shape, dtype: torch.dtype, KS: int, reach: tuple[int, int, int, int],
    there: tuple[bool, bool, bool], backward: bool, precision: str,
) -> Ready:  # fmt: skip
    B, H, M, N = shape
    HP, width = power_of_two(H), _width(N)
    left, right, above, below = reach
    if backward:
        left, right, above, below = right, left, below, above
    wide = dtype == torch.float32
    window = {"KS": KS, "L": left, "R": right, "BELOW": below, "BACKWARD": backward}
    if not wide and HP == 16 and KS <= 3:
        count = blocks_of(width, 8 * 2 * _PAIRS)
        rows, strips = _strips(M, _AT_ONCE // (B * count))
        return Ready(
            runs.convolution,
            (B * count * strips, 1, 1),
            (H, M, N, width, rows, strips, count),
            {**window, **_named(there), "DTYPE": _TYPES[dtype], "EXACT": N % _ALIGN == 0, "P": _PAIRS},
            1,
            1,
        )
    BPIX = {16: 32, 32: 16 if wide else 64}[HP]
    BPIX = min(BPIX, power_of_two(blocks_of(N, _PHASES)))
    count = blocks_of(width // _PHASES, BPIX)
    ROWS = 64
    while ROWS > 8 and B * count * blocks_of(M, ROWS) < 400:
        ROWS //= 2
    strips = blocks_of(M, ROWS)
    kind = {"DTYPE": _TYPES[dtype], "WIDE": wide, "EXACT": N % _ALIGN == 0}
    sizes = {"HP": HP, "BPIX": BPIX, "ROWS": ROWS, "PRECISION": precision}
    return Ready(
        _convolve,
        (B * count * strips, 1, 1),
        (H, M, N, width, strips, count),
        {**window, **_named(there), **kind, **sizes},
        4 if HP == 16 else 8,
        1 if wide and HP > 16 else 2,
    )


def _walk(
    source: Tensor, out: Tensor, bits: Tensor, weight: Tensor, bias: Tensor,
    reach: tuple[int, int, int, int], numbers: Tensor, seen: Seen, backward: bool,
) -> None:  # fmt: skip
    ready = _convolve_ready(
        source.shape, source.dtype, weight.shape[-1], reach,
        _there(seen), backward, precision_of(source.dtype),
    )  # fmt: skip
    ready.run((source, weight.contiguous(), bias, numbers, *_masks(seen, bits), out, bits))


def convolve(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    reach: tuple[int, int, int, int],
    numbers: Tensor,
    seen: Seen,
) -> tuple[Tensor, Tensor]:
    """`naive.refine` with a convolution.

    Args:
        mixed: a padded map, zeros in hidden cells.
        weight: (heads, heads, k, k), the first axis for the head that comes out.
        bias: (heads,).
        reach: as `naive.reach` gives it.
        numbers: float32 (α, β) on the device.
        seen: which cells are visible.

    Returns:
        The evolved map, padded, −inf in hidden cells; and where its ReLU let through, for
        `convolve_backward`: (batch, heads, query, Np / 4) bytes, bit p for column 4 j + p, unspecified in
        hidden cells.
    """
    B, H, M, N = mixed.shape
    evolved = padded(B, H, M, N, mixed.dtype, mixed.device)
    bits = torch.empty(B, H, M, _width(N) // _PHASES, dtype=torch.uint8, device=mixed.device)
    if evolved.numel():
        _walk(mixed, evolved, bits, weight, bias.contiguous(), reach, numbers, seen, backward=False)
    return evolved, bits


@lru_cache(MOST)
def _convolve_to_weight_ready(
    shape: Shape, dtype: torch.dtype, KS: int, reach: tuple[int, int, int, int], causal: bool, precision: str
) -> tuple[Shape, Ready, Ready]:
    """Shape of the partial sums, who makes them, and who adds them up."""
    B, H, M, N = shape
    HP, width = power_of_two(H), _width(N)
    left, right, above, _ = reach
    wide = dtype == torch.float32
    LINES = KS if KS <= 3 and not wide else 1
    count = blocks_of(width, 64)
    pieces = (HP // 16) ** 2
    rows, strips = _strips(M, _AT_ONCE // (B * count * pieces))
    parts, groups = B * count * strips, KS // LINES
    window = {"KS": KS, "L": left, "R": right, "ABOVE": above}
    kind = {"CAUSAL": causal, "DTYPE": _TYPES[dtype], "EXACT": N % _ALIGN == 0, "HP": HP}
    integers = H, M, N, width, rows, strips, count
    if wide:
        kind |= {"BPIX": 16, "PRECISION": precision}
        make = Ready(_convolve_to_weight, (parts, groups, 1), integers, {**window, **kind}, pieces)
    else:
        window |= {"LINES": LINES}
        make = Ready(runs.to_weight, (parts, groups, pieces), integers, {**window, **kind}, 1, 1)
    BLOCK = 32
    add_up = Ready(
        _add_up,
        (KS * KS + 1, HP * HP // BLOCK, 1),
        (H, parts, groups, above),
        {"KS": KS, "LINES": LINES, "HP": HP, "BLOCK": BLOCK, "PARTS": min(64, power_of_two(parts))},
    )
    return (parts, groups, LINES * KS + 1, HP, HP), make, add_up


def convolve_to_weight(
    gradient: Tensor,
    mixed: Tensor,
    bits: Tensor,
    weight: Tensor,
    bias: Tensor,
    reach: tuple[int, int, int, int],
    numbers: Tensor,
    seen: Seen,
) -> tuple[Tensor, Tensor]:
    """Gradients of `convolve`'s weight and bias.

    Args:
        gradient: of the evolved map, a padded map, zeros in hidden cells.
        mixed: as it was given to `convolve`, and so the others.
        bits: what `convolve` gave.
        weight: as above.
        bias: as above.
        reach: as above.
        numbers: as above.
        seen: as above.
    """
    shape, make, add_up = _convolve_to_weight_ready(
        mixed.shape, mixed.dtype, weight.shape[-1], reach, seen.causal, precision_of(mixed.dtype)
    )
    partial = torch.empty(shape, dtype=torch.float32, device=mixed.device)
    make.run((mixed, gradient, bits, partial))
    to_weight, to_bias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    add_up.run((partial, numbers, to_weight, to_bias))
    return to_weight, to_bias


def convolve_to_mixed(
    gradient: Tensor,
    bits: Tensor,
    weight: Tensor,
    reach: tuple[int, int, int, int],
    numbers: Tensor,
    seen: Seen,
    to_mixed: Tensor,
) -> None:
    """Gradient of `convolve`'s mixed map, zeros in hidden cells, into the padded map `to_mixed`.

    Args:
        gradient: of the evolved map, a padded map, zeros in hidden cells.
        bits: what `convolve` gave.
        weight: as it was given to `convolve`, and so the others.
        reach: as above.
        numbers: as above.
        seen: as above.
        to_mixed: where it goes.
    """
    _walk(gradient, to_mixed, bits, weight, weight, reach, numbers, seen, backward=True)
