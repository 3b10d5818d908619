"""If this fails, K/V cross hosts although they need not. Which ranks share a host: a wrong answer
sends K/V between hosts that need not cross."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringfa3.planning.context_plan import plan_context
from ringfa3.planning.placement.hosts import find_hosts
from tests.support.ranks import Ranks

TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("hosts", "world", "expected"),
    [
        (None, 3, (0, 0, 0)),
        (1, 3, (0, 0, 0)),
        (2, 4, (0, 0, 1, 1)),
        (4, 4, (0, 1, 2, 3)),
        ([7, 7, 3, 7], 4, (0, 0, 1, 0)),
        (np.arange(4) // 2, 4, (0, 0, 1, 1)),
        (torch.tensor([5, 1, 5]), 3, (0, 1, 0)),
    ],
)
def test_hosts_are_numbered_in_the_order_of_ranks(
    hosts: Any, world: int, expected: tuple[int, ...]
) -> None:
    assert find_hosts(hosts, world, None) == expected
    assert plan_context(64, (0, world), hosts=hosts).hosts == expected


@pytest.mark.parametrize(
    ("hosts", "error", "message"),
    [
        (3, ValueError, r"hosts=3: it must divide 4 ranks"),
        (0, ValueError, r"hosts=0: it must divide"),
        ([0, 1], ValueError, r"hosts has 2 ranks, the group 4"),
        ("two", TypeError, "hosts"),
        (1.5, TypeError, "hosts"),
        (np.ones(4), TypeError, r"hosts=\(1.0, 1.0, 1.0, 1.0\): give a sequence of whole numbers"),
    ],
)
def test_other_hosts_are_refused(hosts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_context(64, (0, 4), hosts=hosts)


def test_a_variable_of_the_job_says_nothing_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFA3_HOSTS", "3")
    assert plan_context(64, (0, 4)).hosts == (0, 0, 0, 0)
    assert plan_context(64, (0, 1)).hosts == (0,)


def test_plans_of_other_hosts_differ() -> None:
    """So ranks that disagree are named before they exchange anything."""
    one, two = (plan_context([0, 100, 900], (0, 4), hosts=hosts) for hosts in (1, 2))
    assert one.digest != two.digest
    assert two.with_window((8, 0)).hosts == two.contiguous.hosts == two.hosts


def _hosts(group: dist.ProcessGroup) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with pytest.MonkeyPatch.context() as patch:
        assert plan_context(64, group).hosts == (0,) * world
        with warnings.catch_warnings(action="error"):  # unknown hosts
            plan_context(64, (rank, world), hosts=2).bound_to(group)
        for name, value in TORCHRUN.items():
            patch.setenv(name, value)
        assert plan_context(64, group).hosts == (0, 0, 1, 1)
        with warnings.catch_warnings(action="error"):
            plan_context([0, 9, 64], (rank, world), hosts=2).bound_to(group)
        for cu in (64, [0, 9, 64]):
            with pytest.warns(UserWarning, match=r"give .*\(\.\.\., hosts=\(0, 0, 1, 1\)\)"):
                plan_context(cu, (rank, world)).bound_to(group)
        patch.setenv("GROUP_WORLD_SIZE", "3")  # hosts of unequal size
        assert plan_context(64, group).hosts == (0,) * world
        with warnings.catch_warnings(action="error"):
            plan_context(64, (rank, world), hosts=(0, 0, 0, 1)).bound_to(group)
        patch.setenv("RINGFA3_HOSTS", str(dist.get_world_size()))
        assert plan_context(64, group).hosts == (0, 1, 2, 3)
        for wrong in ("3", "two", "-1"):
            patch.setenv("RINGFA3_HOSTS", wrong)
            with pytest.raises(ValueError, match=f"RINGFA3_HOSTS={wrong}: it must divide 4 ranks"):
                plan_context(64, group)


def test_torchruns_variables_name_the_hosts_of_a_group(ranks: Ranks) -> None:
    ranks.run(4, _hosts)
