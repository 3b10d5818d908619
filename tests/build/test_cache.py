"""If this fails, processes compile a kernel twice, wait forever, or load half a library. The cache
makes an entry once and whole, also if locks fail. A script stands in for nvcc."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from filelock import FileLock

from ringfa3.build import cache
from ringfa3.build.compile import ensure_library, find_library, library_stem
from ringfa3.build.units import UNITS
from ringfa3.errors import BuildError
from tests.support import fake_tools
from tests.support.fake_tools import (
    WAIT_FOR_GO,
    WITHOUT_PYTORCH,
    runs,
    start,
    start_build,
    until,
)

NAME = UNITS[0].name


def working_folders(tools: Path, task: str = "*") -> list[Path]:
    """Folders of entries in the making, and of ninja."""
    return list((tools / "cache").glob(f".{task}@*"))


def unfinished(tools: Path, host: str, pid: int, task: str = NAME, age: float = 0.0) -> Path:
    """The working folder of another process."""
    folder = cache.cache_folder() / f".{task}@{host}@{pid}@abcdefgh"
    (folder / "entry").mkdir(parents=True)
    (folder / cache.BEGAN).touch()
    then = time.time() - age
    os.utime(folder / cache.BEGAN, (then, then))
    return folder


def a_dead_pid() -> int:
    process = start("pass")
    process.communicate()
    return process.pid


def test_eight_processes_build_once(tools: Path) -> None:
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    processes = [start_build() for _ in range(8)]
    until(lambda: runs(tools))
    (tools / "go").touch()
    said = [p.communicate() for p in processes]
    assert [p.returncode for p in processes] == [0] * 8
    assert runs(tools) == 1
    assert len({out for out, _ in said}) == 1
    lines = [line for _, errors in said for line in errors.splitlines()]
    assert [line.partition(" ")[2].split(",")[0].split(" in ")[0] for line in lines] == [
        f"compiling {NAME}",
        f"compiled {NAME}",
    ]


def test_a_waiting_process_names_the_maker(tools: Path) -> None:
    """Once every NOTICE; then it takes the maker's library."""
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    maker = start_build()
    until(lambda: runs(tools))
    waiter = start_build("from ringfa3.build import cache; cache.NOTICE = 0.05")
    assert waiter.stderr is not None
    lines = [waiter.stderr.readline() for _ in range(2)]
    (tools / "go").touch()
    who = f"process {maker.pid} on {socket.gethostname()} has been building it for"
    for line in lines:
        assert re.fullmatch(rf"ringfa3: waiting for {NAME}: {re.escape(who)} \d+ s\n", line)
    assert len({p.communicate()[0] for p in (maker, waiter)}) == 1
    assert runs(tools) == 1


BUILD_TWO = f"""{WITHOUT_PYTORCH}
{{before}}
from ringfa3.build.compile import _make
from ringfa3.build.units import UNITS
_make(UNITS[:2], 1)
"""


def test_a_unit_serves_others_before_its_maker_has_built_the_rest(tools: Path) -> None:
    """The maker holds the lock of the second unit alone, and lives: nobody builds that again."""
    second = '[ "$(wc -l < {0}/log)" = 2 ] && {{ {1}; }}'
    fake_tools.link(tools / "host", "wc")
    fake_tools.nvcc(tools, body=second.format(tools, WAIT_FOR_GO.format(tools)))
    maker = start(BUILD_TWO.format(before=""))
    until(lambda: runs(tools) == 2)
    assert start_build().communicate()[1] == ""  # takes the first, does not wait
    with FileLock(cache.cache_folder() / f"{NAME}.lock", timeout=0):
        assert len(working_folders(tools, UNITS[1].name)) == 1
    (tools / "go").touch()
    maker.communicate()
    assert maker.returncode == 0
    assert runs(tools) == 2
    assert working_folders(tools) == []


