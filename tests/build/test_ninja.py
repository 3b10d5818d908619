"""If this fails, an interrupted build leaves compilers running, or reports no cause. ninja and the
compilers that it runs: interrupts, errors and what they leave behind."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from filelock import FileLock

from ringfa3.build.__main__ import main
from ringfa3.build.compile import ensure_library, find_library
from ringfa3.build.units import UNITS
from ringfa3.errors import BuildError
from tests.support import fake_tools
from tests.support.fake_tools import BUILD_ONE, WAIT_FOR_GO, WITHOUT_PYTORCH, runs, start, until


@pytest.mark.parametrize("compiles_too", [True, False])
def test_an_interrupted_build_starts_no_further_unit(tools: Path, compiles_too: bool) -> None:
    """Control-C reaches nvcc too, `kill -INT` does not. No working folder stays."""
    fake_tools.nvcc(tools, body=WAIT_FOR_GO.format(tools))
    running = start(
        f"{WITHOUT_PYTORCH}\nfrom ringfa3.build.__main__ import main; main(['-j', '2'])"
    )
    until(lambda: runs(tools) == 2)
    (os.killpg if compiles_too else os.kill)(running.pid, signal.SIGINT)
    assert running.stderr is not None
    assert any("stopping the compilers" in line for line in running.stderr)
    (tools / "go").touch()
    _, said = running.communicate()
    assert running.returncode == 130
    assert "Traceback" not in said
    assert runs(tools) == 2
    assert not list((tools / "cache").glob(".*@*"))


def test_an_interrupted_build_ends_after_its_compilers(tools: Path) -> None:
    """ninja stops them and waits: here a compiler needs a second. The lock is free then."""
    ends = "trap 'sleep 1; echo > {0}/ended; exit 1' INT; "
    fake_tools.nvcc(tools, body=(ends + WAIT_FOR_GO).format(tools))
    running = start(BUILD_ONE.format(before=""))
    until(lambda: runs(tools))
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() != 0
    assert (tools / "ended").exists()
    assert not list((tools / "cache").glob(".*@*"))
    assert find_library(UNITS[0]) is None
    with FileLock(tools / "cache" / f"{UNITS[0].name}.lock", timeout=0):
        pass


def test_an_error_of_the_disk_stops_the_compilers(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first unit cannot be written: the second one, which compiles by then, is stopped."""

    def fail(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    late = 'case "$arguments" in *HEAD_DIM=64*) ;; *) sleep 60; echo > {0}/late;; esac'
    fake_tools.nvcc(tools, body=late.format(tools))
    with pytest.raises(SystemExit, match="No space left on device"):
        main(["--units", "forward-d64-bf16", "forward-d128-bf16", "forward-d256-bf16", "-j", "1"])
    assert not (tools / "late").exists()
    assert not list((tools / "cache").glob(".*@*"))


def test_a_compiler_that_loses_a_signal_is_stopped(tools: Path) -> None:
    """As one does whose shell forks when the signal comes."""
    loses = "trap 'trap - INT; echo > {0}/lost' INT; echo > {0}/ready; n=0; "
    waits = "while [ $n -lt 300 ]; do sleep 0.1; n=$((n + 1)); done; echo > {0}/late"
    fake_tools.nvcc(tools, body=(loses + waits).format(tools))
    running = start(BUILD_ONE.format(before=""))
    until(lambda: (tools / "ready").exists())
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() != 0
    assert (tools / "lost").exists()
    assert not (tools / "late").exists()


@pytest.mark.parametrize("writes", ["", ": > code; "])
def test_a_compiler_without_an_exit_code(tools: Path, writes: str) -> None:
    """Something kills the shell that runs it, or the disk has no room for the code."""
    fake_tools.nvcc(tools, body=f"echo began >&2; {writes}kill -9 $PPID; exit")
    with pytest.raises(BuildError, match=r"(?s)no exit code: .* -j 1 or MAX_JOBS=1\nbegan$"):
        ensure_library(UNITS[0])
    assert not list((tools / "cache").glob(".*@*"))


def test_what_ninja_prints_is_in_the_error(tools: Path) -> None:
    """ninja itself fails: its last 20 lines."""
    ninja = tools / "host" / "ninja"
    ninja.unlink(missing_ok=True)
    fake_tools.script(ninja, "seq 1 30; echo 'ninja: error: no room'; exit 3")
    fake_tools.link(tools / "host", "seq")
    with pytest.raises(BuildError, match="ninja exited with 3, before forward-d64") as raised:
        ensure_library(UNITS[0])
    assert str(raised.value).splitlines()[1:] == [*map(str, range(12, 31)), "ninja: error: no room"]
