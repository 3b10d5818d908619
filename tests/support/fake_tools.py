"""Scripts that stand in for CUDA's programs: they answer --version, and log their runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ringfa3.build import toolchain

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release, V{version}"; exit; fi
echo run >> "{log}"
arguments="$*"
{body}
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""
WAIT_FOR_GO = (  # or a minute, so that a test that fails leaves nothing running
    'n=0; while [ ! -e "{0}/go" ] && [ $n -lt 1200 ]; do n=$((n + 1)); sleep 0.05; done'
)
BUILD_ONE = (
    "from ringfa3.build.compile import ensure_library; from ringfa3.build.units import UNITS; "
    "print(ensure_library(UNITS[0]))"
)


def nvcc(folder: Path, version: str = "13.2.5", body: str = ":") -> Path:
    """FOLDER/bin/nvcc. `body` runs in a compile, whose arguments are in $arguments."""
    path = script(folder / "bin" / "nvcc", "")
    path.write_text(NVCC.format(version=version, log=folder / "log", body=body))
    toolchain.find_program.cache_clear()
    return path


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def cutlass(folder: Path) -> Path:
    """FOLDER/include with the two headers that are looked for."""
    for name in ("cute/tensor.hpp", "cutlass/version.h"):
        (folder / "include" / name).parent.mkdir(parents=True)
        (folder / "include" / name).touch()
    return folder


def host(folder: Path) -> Path:
    """A folder for PATH that has a C++ compiler, and what the scripts call, and no nvcc."""
    script(folder / "g++", "")
    for name in ("sleep", "mkdir", "rmdir"):
        link(folder, name)
    return folder


def link(folder: Path, name: str) -> None:
    """A program of the machine, in a folder for PATH."""
    found = shutil.which(name, path=os.defpath)
    assert found is not None
    (folder / name).symlink_to(found)


def runs(folder: Path) -> int:
    """How often FOLDER/bin/nvcc has compiled."""
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(code: str, **more: object) -> subprocess.Popen[str]:
    """A Python process of its own session, with pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, start_new_session=True, **pipes, **more)  # type: ignore[call-overload]


def until(happens: Callable[[], object]) -> None:
    """Waits; a test that waits in vain is ended by its timeout."""
    while not happens():
        time.sleep(0.02)
