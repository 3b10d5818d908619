"""PyTorch's FlexAttention under a mask of spans; the blocks that it and FlashAttention-4 visit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ringfa3.bench.common.cases import BACKWARD, Case
from ringfa3.bench.common.implementations import Attend, SingleDevice, tensor
from ringfa3.bench.common.problem import PreparedRun, Problem, UnsupportedCaseError
from ringfa3.masks.mask import Mask
from ringfa3.planning.placement.costs import Ints

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NAME = "FlexAttention"
BLOCK = 128  # rows and keys, of the block masks of both libraries
RUNS = 2  # of keys, at most of a row: more cost more comparisons for each score


class FlexAttention(SingleDevice):
    """`flex_attention`, compiled where it runs on a GPU. Its block mask is made before it runs."""

    def __init__(self) -> None:
        self.name = NAME

    def attend(self, case: Case, device: torch.device) -> Attend:
        block_mask = RunsOfKeys.of(case, device).block_mask()
        on_gpu = device.type == "cuda"
        flex = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = flex(q, k, v, block_mask=block_mask, enable_gqa=True)
            return tensor(out)[0].transpose(0, 1)

        return attend

    def prepare(self, problem: Problem) -> PreparedRun:
        if problem.direction == BACKWARD and not problem.q.is_cuda:
            raise UnsupportedCaseError("no backward on CPUs")
        return super().prepare(problem)


@dataclass(frozen=True)
class RunsOfKeys:
    """A mask as the keys of each row: at most two runs of neighbours.

    begins, ends: (RUNS, rows) int32, keys [begin, end) of a run; an absent run is [0, 0).
    """

    begins: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, case: Case, device: torch.device) -> RunsOfKeys:
        """Raises UnsupportedCaseError: the case has no spans, or a row has more runs."""
        if case.spans is None:
            raise UnsupportedCaseError("only masks of spans")
        row, begin, end = runs_of_keys(case.spans)
        number = np.arange(len(row)) - np.searchsorted(row, row)  # of a run in its row
        if (most := int(number.max()) + 1) > RUNS:
            raise UnsupportedCaseError(f"rows of {most} runs of keys, {RUNS} are compared")
        table = np.zeros((2, RUNS, case.tokens), np.int32)
        table[:, number, row] = begin, end
        return cls(*torch.from_numpy(table).to(device))

    @property
    def mask_mod(self) -> MaskMod:
        """For FlexAttention: whether a row attends to a key."""
        (begin, begin2), (end, end2) = self.begins, self.ends

        def visible(
            batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            first, second = key >= begin[row], key >= begin2[row]
            return tensor((first & (key < end[row])) | (second & (key < end2[row])))

        return visible

    def block_mask(self) -> BlockMask:
        """With the blocks of which every pair is visible apart from those with some.

        `create_block_mask` would need rows x keys bytes.
        """
        rows = self.begins.shape[1]
        tiles = -(-rows // BLOCK)
        first = torch.arange(tiles, device=self.begins.device) * BLOCK
        inside = torch.zeros(tiles, tiles, dtype=torch.int64, device=self.begins.device)
        for begin, end in zip(self.begins, self.ends, strict=True):  # (rows,)
            padded = (F.pad(x, (0, tiles * BLOCK - rows))[:, None] - first for x in (begin, end))
            low, high = (x.clamp(0, BLOCK) for x in padded)  # (rows, tiles)
            inside += (high - low).view(tiles, BLOCK, tiles).sum(1)
        full = inside == BLOCK * BLOCK
        partial = _numbers_and_indices((inside > 0) & ~full)
        lengths = (rows, rows)
        return BlockMask.from_kv_blocks(
            *partial,
            *_numbers_and_indices(full),
            BLOCK,
            mask_mod=self.mask_mod,
            seq_lengths=lengths,
        )


def _numbers_and_indices(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (n, n) bool: how many of a row are chosen, (1, 1, n); their columns, before all others,
    (1, 1, n, n)."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def runs_of_keys(mask: Mask) -> tuple[Ints, Ints, Ints]:
    """(row, begin, end) of all runs of neighbouring keys to which a row attends, in order."""
    q0, q1, k0, k1, lo, hi = mask.diagonal_spans.T
    rows = q1 - q0
    span = np.repeat(np.arange(len(rows)), rows)
    row = np.arange(len(span)) - np.repeat(np.cumsum(rows) - rows, rows) + q0[span]
    begin, end = np.maximum(k0[span], row + lo[span]), np.minimum(k1[span], row + hi[span] + 1)
    some = np.flatnonzero(begin < end)
    some = some[np.lexsort((begin[some], row[some]))]
    row, begin, end = row[some], begin[some], end[some]
    joins = (np.diff(row) == 0) & (begin[1:] == end[:-1])  # no two spans have a common pair
    starts = np.concatenate(([True], ~joins))
    return row[starts], begin[starts], end[np.concatenate((~joins, [True]))]
