"""From scores to outputs in one pass: noise, softmax, dropout, values, and the row sums that the KL needs.

Scores are products of queries and keys, computed tile by tile and never stored, or an evolved map, read tile
by tile. The backward passes draw the noise again.

Exponents are in units of log 2. With φ_ij = Φ_ij − lse_i and the prior's parameter a_j, all that the KL needs
from a row's scores is Σ_j a_j·Φ_ij for WEIBULL, and Σ_j (Φ_ij − a_j)² and Σ_j (Φ_ij − a_j) for LOGNORMAL,
over visible keys; the rest are sums over keys alone (computed by `prior`). So the same pass computes it,
whatever the origin of the scores.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms import flat
from overt.mechanisms.flat import Divergence, Inputs, Masks, Noise
from overt.mechanisms.kernels.attend import (
    NO_DIVERGENCE,
    Attended,
    Form,
    Shape,
    given_or,
    heads_last,
    heads_last_strides,
    read_by_both,
    row_length,
    rows_whole,
)
from overt.mechanisms.kernels.launch import MOST, Ready, blocks
from overt.mechanisms.kernels.noise import (
    LN2,
    LOG2E,
    LOOSE,
    NO_KL,
    NO_NOISE,
    WEIBULL,
    column_order,
    example_number,
    log_noise,
    stream_key,
    word_tile,
)
from overt.mechanisms.kernels.tiles import (
    HIDDEN,
    NOTHING_ELSE,
    NOWHERE,
    PLAINLY,
    ZEROS,
    padded_rows,
    rows_at,
)


@triton.jit(do_not_specialize=LOOSE)
def attend_forward(
    query, key, value, maps, out, rows, kl_parts,
    key_visible, query_real, step, sample, examples, keyed, drop_keys,
    scale, noise_factor, kept_gain, seeing, precision, per_cell,
    drop_below, first_row,
    query_batch_stride, query_head_stride, query_row_stride,
    key_batch_stride, key_head_stride, key_row_stride,
    value_batch_stride, value_head_stride, value_row_stride,
    map_batch_stride, map_head_stride, map_row_stride,
    out_batch_stride, out_head_stride, out_row_stride, out_sample_stride,
    heads, group, queries, keys, row_length,
    seed_low, seed_high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr, SAMPLES: tl.constexpr,
    NOISE: tl.constexpr, KL: tl.constexpr, SCORES: tl.constexpr, DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, PADDING: tl.constexpr,
    WHOLE: tl.constexpr, MAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head of one example, over all the keys that they see.

    Programs: (blocks of rows × samples, heads, examples). In comments, block_q and block_k are rows and
    columns of a tile, and width is that of heads, both rounded up to powers of two.

    Args other than tensors and strides:
        kl_parts: `Attended.kl`.
        keyed: what `prior.forward` computed from the keys.
        drop_keys: two words, the key of dropout's noise.
        noise_factor: factor of the noise (`flat.Noise.factors`).
        kept_gain: factor of the weights that dropout keeps.
        seeing: constant term of the KL of each row that sees a key.
        precision: 1/σ₁², of the Lognormal prior.
        per_cell: factor of the KL.
        drop_below: words below it drop their weight.
        group: heads that share a key head.
        row_length: columns of a map's rows in memory, those of padding included.
        STEP, SAMPLE, EXAMPLES: where the numbers of the noise's address come from.
        SAMPLES: number of draws of each row; rows of a tile are row × sample, the sample varying fastest.
        NOISE: family of the draw, NO_NOISE for the mean.
        KL: family of the KL, or NO_KL.
        SCORES: whether the posterior's mean is taken from raw scores, without the log-sum-exp.
        PADDING: what is done for padded queries: ZEROS, PLAINLY, or NOTHING_ELSE, which also attends plainly
            but leaves other queries' `out` and `rows` unchanged, and has neither noise nor KL.
        WHOLE: whether tiles cover rows and keys exactly.
        MAP: whether scores are `maps`, with −inf in hidden cells, in place of products.
        FAST: whether the hardware's logarithms may be used.
    """
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest first
    head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_WORDS: tl.constexpr = BLOCK_K // 4
    DRAWS: tl.constexpr = NOISE != NO_NOISE or DROPOUT
    place = block * BLOCK_Q + tl.arange(0, BLOCK_Q)  # (block_q,), row × sample
    row = place // SAMPLES  # (block_q,)
    row_inside = row < queries  # (block_q,)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    across = tl.arange(0, BLOCK_K)  # (block_k,)
    word_across = tl.arange(0, BLOCK_WORDS)  # (block_k / 4,)
    key_head = head // group
    order = column_order(across, BLOCK_K, DRAWS and not MAP)  # (block_k,)

    query_at = rows_at(
        query, example, head, row, dim, query_batch_stride, query_head_stride, query_row_stride
    )  # (block_q, width)
    if not MAP:
        q = tl.load(query_at, mask=row_inside[:, None] & (dim < WIDTH)[None, :], other=0.0)
    key_at = rows_at(
        key, example, key_head, order, dim, key_batch_stride, key_head_stride, key_row_stride
    )  # (block_k, width)
    value_at = rows_at(
        value, example, key_head, order, dim, value_batch_stride, value_head_stride, value_row_stride
    )  # (block_k, width)
    map_at = (
        maps + example * map_batch_stride + head.to(tl.int64) * map_head_stride
        + row[:, None].to(tl.int64) * map_row_stride + across[None, :]
    )  # (block_q, block_k)  # fmt: skip
    first_key = (example * (heads // group) + key_head) * keys  # of this key head, in `keyed`
    if DRAWS:
        c1 = (first_row + row).to(tl.uint32)[:, None]  # (block_q, 1)
        c2 = head.to(tl.uint32)
        c3 = example_number(examples, first_example, example, EXAMPLES)
    if NOISE != NO_NOISE:
        k0, k1 = stream_key(
            step, sample, seed_low, seed_high, step_number, sample_number, layer, kind, example, place,
            STEP, SAMPLE, SAMPLES,
        )  # fmt: skip
    if DROPOUT:
        drop_k0 = tl.load(drop_keys).to(tl.uint32)
        drop_k1 = tl.load(drop_keys + 1).to(tl.uint32)
        drop_place = example.to(tl.uint32) << 12  # beside the number, which samples of an example share

    unit = scale * LOG2E  # of products, or of the map's cells, with scale 1
    top = tl.full((BLOCK_Q,), HIDDEN, tl.float32)  # largest score so far
    mass = tl.zeros((BLOCK_Q,), tl.float32)  # Σ exp of scores, relative to it
    drawn_mass = tl.zeros((BLOCK_Q,), tl.float32)  # the same with noise
    first_sum = tl.zeros((BLOCK_Q,), tl.float32)  # WEIBULL: Σ a·Φ / scale; LOGNORMAL: Σ (Φ − a)²
    second_sum = tl.zeros((BLOCK_Q,), tl.float32)  # LOGNORMAL: Σ (Φ − a)
    out_sum = tl.zeros((BLOCK_Q, BLOCK_WIDTH), tl.float32)  # (block_q, width)
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (block * BLOCK_Q + BLOCK_Q - 1) // SAMPLES + 1 + keys - queries)
    if PADDING != ZEROS:
        padding = padded_rows(query_real, example, row, queries)  # (block_q,)
    if PADDING == NOTHING_ELSE:
        stop = tl.where(tl.max(padding.to(tl.int32), 0) > 0, stop, 0)
    for start in range(0, stop, BLOCK_K):
        column = start + order  # (block_k,)
        seen = column < keys  # (block_k,)
        if MAP:
            # Padding is loaded, too: only then are several columns loaded at once.
            inside = row_inside[:, None] & (column < row_length)[None, :]  # (block_q, block_k)
            cells = tl.load(map_at + start, mask=inside, other=HIDDEN).to(tl.float32)
            scores = tl.where(seen[None, :], cells, HIDDEN)  # (block_q, block_k)
            visible = scores != HIDDEN  # (block_q, block_k)
            raw = tl.where(visible, scores, 0.0)  # (block_q, block_k)
        else:
            if WHOLE:
                k = tl.load(key_at + start * key_row_stride, mask=(dim < WIDTH)[None, :], other=0.0)
            else:
                k = tl.load(
                    key_at + start * key_row_stride, mask=seen[:, None] & (dim < WIDTH)[None, :], other=0.0
                )  # (block_k, width)
            raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (block_q, block_k)
            scores = raw
            if KEY_MASK:
                seen &= tl.load(key_visible + example * keys + column, mask=seen, other=0) != 0
            if not (WHOLE and not KEY_MASK and not CAUSAL):
                visible = seen[None, :]  # (1, block_k), or (block_q, block_k) where causal
                if CAUSAL:
                    visible = visible & (column[None, :] <= row[:, None] + (keys - queries))
                scores = tl.where(visible, raw, HIDDEN)
        if KL != NO_KL:
            parameter = tl.load(keyed + first_key + column, mask=seen, other=0.0)  # (block_k,)
            if KL == WEIBULL:
                part = parameter[None, :] * raw  # (block_q, block_k)
                if CAUSAL and not MAP:
                    part = tl.where(visible, part, 0.0)
                first_sum += tl.sum(part, 1)
            else:
                part = raw * scale - parameter[None, :]  # (block_q, block_k)
                if not (WHOLE and not KEY_MASK and not CAUSAL and not MAP):
                    part = tl.where(visible, part, 0.0)
                first_sum += tl.sum(part * part, 1)
                second_sum += tl.sum(part, 1)

        higher = tl.maximum(top, tl.max(scores, 1) * unit)  # (block_q,)
        level = tl.where(higher == HIDDEN, 0.0, higher)  # (block_q,)
        shrink = tl.exp2(top - level)  # (block_q,)
        top = higher
        scores = scores * unit - level[:, None]
        c0 = (start // 4 + word_across).to(tl.uint32)[None, :]  # (1, block_k / 4)
        if NOISE != NO_NOISE:
            word = word_tile(k0, k1, c0, c1, c2, c3, BLOCK_Q, BLOCK_K, MAP)  # (block_q, block_k)
            noise = log_noise(word, noise_factor, NOISE, FAST)  # (block_q, block_k)
            if PADDING == PLAINLY:
                noise = tl.where(padding[:, None], 0.0, noise)
            weights = tl.exp2(scores + noise)  # (block_q, block_k)
            if KL != NO_KL:
                mass = mass * shrink + tl.sum(tl.exp2(scores), 1)
        else:
            weights = tl.exp2(scores)  # (block_q, block_k)
        drawn_mass = drawn_mass * shrink + tl.sum(weights, 1)
        if DROPOUT:
            word = word_tile(drop_k0, drop_k1, c0, c1, c2 + drop_place, c3, BLOCK_Q, BLOCK_K, MAP)
            weights = tl.where(word >= drop_below.to(tl.uint32), weights, 0.0)
        if WHOLE:
            v = tl.load(value_at + start * value_row_stride, mask=(dim < WIDTH)[None, :], other=0.0)
        else:
            v = tl.load(
                value_at + start * value_row_stride,
                mask=(start + order < keys)[:, None] & (dim < WIDTH)[None, :], other=0.0,
            )  # (block_k, width)  # fmt: skip
        out_sum = tl.dot(weights.to(v.dtype), v, out_sum * shrink[:, None], input_precision=PRECISION)

    blind = drawn_mass == 0.0  # (block_q,), rows that see no key
    drawn_mass = tl.where(blind, 1.0, drawn_mass)
    if QUERY_MASK and PADDING == ZEROS:
        blind = blind | (tl.load(query_real + example * queries + row, mask=row_inside, other=0) == 0)
    level = tl.where(top == HIDDEN, 0.0, top)
    out_sum = tl.where(blind[:, None], 0.0, out_sum * (kept_gain / drawn_mass)[:, None])
    out_at = rows_at(out, example, head, row, dim, out_batch_stride, out_head_stride, out_row_stride)
    out_at += (place % SAMPLES).to(tl.int64)[:, None] * out_sample_stride
    stored = row_inside  # (block_q,)
    if PADDING == NOTHING_ELSE:
        stored = stored & padding
    tl.store(out_at, out_sum.to(out.dtype.element_ty), mask=stored[:, None] & (dim < WIDTH)[None, :])
    row_at = (example * heads + head) * queries + row  # (block_q,)
    first_sample = stored & (place % SAMPLES == 0)
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    tl.store(rows + row_at, tl.where(blind, NOWHERE, level + tl.log2(drawn_mass)), mask=first_sample)
    if KL != NO_KL:
        if NOISE == NO_NOISE:
            mass = drawn_mass
        mean_lse = (level + tl.log2(tl.where(mass == 0.0, 1.0, mass))) * LN2  # (block_q,)
        # Sums over the keys that a row sees: of the KL's terms per key, and of α (or 1).
        key_maps = tl.num_programs(2).to(tl.int64) * (heads // group)
        key_sums = keyed + 2 * key_maps * keys + key_maps
        if CAUSAL:
            sum_at = first_key + row + (keys - queries)  # (block_q,)
            second_sums = key_maps * keys
        else:
            sum_at = example * (heads // group) + key_head + 0 * row  # (block_q,)
            second_sums = key_maps
        base = tl.load(key_sums + sum_at, mask=row_inside, other=0.0)  # (block_q,)
        count = tl.load(key_sums + second_sums + sum_at, mask=row_inside, other=0.0)  # (block_q,)
        if KL == WEIBULL:
            if SCORES:
                steep = seeing * tl.exp2(mean_lse * LOG2E)
                kl = base - first_sum * scale + steep
            else:
                steep = count
                kl = base - first_sum * scale + count * mean_lse + seeing
        else:
            if SCORES:
                steep = 0.0 * mean_lse
                kl = base + 0.5 * precision * first_sum
            else:
                steep = precision * (count * mean_lse - second_sum)
                kl = base + 0.5 * precision * (
                    first_sum - 2.0 * mean_lse * second_sum + count * mean_lse * mean_lse
                )
        if PADDING == PLAINLY:
            blind = blind | padding
        tl.store(rows + each + row_at, tl.where(blind, 0.0, mean_lse), mask=first_sample)
        tl.store(rows + 2 * each + row_at, tl.where(blind, 0.0, steep), mask=first_sample)
        kl = tl.where(blind | (row_inside == 0), 0.0, kl)
        part_at = (example * heads + head) * tl.num_programs(0) + block
        tl.store(kl_parts + part_at, tl.sum(kl) * per_cell)


@lru_cache(MOST)
def _ready(
    form: Form, samples: int, mapped: bool, queried: Shape, valued: Shape,
    query: Shape, key: Shape, value: Shape, maps: Shape,
) -> Ready:  # fmt: skip
    """The launch for shapes of query and value, and strides of query, key, value and map."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = queried, valued
    tiles = form.tiles("forward, map" if mapped else "forward", width, queries * samples, keys)
    out = heads_last_strides(queried if samples == 1 else (samples, *queried))
    return Ready(
        attend_forward,
        (blocks(queries * samples, tiles.rows), heads, batch),
        (
            *form.integers(), *query[:3], *key[:3], *value[:3], *maps[:3],
            *out[-4:-1], out[0], heads, heads // key_heads, queries, keys, row_length(keys),
        ),
        {
            **form.address(),
            "SAMPLES": samples,
            **form.law(),
            **form.masks(),
            "WHOLE": keys % tiles.columns == 0 and (queries * samples) % tiles.rows == 0,
            "MAP": mapped,
            **form.sizes(width, tiles),
        },
        tiles.warps,
        tiles.stages,
    )  # fmt: skip


def forward(
    inputs: Inputs,
    masks: Masks,
    noise: Noise,
    divergence: Divergence = NO_DIVERGENCE,
    keyed: Tensor | None = None,
    maps: Tensor | None = None,
    samples: int = 1,
) -> Attended:
    """Attend. `maps`, an evolved map with −inf in hidden cells, replaces the scores unless it is None.

    Args:
        inputs: the tensors; with `maps`, key and scale are unused, only the query's shape and dtype are
            used, and values may have another width.
        masks: which cells are visible; with `maps` only `query_real` and `causal` are used.
        noise: what is drawn.
        divergence: the KL.
        keyed: what `prior.forward` computed from the keys for it.
        maps: (batch, heads, query, key) or None; each row has `row_length` columns in memory.
        samples: number of draws of each row, numbered from 0; with more than one, each tile of keys and
            values is read once for all.
    """
    query, key, value = rows_whole(inputs.query), rows_whole(inputs.key), rows_whole(inputs.value)
    source, shape = given_or(maps, query), (*query.shape[:3], value.shape[-1])
    padding = flat.PLAINLY if masks.left and maps is None else flat.ZEROS
    ready = _ready(
        Form.of(query.dtype, noise, divergence, masks, padding), samples, maps is not None,
        shape, value.shape, query.stride(), key.stride(), value.stride(), source.stride(),
    )  # fmt: skip
    batch, heads, queries, _ = shape
    out = heads_last(query, *((samples,) if samples > 1 else ()), *shape)
    rows = query.new_empty((3 if divergence.wanted else 1, batch, heads, queries), dtype=torch.float32)
    kl = query.new_empty((batch, heads, ready.grid[0] if divergence.wanted else 0), dtype=torch.float32)
    ready.run(
        (query, key, value, source, out, rows, kl, *read_by_both(query, masks, noise, keyed)),
        (
            inputs.scale if maps is None else 1.0, *noise.factors(),
            divergence.seeing, divergence.precision, divergence.per_cell,
        ),
        noise.loose(),
    )  # fmt: skip
    return Attended(out, rows, kl)


def attend_padding(inputs: Inputs, masks: Masks, noise: Noise, done: Attended) -> None:
    """Attend plainly for padded queries, in place of the zeros that a pass over a map wrote.

    Args:
        inputs: the tensors.
        masks: which cells are visible, including `query_real`.
        noise: what was drawn; only dropout is used.
        done: the pass's results; padded queries' rows of `out`, and of the first of `rows`, are overwritten.
    """
    query, key, value = rows_whole(inputs.query), rows_whole(inputs.key), rows_whole(inputs.value)
    plain = noise._replace(family=flat.NO_NOISE)
    ready = _ready(
        Form.of(query.dtype, plain, NO_DIVERGENCE, masks, flat.NOTHING_ELSE), 1, False,
        query.shape, value.shape, query.stride(), key.stride(), value.stride(), query.stride(),
    )  # fmt: skip
    ready.run(
        (query, key, value, query, *done, *read_by_both(query, masks, plain, None)),
        (inputs.scale, *plain.factors(), 0.0, 0.0, 0.0),
        plain.loose(),
    )
