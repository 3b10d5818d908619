"""Threads and cores."""

from __future__ import annotations

import pytest

from train.affinity import parse_cores, threads
from train.config import ParallelConfig


def test_lists_of_cores_as_the_kernel_writes_them():
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_cores("\n") == set()


@pytest.mark.parametrize(
    ("wished", "processes", "setting", "expected"),
    [
        ("1", "4", None, 4),  # torchrun's own 1
        ("", "4", None, 4),
        ("6", "4", None, 6),
        ("6", "4", 3, 3),
        ("1", "99", None, 1),
    ],
)
def test_threads_share_the_cores(monkeypatch, wished, processes, setting, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", wished)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert threads(ParallelConfig(threads=setting), cores=16) == expected
