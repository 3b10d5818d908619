"""The programs that compile the kernels: where they are, and whether they are recent enough."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ringfa3.errors import BuildError

OLDEST = (13, 1)  # of CUDA's programs: nvcc 13.0.88 is reported to miscompile some wgmma kernels


def _places(program: str) -> Iterator[Path]:
    """Where a program of CUDA may be: CUDA_HOME, PATH, NVIDIA's wheels."""
    if "CUDA_HOME" in os.environ:
        yield Path(os.environ["CUDA_HOME"]) / "bin" / program
    on_path = shutil.which(program)
    if on_path:
        yield Path(on_path)
    for folder in wheels():
        yield folder / "bin" / program


def wheels() -> list[Path]:
    """Where NVIDIA's wheels for CUDA 13 unpack their files; usually one folder, or none."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(f) / "cu13" for f in (spec.submodule_search_locations or [] if spec else [])]


@lru_cache(None)
def program(name: str) -> tuple[Path, str]:
    """(path, version) of the first one that will do: one that will not hides no later one.

    Raises BuildError: none will; it names those that were found, and the remedy.
    """
    refused = []
    for path in _places(name):
        if not path.is_file():
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"V(\d+)\.(\d+)\.\d+", said.stdout)
        number = (int(version[1]), int(version[2])) if version else (0, 0)
        headers = _headers(path) if name == "nvcc" else None
        what = version[0] if version else "unknown version"
        if number < OLDEST:
            refused.append(f"{path} ({what})")
        elif headers and headers != number:
            other = ".".join(map(str, headers))
            refused.append(f"{path} ({what} beside the headers of CUDA {other})")
        else:
            return path, what
    found = ", ".join(refused)
    raise BuildError(
        f"{name} {'.'.join(map(str, OLDEST))} or later is needed, "
        + (f"found {found}" if refused else "none was found in CUDA_HOME, PATH or the wheels")
        + ": pip install 'ringfa3[build]', or set CUDA_HOME to a toolkit that has it"
    )


def _headers(nvcc: Path) -> tuple[int, int] | None:
    """The CUDA version of the headers beside an nvcc; they refuse the nvcc of another."""
    api = nvcc.resolve().parent.parent / "include" / "cuda_runtime_api.h"
    if not api.is_file():
        return None
    version = re.search(r"#define CUDART_VERSION\s+(\d+)", api.read_text(errors="replace"))
    return divmod(int(version[1]) // 10, 100) if version else None


def compiler() -> tuple[Path, str]:
    """(nvcc, its version). Raises BuildError where it or the C++ compiler it calls is missing."""
    found = program("nvcc")
    host_compiler()
    return found


def host_compiler() -> str:
    """The C++ compiler that nvcc calls: NVCC_CCBIN, else g++. Raises BuildError without one."""
    named = os.environ.get("NVCC_CCBIN", "g++")
    if shutil.which(named) is None and not Path(named).is_dir():
        raise BuildError(
            f"{named}, the C++ compiler that nvcc calls, is not to be found: install it (Debian, "
            "Ubuntu: apt-get install g++), or set NVCC_CCBIN to another"
        )
    return named