def test_a_unit_in_the_queue_of_its_maker_is_not_built_twice(tools: Path) -> None:
    """While the maker builds others it gives a sign of life, also after PATIENCE."""
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    maker = start(BUILD_TWO.format(before="from ringfa3.build import ninja; ninja.NOTICE = 0.1"))
    until(lambda: runs(tools))
    hasty = "from ringfa3.build import cache; cache.NOTICE, cache.PATIENCE = 0.4, 1.0"
    waiter = start(BUILD_TWO.format(before=hasty).replace("[:2]", "[1:2]"))
    assert waiter.stderr is not None
    lines = [waiter.stderr.readline() for _ in range(5)]
    who = f"process {maker.pid} on {socket.gethostname()} has it in its queue"
    assert lines == [f"ringfa3: waiting for {UNITS[1].name}: {who}\n"] * 5
    (tools / "go").touch()
    for process in (maker, waiter):
        process.communicate()
        assert process.returncode == 0
    assert runs(tools) == 2


def test_a_process_builds_what_is_free_before_it_waits(tools: Path) -> None:
    """Another builds the first unit; a process that needs two does not let the second one lie."""
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    maker = start_build()
    until(lambda: runs(tools) == 1)
    other = start(BUILD_TWO.format(before=""))
    until(lambda: runs(tools) == 2)
    assert len(working_folders(tools, NAME)) == len(working_folders(tools, UNITS[1].name)) == 1
    (tools / "go").touch()
    for process in (maker, other):
        process.communicate()
        assert process.returncode == 0
    assert runs(tools) == 2


@pytest.mark.parametrize(("rank", "lines"), [(None, 2), ("0", 2), ("1", 2), ("2", 0), ("7", 0)])
def test_only_two_ranks_of_a_host_print(
    tools: Path, monkeypatch: pytest.MonkeyPatch, rank: str | None, lines: int
) -> None:
    """One of the two waits for sure; the others print nothing."""
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(cache, "NOTICE", 0.05)
    said: list[str] = []
    monkeypatch.setattr(cache, "log_line", said.append)
    unfinished(tools, "elsewhere", 1)
    answers = iter([None, None, tools, tools])
    with FileLock(cache.cache_folder() / f"{NAME}.lock"):
        assert cache.make_once(NAME, "entry", lambda: next(answers), lambda _: None) == tools
    assert len(said) == lines


def test_a_killed_build_starts_again_and_its_folder_goes(tools: Path) -> None:
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    killed = start_build()
    until(lambda: runs(tools))
    os.kill(killed.pid, signal.SIGKILL)  # its nvcc goes on
    killed.wait()
    assert len(working_folders(tools, NAME)) == 1
    assert find_library(UNITS[0]) is None
    fake_tools.nvcc(tools)
    assert ensure_library(UNITS[0]).read_text() == "library\n"
    assert working_folders(tools, NAME) == []
    os.killpg(killed.pid, signal.SIGKILL)


def test_a_build_that_fails_leaves_nothing(tools: Path) -> None:
    fake_tools.nvcc(tools, body="echo no such instruction >&2; exit 1")
    with pytest.raises(BuildError, match="no such instruction"):
        ensure_library(UNITS[0])
    assert working_folders(tools) == []
    assert find_library(UNITS[0]) is None


def test_waiting_processes_fail_with_the_maker(tools: Path) -> None:
    """They do not try in turn. A process that starts later does."""
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools) + "; echo no room >&2; exit 1")
    hasty = "from ringfa3.build import cache; cache.NOTICE = 0.05"
    maker = start_build()
    until(lambda: runs(tools))
    waiters = [start_build(hasty) for _ in range(3)]
    for waiter in waiters:
        assert waiter.stderr is not None
        assert "waiting for" in waiter.stderr.readline()
    (tools / "go").touch()
    for process in (maker, *waiters):
        assert process.communicate()[1].endswith("nvcc exited with 1:\nno room\n")
        assert process.returncode == 1
    assert runs(tools) == 1
    with pytest.raises(BuildError, match="no room"):
        ensure_library(UNITS[0])
    assert runs(tools) == 2
    fake_tools.nvcc(tools)
    ensure_library(UNITS[0])
    assert not list((tools / "cache").glob("*.failed"))


