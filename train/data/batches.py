"""A rank's shard of a sample, prepared one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa3 import plan_context
from train.data.position_buckets import position_buckets
from train.data.samples import IGNORED, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The local tokens of a sample. Tensors are (t,) int64 with t = ``plan.local_tokens`` >= 0.

    ``positions`` count from the start of the token's piece, ``buckets`` are those of
    ``position_buckets``. ``n_valid`` local tokens have a label.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    buckets: Tensor
    plan: Any
    n_valid: int

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on ``device``; the plan stays on the host."""
        if device.type == "cpu":
            return self
        tensors = (self.tokens, self.labels, self.positions, self.buckets)
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
        return Batch(*moved, plan=self.plan, n_valid=self.n_valid)


def make_batch(
    sample: Sample,
    cp_group: dist.ProcessGroup | None,
    layout: str,
    window_size: tuple[int, int] = (-1, -1),
) -> Batch:
    """This rank's shard of ``sample``, with the plan of its causal attention.

    ``cp_group`` shares the sample; None is this process alone. The labels were shifted in the whole
    sample: no rank needs a neighbour's first token.
    """
    plan = plan_context(
        sample.cu_seqlens,
        group=cp_group,
        layout=layout,
        causal=True,
        window_size=window_size,
    )
    labels = plan.shard(torch.from_numpy(sample.labels))
    return Batch(
        tokens=plan.shard(torch.from_numpy(sample.tokens)),
        labels=labels,
        positions=plan.positions,
        buckets=position_buckets(plan.positions),
        plan=plan,
        n_valid=int((labels != IGNORED).sum()),
    )


def prefetch(make: Callable[[int], T], start: int, stop: int) -> Iterator[T]:
    """``make(start)`` to ``make(stop - 1)``; a thread makes the next one while one is in use.

    An exception in ``make`` is raised when its result is requested.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        submitted = (thread.submit(make, index) for index in range(start, stop))
        following = next(submitted, None)
        while following is not None:
            current = following.result()
            following = next(submitted, None)
            yield current
