"""A rank's shard of a sample, prepared ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa3 import KernelSpec, plan_context
from train.data.position_buckets import position_buckets
from train.data.samples import IGNORED, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The local tokens of a sample. Tensors are (t,) int64 with t = ``plan.local_tokens`` >= 0.

    ``positions`` count from the start of the token's ``DocumentSlice``, ``buckets`` are those of
    ``position_buckets``. ``n_valid`` local tokens have a label. ``n_bytes`` are the bytes of the
    whole sample on the first rank of its CP group, and 0 on the others: a sum over ranks counts
    them once.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    buckets: Tensor
    plan: Any
    n_valid: int
    n_bytes: int

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on ``device``; the plan stays on the host."""
        if device.type == "cpu":
            return self
        tensors = (self.tokens, self.labels, self.positions, self.buckets)
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
        return Batch(*moved, plan=self.plan, n_valid=self.n_valid, n_bytes=self.n_bytes)


def make_batch(
    sample: Sample,
    cp_group: dist.ProcessGroup | None,
    layout: str,
    window_size: tuple[int, int] = (-1, -1),
    prepare: Sequence[KernelSpec] = (),
    kv_budget: int | None = None,
) -> Batch:
    """This rank's shard of ``sample``, with the plan of its causal attention.

    ``cp_group`` shares the sample; None means this process alone. ``prepare`` and ``kv_budget`` are
    as in ``plan_context``. The labels were shifted before the sample is sharded, so no rank needs
    the first token of another one.
    """
    plan = plan_context(
        sample.cu_seqlens,
        group=cp_group,
        layout=layout,
        causal=True,
        window_size=window_size,
        prepare=prepare,
        kv_budget=kv_budget,
    )
    labels = plan.shard(torch.from_numpy(sample.labels))
    return Batch(
        tokens=plan.shard(torch.from_numpy(sample.tokens)),
        labels=labels,
        positions=plan.positions,
        buckets=position_buckets(plan.positions),
        plan=plan,
        n_valid=int((labels != IGNORED).sum()),
        n_bytes=sample.n_bytes if plan.rank == 0 else 0,
    )


class Prefetch(Generic[T]):
    """Iterates over ``make(start)`` to ``make(stop - 1)``, which a thread computes.

    The thread starts on the next one at ``begin``, or else when the iterator requests it. An
    exception in ``make`` is raised when its result is requested. Use it in a ``with``, which ends
    the thread.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int) -> None:
        self._make, self._indices = make, iter(range(start, stop))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: Future[T] | None = None

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def begin(self) -> None:
        """Start to compute the next one, unless it has started or there is none."""
        index = next(self._indices, None) if self._next is None else None
        if index is not None:
            self._next = self._thread.submit(self._make, index)

    def __iter__(self) -> Iterator[T]:
        self.begin()
        while self._next is not None:
            current, self._next = self._next.result(), None
            yield current
            self.begin()


def prefetch(make: Callable[[int], T], start: int, stop: int) -> Iterator[T]:
    """``make(start)`` to ``make(stop - 1)``; a thread computes the next one while one is in use."""
    with Prefetch(make, start, stop) as ahead:
        for current in ahead:
            ahead.begin()
            yield current
