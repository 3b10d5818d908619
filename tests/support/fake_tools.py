"""Shell scripts that replace CUDA's programs: they answer --version and log their runs."""

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
WAIT_FOR_GO = (  # ends after a minute, so that a failed test leaves no process
    'n=0; while [ ! -e "{0}/go" ] && [ $n -lt 1200 ]; do n=$((n + 1)); sleep 0.05; done'
)
# Makes ringfa3.build importable without PyTorch, whose import would take most of a process's time:
# an empty module replaces the package ringfa3.
WITHOUT_PYTORCH = f"""
import sys, types
package = sys.modules["ringfa3"] = types.ModuleType("ringfa3")
package.__path__ = [{str(Path(toolchain.__file__).parents[1])!r}]
"""
BUILD_ONE = f"""{WITHOUT_PYTORCH}
{{before}}
from ringfa3.build.compile import ensure_library
from ringfa3.build.units import UNITS
print(ensure_library(UNITS[0]))
"""


def nvcc(folder: Path, version: str = "13.2.5", body: str = ":") -> Path:
    """Writes FOLDER/bin/nvcc. `body` runs at each compilation; $arguments holds its arguments."""
    path = script(folder / "bin" / "nvcc", "")
    path.write_text(NVCC.format(version=version, log=folder / "log", body=body))
    toolchain.find_program.cache_clear()
    return path


def script(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def cutlass(folder: Path) -> Path:
    """Makes FOLDER/include with the two headers that identify CUTLASS."""
    for name in ("cute/tensor.hpp", "cutlass/version.h"):
        (folder / "include" / name).parent.mkdir(parents=True)
        (folder / "include" / name).touch()
    return folder


def host(folder: Path) -> Path:
    """Makes a folder for PATH with a C++ compiler and the programs of the scripts, without nvcc."""
    script(folder / "g++", "")
    for name in ("sleep", "mkdir", "rmdir"):
        link(folder, name)
    if shutil.which("ninja", path=os.defpath):  # else that of this environment serves
        link(folder, "ninja")
    return folder


def link(folder: Path, name: str) -> None:
    """Links a program of this machine into a folder for PATH."""
    found = shutil.which(name, path=os.defpath)
    assert found is not None
    (folder / name).symlink_to(found)


def runs(folder: Path) -> int:
    """The number of compilations by FOLDER/bin/nvcc."""
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(code: str, **more: object) -> subprocess.Popen[str]:
    """Starts a Python process in a session of its own, with pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, start_new_session=True, **pipes, **more)  # type: ignore[call-overload]


def start_build(before: str = "") -> subprocess.Popen[str]:
    """Starts a process that runs `before` and builds the first unit; it prints the library."""
    return start(BUILD_ONE.format(before=before))


def until(happens: Callable[[], object]) -> None:
    """Waits until `happens()` is true; the test's timeout limits the wait."""
    while not happens():
        time.sleep(0.02)
