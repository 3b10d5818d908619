"""If this fails, a job is killed for host memory that it was promised. Host memory, in folders that
show a machine and its control groups."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from train.config import Config, ConfigError
from train.estimate.host_memory import host_memory
from train.estimate.job import Job
from train.estimate.prediction import limits_of

V1, V2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"
TOTAL = 9000 << 10
NONE = 9223372036854771712  # how version 1 writes no limit


def machine(root: Path, groups: str, limits: dict[str, object]) -> Path:
    """A root folder with 9,000 KiB, the groups of a process and files with limits."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:     9000 kB\nMemFree:      10 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, limit in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b\n", {}, TOTAL),
        ("0::/a/b\n", {f"{V2}a/b/memory.max": 7000, f"{V2}a/memory.max": "max"}, 7000),
        ("0::/a/b\n", {f"{V2}a/b/memory.max": "max", f"{V2}a/memory.max": 5000}, 5000),
        ("0::/a/b\n", {f"{V2}a/b/memory.max": 7000, f"{V2}a/memory.max": 5000}, 5000),
        ("0::/a\n", {f"{V2}a/memory.max": TOTAL + 1, f"{V2}b/memory.max": 1}, TOTAL),
        ("0::/\n", {f"{V2}memory.max": 6000}, 6000),
        ("0::/outside\n", {f"{V2}memory.max": 6000}, 6000),
        ("4:memory:/a\n0::/\n", {f"{V1}a/memory.limit_in_bytes": 4000}, 4000),
        (
            "9:cpu:/b\n4:memory:/a/b\n0::/\n",
            {f"{V1}a/b/memory.limit_in_bytes": NONE, f"{V1}memory.limit_in_bytes": 3000},
            3000,
        ),
        ("4:memory:/a\n", {f"{V1}a/memory.limit_in_bytes": NONE}, TOTAL),
    ],
)
def test_the_tightest_group_around_the_process_limits_its_memory(
    tmp_path, groups, limits, expected
):
    assert host_memory(machine(tmp_path, groups, limits)) == expected


def test_a_system_without_groups_has_its_memory(tmp_path):
    (machine(tmp_path, "", {}) / "proc/self/cgroup").unlink()
    assert host_memory(tmp_path) == TOTAL


def test_a_machine_that_tells_no_size_needs_a_setting(tmp_path):
    (machine(tmp_path, "", {}) / "proc/meminfo").write_text("MemFree: 10 kB\n")
    with pytest.raises(ConfigError, match=r"has no MemTotal; give hardware\.host_gb"):
        host_memory(tmp_path)


def test_a_setting_goes_before_the_memory_of_this_machine():
    """This machine's memory limits a job that runs here, and no other one."""
    jobs = [Job(Config(), 1, 1, 300, [0, 128], here) for here in (True, False)]
    assert [limits_of(job).host for job in jobs] == [host_memory(), math.inf]
    for job in jobs:
        job.config.hardware.host_gb = 5.0
        assert limits_of(job).host == 5e9
