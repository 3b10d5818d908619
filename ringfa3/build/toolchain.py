"""The programs that compile the kernels: where they lie, and whether they are recent enough."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ringfa3.errors import BuildError

MIN_VERSION = (13, 1)  # reports say that nvcc 13.0.88 miscompiles some wgmma kernels


def _candidates(program: str) -> Iterator[Path]:
    """Paths at which a program of CUDA may lie: in CUDA_HOME, PATH, NVIDIA's wheels."""
    if "CUDA_HOME" in os.environ:
        yield Path(os.environ["CUDA_HOME"]) / "bin" / program
    on_path = shutil.which(program)
    if on_path:
        yield Path(on_path)
    for folder in wheel_folders():
        yield folder / "bin" / program


def wheel_folders() -> list[Path]:
    """Folders into which NVIDIA's wheels for CUDA 13 unpack: usually one, or none."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(f) / "cu13" for f in (spec.submodule_search_locations or [] if spec else [])]


@lru_cache(None)
def find_program(name: str) -> tuple[Path, str]:
    """(path, version) of the first candidate that is recent enough.

    Raises BuildError: none is; the message names the rejected candidates, and the remedy.
    """
    rejected = []
    for path in _candidates(name):
        if not path.is_file():
            continue
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"V(\d+)\.(\d+)\.\d+", answer.stdout)
        number = (int(version[1]), int(version[2])) if version else (0, 0)
        headers = _headers(path) if name == "nvcc" else None
        text = version[0] if version else "unknown version"
        if number < MIN_VERSION:
            rejected.append(f"{path} ({text})")
        elif headers and headers != number:
            other = ".".join(map(str, headers))
            rejected.append(f"{path} ({text} with headers of CUDA {other})")
        else:
            return path, text
    found = ", ".join(rejected)
    raise BuildError(
        f"{name} {'.'.join(map(str, MIN_VERSION))} or later is needed, "
        + (f"found {found}" if rejected else "none was found in CUDA_HOME, PATH or the wheels")
        + ": pip install 'ringfa3[build]', or set CUDA_HOME to a toolkit that has it"
    )


def _headers(nvcc: Path) -> tuple[int, int] | None:
    """The CUDA version of the headers beside an nvcc, which must be that of the nvcc."""
    api = nvcc.resolve().parent.parent / "include" / "cuda_runtime_api.h"
    if not api.is_file():
        return None
    version = re.search(r"#define CUDART_VERSION\s+(\d+)", api.read_text(errors="replace"))
    return divmod(int(version[1]) // 10, 100) if version else None


def find_compiler() -> tuple[Path, str]:
    """(nvcc, its version). Raises BuildError: nvcc or the C++ compiler that it calls is missing."""
    nvcc = find_program("nvcc")
    find_host_compiler()
    return nvcc


def find_host_compiler() -> str:
    """The C++ compiler that nvcc calls: NVCC_CCBIN, else g++. Raises BuildError: none is there."""
    named = os.environ.get("NVCC_CCBIN", "g++")
    if shutil.which(named) is None and not Path(named).is_dir():
        raise BuildError(
            f"host C++ compiler {named} not found: install it, for example by apt-get install g++, "
            "or set NVCC_CCBIN to another"
        )
    return named


def find_ninja() -> Path:
    """ninja of PATH, else of this environment. Raises BuildError: neither has one."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    if (found := shutil.which("ninja", path=folders)) is None:
        raise BuildError("ninja not found: pip install 'ringfa3[build]', or pip install ninja")
    return Path(found)
