"""The work of a chunk of a document, as the kernels do it: in blocks of `TILE` rows and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
# cost(documents, positions, lengths): work of chunks; it broadcasts, and an empty chunk costs 0
Cost: TypeAlias = Callable[[Ints, Ints, Ints], Ints]

TILE = 128  # rows of a tile, keys of a block


def block_cost(lengths: Ints, left: Ints, right: Ints) -> Cost:
    """Blocks that the forward computes of chunks of self-attending documents.

    A tile of rows [f, f + TILE) attends to keys from max(f - left, 0) up to
    min(f + TILE + right, length), in whole blocks. A chunk's tiles begin with it, and its last tile
    counts as a whole one.

    Args:
        lengths: (documents,) tokens of each.
        left, right: (documents,) the window, 0 or more; causal is right = 0.
    """

    def cost(document: Ints, position: Ints, length: Ints) -> Ints:
        total, before, after = lengths[document], left[document], right[document]
        full, rest = length // TILE, length % TILE
        # The first so many tiles see the first key; and of the first so many the end hides a key.
        early = np.minimum(np.maximum((before - position) // TILE + 1, 0), full)
        inner = np.minimum(np.maximum((total - position - after) // TILE, 0), full)
        both = np.minimum(early, inner)
        blocks = both * -(-(position + after) // TILE) + both * (both + 1) // 2
        blocks += (inner - both) * -(-(TILE + before + after) // TILE)
        blocks += (early - both) * -(-total // TILE)
        first = np.maximum(early, inner)
        last = full - first
        blocks += last * -(-(total - position + before) // TILE)
        blocks -= last * first + last * (last - 1) // 2
        end = np.minimum(position + length + after, total)
        begin = np.maximum(position + full * TILE - before, 0)
        result: Ints = blocks + (rest > 0) * -(-(end - begin) // TILE)
        return result

    return cost
