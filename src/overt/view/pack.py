"""Compressed maps: the large entries of each row, one byte or two each, deflated.

A row keeps its largest entries until they hold `mass` of its absolute sum; the share of the others is kept as
one number per row. An entry w becomes the code c = round(steps · log2(1 + |w| / s)) and is read back as
s · (2^(c / steps) − 1). The row's scale s is near the median of the kept entries, and chosen so that the
largest entry is read back exactly. Small fields have codes of two bytes, a thousand steps per doubling. Large
fields have one byte and ten steps, so that an entry is read back within 4 % of itself plus 8 % of the median.
No kept entry becomes zero.

The bytes of a field (map, row, column) are two deflated parts. The first has the scales (float32, little
endian) and the dropped shares (one byte each) of all rows, then one bit per cell (kept or not), then the
signs of the kept cells, if any are negative. The second has their codes. Bits and codes run down the columns:
neighbours in a column are more alike.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt import _check

STEPS = {1: 10, 2: 1000}  # codes per doubling, by bytes of a code
SMALL = 100_000  # cells of a field whose codes have two bytes
MASS = 0.98  # of a row that its kept entries hold
Array = np.ndarray[Any, Any]


def pack(
    cells: Tensor, mass: float = MASS, width: int | None = None, most: int | None = None
) -> tuple[dict[str, Any], bytes]:
    """Metadata that `unpack` needs, as JSON values, and the bytes.

    Args:
        cells: (map, row, column), signed or not; NaN and infinities become zero, and are counted.
        mass: share of each row's absolute sum to keep, in [0, 1].
        width: bytes of a code, 1 or 2; by default 2 for small fields.
        most: entries of each row to keep at most, the largest, even where they hold less than `mass`.
    """
    _check.fraction("mass", mass)
    values = cells.detach().to("cpu", torch.float32).numpy()
    if values.ndim != 3:
        raise ValueError(f"cells must have shape (map, row, column), got {values.shape}")
    finite = np.isfinite(values)
    broken = int(values.size - np.count_nonzero(finite))
    values = np.where(finite, values, np.float32(0.0)) if broken else values
    sizes = np.abs(values)
    kept, median, largest, dropped, unit = _largest(sizes, mass, most)
    width = width or (2 if values.size <= SMALL else 1)
    steps, most = STEPS[width], 256**width - 1
    top = np.clip(np.round(steps * np.log2(1.0 + largest / median)), 1, most)
    scale = (largest / (2.0 ** (top / steps) - 1.0)).astype(np.float32)
    filled = np.where(scale > 0.0, scale, np.float32(1.0))
    codes = np.clip(np.round(steps * np.log2(1.0 + sizes / filled)), 1, most).astype(f"<u{width}")
    kept_down, codes_down = kept.swapaxes(1, 2), codes.swapaxes(1, 2)
    signed = bool((values < 0.0).any())
    parts = [
        scale.astype("<f4").tobytes(),
        np.round(255.0 * dropped).astype(np.uint8).tobytes(),
        np.packbits(kept_down).tobytes(),
    ]
    if signed:
        parts.append(np.packbits((values < 0.0).swapaxes(1, 2)[kept_down]).tobytes())
    first = _deflated(b"".join(parts), zlib.Z_DEFAULT_STRATEGY)
    second = _deflated(codes_down[kept_down].tobytes(), zlib.Z_FILTERED)
    about = {
        "shape": list(values.shape),
        "kept": int(np.count_nonzero(kept)),
        "signed": signed,
        "bytes": width,
        "steps": steps,
        "unit": unit,  # of the dropped shares
        "parts": [len(first), len(second)],
    }
    if broken:
        about["broken"] = broken
    return about, first + second


def unpack(about: dict[str, Any], data: bytes) -> tuple[Tensor, Tensor]:
    """The cells (map, row, column) and the share that each row dropped (map, row)."""
    maps, rows, columns = about["shape"]
    first = memoryview(zlib.decompress(data[: about["parts"][0]], -zlib.MAX_WBITS))
    second = zlib.decompress(data[about["parts"][0] :], -zlib.MAX_WBITS)
    codes = np.frombuffer(second, dtype=f"<u{about['bytes']}")
    count, cells = maps * rows, maps * rows * columns
    scale = np.frombuffer(first[: 4 * count], dtype="<f4").reshape(maps, rows, 1)
    dropped = np.frombuffer(first[4 * count : 5 * count], dtype=np.uint8).reshape(maps, rows)
    bits = first[5 * count :]
    kept = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=cells).astype(bool)
    values = np.zeros(cells, dtype=np.float32)
    values[kept] = 2.0 ** (codes / about["steps"]) - 1.0
    if about["signed"]:
        signs = np.frombuffer(bits[(cells + 7) // 8 :], dtype=np.uint8)
        values[kept] *= 1.0 - 2.0 * np.unpackbits(signs, count=len(codes))
    down = values.reshape(maps, columns, rows).swapaxes(1, 2) * scale
    return torch.from_numpy(down.astype(np.float32)), torch.from_numpy(dropped * (about["unit"] / 255.0))


def _largest(sizes: Array, mass: float, most: int | None) -> tuple[Array, Array, Array, Array, float]:
    """Which cells are kept; each row's median and largest kept entry; the share dropped, and its unit."""
    maps, rows, columns = sizes.shape
    if not columns:
        nothing = np.zeros((maps, rows, 1), dtype=np.float32)
        return np.zeros(sizes.shape, dtype=bool), nothing + 1.0, nothing, nothing[..., 0], 1.0 - mass
    ordered = -np.sort(-sizes, axis=-1)
    sums = np.cumsum(ordered, axis=-1, dtype=np.float64)
    total = sums[..., -1:]
    count = np.minimum((sums < mass * total).sum(axis=-1, keepdims=True), columns - 1)
    if most is not None:
        count = np.minimum(count, most - 1)
    least = np.take_along_axis(ordered, count, axis=-1)
    kept = (sizes >= least) & (sizes > 0.0)  # entries equal to the last kept one are kept too
    many = kept.sum(axis=-1, keepdims=True)
    median = np.take_along_axis(ordered, many // 2, axis=-1)
    left = total - np.where(kept, sizes, 0.0).sum(axis=-1, keepdims=True, dtype=np.float64)
    share = left / np.where(total > 0.0, total, 1.0)
    unit = 1.0 - mass if most is None else max(1.0 - mass, float(share.max(initial=0.0)))
    dropped = np.clip(share[..., 0] / max(unit, 1e-12), 0.0, 1.0)
    return kept, np.where(median > 0.0, median, 1.0), ordered[..., :1], dropped, unit


def _deflated(data: bytes, strategy: int) -> bytes:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return squeeze.compress(data) + squeeze.flush()
