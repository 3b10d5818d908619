"""Host memory: that of the machine, or the limit of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from train.config import ConfigError


def host_memory(root: Path = Path("/")) -> float:
    """Bytes of this machine's memory, or of the tightest control group around the process.

    ``root`` contains ``proc`` and ``sys``. Raises ``ConfigError`` if they have no size.
    """
    return min([_machine(root), *_limits(root)])


def _machine(root: Path) -> float:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return 1024.0 * int(line.split()[1])
    raise ConfigError("hardware.host_gb=null: /proc/meminfo has no MemTotal; give hardware.host_gb")


def _limits(root: Path) -> Iterator[float]:
    """The limits of the process's control groups and of all their parents, of versions 1 and 2.

    A container may mount its own group as the root, while /proc gives the path outside of it.
    """
    memberships = root / "proc/self/cgroup"
    if not memberships.exists():
        return
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield _limit(folder / name)


def _limit(file: Path) -> float:
    """The limit in a file; version 2 writes ``max`` for none, version 1 a huge number."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return float("inf")
