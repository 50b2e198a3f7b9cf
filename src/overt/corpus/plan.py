"""How a corpus is cut: rows into shards, the rows of a shard into batches.

Both follow from the input and the settings alone, so that every engine and any number of workers computes the
same batches, and so the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

BATCH = 32  # rows
SHARD = 4096  # rows
CELLS = 2**22  # most cells of one layer's maps in a batch: fewer rows go together where texts are long


def shards(rows: int, size: int) -> list[range]:
    """Row numbers of each shard; at least one shard, which may be empty."""
    return [range(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places of the rows of each batch: rows of similar length go together, so that little is padded.

    Args:
        lengths: number of tokens of each row.
        size: most rows of a batch.
    """
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    cut: list[list[int]] = []
    for place in order:
        # Rows are sorted: the one that comes is the longest.
        fits = cut and len(cut[-1]) < size and (len(cut[-1]) + 1) * lengths[place] ** 2 <= CELLS
        if fits:
            cut[-1].append(place)
        else:
            cut.append([place])
    return cut