def test_the_failure_of_another_entry_does_not_count(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same unit, from other sources."""
    monkeypatch.setattr(time, "time", lambda: 0.0)  # as if it failed while we waited
    failure = cache.cache_folder() / f"{NAME}.failed"
    failure.write_text("another\nno room")
    assert ensure_library(UNITS[0]).is_file()
    assert not failure.exists()


@pytest.mark.parametrize("lock", ["refused", "lost"])
def test_without_locks_two_builds_do_no_harm(tools: Path, lock: str) -> None:
    """As on network folders: flock fails, or two hosts hold it at once."""
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    does = {"refused": "raise OSError(37, 'No locks available')", "lost": "pass"}[lock]
    broken = f"import filelock\ndef acquire(*_, **__): {does}\nfilelock.FileLock.acquire = acquire"
    processes = [start_build(broken) for _ in range(2)]
    until(lambda: runs(tools) == 2)
    assert len(working_folders(tools, NAME)) == 2
    (tools / "go").touch()
    said = [p.communicate() for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    assert len({out for out, _ in said}) == 1
    assert len(list((tools / "cache").glob(f"{NAME}-*/kernel.so"))) == 1
    assert working_folders(tools) == []


def test_a_lock_without_a_maker_stops_nobody(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead host's lock, or a file system that grants none."""
    monkeypatch.setattr(cache, "NOTICE", 0.05)
    with FileLock(cache.cache_folder() / f"{NAME}.lock"):
        assert ensure_library(UNITS[0]).is_file()


def test_a_stuck_maker_stops_nobody(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "NOTICE", 0.05)
    stuck = unfinished(tools, "elsewhere", 1, age=cache.PATIENCE + 10)
    with FileLock(cache.cache_folder() / f"{NAME}.lock"):
        assert ensure_library(UNITS[0]).is_file()
    assert working_folders(tools) == [stuck]


def test_an_entry_that_appears_during_the_wait_counts(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host adds it to a shared folder, without our lock."""
    monkeypatch.setattr(cache, "NOTICE", 0.05)
    unfinished(tools, "elsewhere", 1)
    entry = cache.cache_folder() / f"{library_stem(UNITS[0])}-12345678"

    def appear(line: str) -> None:
        assert line.startswith(f"waiting for {NAME}: process 1 on elsewhere has been building it")
        entry.mkdir(exist_ok=True)
        (entry / "kernel.so").touch()

    monkeypatch.setattr(cache, "log_line", appear)
    with FileLock(cache.cache_folder() / f"{NAME}.lock"):
        assert ensure_library(UNITS[0]) == entry / "kernel.so"
    assert runs(tools) == 0


def test_only_folders_of_dead_makers_are_removed(tools: Path) -> None:
    here, dead = socket.gethostname(), a_dead_pid()
    gone = [
        unfinished(tools, here, dead),
        unfinished(tools, "elsewhere", 1, age=cache.STALE + 10),
        unfinished(tools, here, os.getpid(), task="another", age=cache.STALE + 10),
    ]
    kept = [
        unfinished(tools, here, os.getpid()),
        unfinished(tools, "elsewhere", dead),
        unfinished(tools, here, dead, task="another"),  # whose lock we do not hold
    ]
    ensure_library(UNITS[0])
    assert not any(folder.exists() for folder in gone)
    assert sorted(working_folders(tools)) == sorted(kept)


def test_a_damaged_entry_does_not_stop_a_build(tools: Path) -> None:
    first = ensure_library(UNITS[0])
    first.rename(first.with_name("lost"))
    second = ensure_library(UNITS[0])
    assert second.parent != first.parent
    assert ensure_library(UNITS[0]) == second
    assert runs(tools) == 2


def test_the_folder_belongs_to_the_user_alone(tools: Path) -> None:
    assert cache.cache_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_raises(tools: Path, mode: int) -> None:
    built = ensure_library(UNITS[0])
    os.chmod(tools / "cache", mode)
    with pytest.raises(BuildError, match="can be written by others: chmod 700"):
        ensure_library(UNITS[0])
    assert built.is_file()
