"""Local K/V: the K/V of a rank's own tokens, which it publishes, and dK/dV that peers return.

Letters in shapes: t tokens, n published rows, those of `KVExchange.published`; hk KV heads, d head
dim. The structures mirror csrc/params.h field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from ringfa3.kernels.launch import Tensor3, launch, packer, tma_addressable
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.uploads import Packed, Uploaded, Uploads
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.row_exchange import RowIndex

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit

MAX_RUNS = 16  # kMaxRuns: a world of n ranks has n - 2 at most, and is of one host

Run: TypeAlias = tuple[int, int]  # published rows [begin, end)


class PublishedRows(ctypes.Structure):
    _fields_ = (
        ("position", ctypes.c_void_p),
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
    )


class RowRuns(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        ("begin", ctypes.c_int32 * MAX_RUNS),
        ("end", ctypes.c_int32 * MAX_RUNS),
    )


class PublishArgs(ctypes.Structure):
    _fields_ = (
        ("k", Tensor3),
        ("v", Tensor3),
        ("rows", PublishedRows),
        ("published", ctypes.c_void_p),
        ("gathered", ctypes.c_void_p),
    )


class AddReturnsArgs(ctypes.Structure):
    _fields_ = (
        ("sum", ctypes.c_void_p),
        ("returned", ctypes.c_void_p),
        ("runs", RowRuns),
        ("row_floats", ctypes.c_int32),
    )


class RoundGradientsArgs(ctypes.Structure):
    _fields_ = (
        ("own", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("returned", ctypes.c_void_p),
        ("rows", PublishedRows),
        ("runs", RowRuns),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("row_floats", ctypes.c_int32),
    )


_pack_publish = packer(PublishArgs)
_pack_add_returns = packer(AddReturnsArgs)
_pack_round_gradients = packer(RoundGradientsArgs)


class Returns(NamedTuple):
    """dK/dV of a rank's own keys from its peers' queries, in the accumulation dtype.

    sum       (n, 2, hk, d), of all rows
    returned  (n', 2, hk, d), rows [0, n') of the published ones: what came last
    runs      rows of `returned` that are not in `sum` yet
    """

    sum: torch.Tensor
    returned: torch.Tensor
    runs: tuple[Run, ...]


class LocalKV(Protocol):
    """Publishes a rank's local K/V, and adds and rounds its dK/dV."""

    def publish(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        published: torch.Tensor,
        gathered: torch.Tensor | None,
    ) -> None:
        """Copies the published rows of k, v (t, hk, d) to `published` (n, 2, hk, d), and all to
        `gathered` (t, 2, hk, d)."""

    def add_returns(self, returns: Returns) -> None:
        """Adds the runs to the sum."""

    def round_gradients(
        self, own: torch.Tensor, returns: Returns | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV (t, hk, d) in a dtype: `own` (t, 2, hk, d), then the sum, then the runs."""


class LocalKVReference:
    """`LocalKV` by PyTorch's operations. It may change `own`."""

    def __init__(self, plan: ContextPlan, device: torch.device) -> None:
        self._exchange, self._device = plan.kv_exchange, device

    @cached_property
    def _rows(self) -> RowIndex:
        return RowIndex.of(self._exchange.published, self._device)

    def publish(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        published: torch.Tensor,
        gathered: torch.Tensor | None,
    ) -> None:
        for i, x in enumerate((k, v)):
            self._rows.gather(x, published[:, i])
            if gathered is not None:
                gathered[:, i].copy_(x)

    def add_returns(self, returns: Returns) -> None:
        for begin, end in returns.runs:
            returns.sum[begin:end].add_(returns.returned[begin:end])

    def round_gradients(
        self, own: torch.Tensor, returns: Returns | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if returns is not None:
            self._rows.add(returns.sum, own)
            for begin, end in returns.runs:
                self._rows.part(begin, end).add(returns.returned[begin:end], own)
        dk, dv = (x.to(dtype, copy=True).contiguous() for x in own.unbind(1))
        return dk, dv


class LocalKVKernels:
    """`LocalKV` by kernels of a unit of attention, on the current stream. K and V have 16 bits, and
    a head dim that is a multiple of 8."""

    def __init__(self, unit: Unit, plan: ContextPlan) -> None:
        self._unit, self._tokens = unit, plan.local_keys
        self._exchange = plan.kv_exchange  # not the plan, which frees what its calls have prepared

    def publish(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        published: torch.Tensor,
        gathered: torch.Tensor | None,
    ) -> None:
        if not len(published) and gathered is None:
            return
        stream = CurrentStream.of(k.device)
        (k, k_fields), (v, v_fields) = tma_addressable(k), tma_addressable(v)
        args = _pack_publish(
            *k_fields,
            *v_fields,
            *self._published_rows(stream),
            published.data_ptr(),
            0 if gathered is None else gathered.data_ptr(),
        )
        launch(self._unit, "publish", args, stream)

    def add_returns(self, returns: Returns) -> None:
        args = _pack_add_returns(
            returns.sum.data_ptr(),
            returns.returned.data_ptr(),
            *_runs(returns.runs),
            returns.sum[:1].numel(),
        )
        launch(self._unit, "add_returns", args, CurrentStream.of(returns.sum.device))

    def round_gradients(
        self, own: torch.Tensor, returns: Returns | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = CurrentStream.of(own.device)
        tokens, _, kv_heads, head_dim = own.shape
        shape = tokens, kv_heads, head_dim
        dk, dv = (own.new_empty(shape, dtype=dtype) for _ in range(2))
        args = _pack_round_gradients(
            own.data_ptr(),
            0 if returns is None else returns.sum.data_ptr(),
            0 if returns is None else returns.returned.data_ptr(),
            *self._published_rows(stream),
            *_runs(() if returns is None else returns.runs),
            dk.data_ptr(),
            dv.data_ptr(),
            tokens,
            2 * kv_heads * head_dim,
        )
        launch(self._unit, "round_gradients", args, stream)
        return dk, dv

    def _published_rows(self, stream: CurrentStream) -> tuple[int, int, int]:
        """The fields of PublishedRows."""
        rows = self._exchange.published
        if self._exchange.consecutive:
            return 0, int(rows[0]) if len(rows) else 0, len(rows)
        return self._positions(stream), 0, len(rows)

    def _positions(self, stream: CurrentStream) -> int:
        """The address of (t,) int32: the published row of each token, -1 for none."""

        def make() -> Packed:
            rows = self._exchange.published
            position = np.full(self._tokens, -1, np.int32)
            position[rows] = np.arange(len(rows), dtype=np.int32)
            return Packed(position)

        return _uploaded.get(self._exchange, stream, (), make).addresses[0]


_uploaded: Uploads[Uploaded] = Uploads("published rows")


def _runs(runs: Sequence[Run]) -> Iterable[int]:
    """The fields of RowRuns."""
    if len(runs) > MAX_RUNS:
        raise ValueError(
            f"a rank's dK/dV return in {len(runs)} runs of rows, allowed are {MAX_RUNS}: use "
            "transport='nccl'"
        )
    missing = [0] * (MAX_RUNS - len(runs))
    return len(runs), *(x for x, _ in runs), *missing, *(x for _, x in runs), *missing
