"""If this fails, the losses by position are wrong. Buckets of positions, and exact sums in them."""

from __future__ import annotations

import math
import re

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from train.data.position_buckets import (
    bucket_label,
    n_buckets,
    position_buckets,
    sum_by_bucket,
)


def test_buckets_are_powers_of_two():
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 8, 1023, 1024])
    assert position_buckets(positions).tolist() == [0, 1, 2, 2, 3, 3, 4, 10, 11]
    for seq_len in (1, 2, 3, 1024, 1025):
        assert n_buckets(seq_len) == int(position_buckets(torch.arange(seq_len)).max()) + 1
    assert [bucket_label(b) for b in range(4)] == ["0", "1", "2-3", "4-7"]


def test_sums_by_bucket():
    sums = sum_by_bucket(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 4)
    assert sums.tolist() == [1.0, 0.0, 6.0, 0.0]


def test_sums_by_bucket_are_exact_and_keep_a_nan_to_itself():
    """Against ``math.fsum`` of each bucket: 1e-12 relative."""
    torch.manual_seed(0)
    values, buckets = torch.randn(10_000), torch.randint(0, 20, (10_000,))
    expected = [math.fsum(values[buckets == b].tolist()) for b in range(21)]
    got = sum_by_bucket(values, buckets, 21)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    values[buckets == 7] = math.nan
    assert sum_by_bucket(values, buckets, 21).isnan().nonzero().tolist() == [[7]]
    assert sum_by_bucket(values[:0], buckets[:0], 3).tolist() == [0.0, 0.0, 0.0]


def test_sums_by_bucket_have_a_fixed_order_on_every_device():
    """No operation adds by index: a GPU does that in no fixed order."""
    used: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            used.add(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    with Watch():
        sum_by_bucket(torch.rand(8), torch.arange(8) // 3, 3)
    assert "sum" in used
    assert not [name for name in used if re.search("index|scatter|bincount|histc|put", name)]


def test_sums_of_parts_are_those_of_the_whole(monkeypatch):
    """Whole numbers: exact."""
    values, buckets = torch.arange(7.0), torch.tensor([0, 1, 1, 3, 0, 3, 3])
    monkeypatch.setattr("train.data.position_buckets.TOKENS_AT_ONCE", 2)
    assert sum_by_bucket(values, buckets, 5).tolist() == [4, 3, 0, 14, 0]
    assert sum_by_bucket(values[:0], buckets[:0], 2).tolist() == [0, 0]
