"""Compiles the CUDA kernels: one shared library per unit, once, outside import.

A unit is (direction, dtype, head dim). Its library lies in a folder of the user's cache that is
named by the hashes of sources and flags, and of the tools. It is built in a temporary folder under
a lock and renamed, so that a killed build leaves nothing behind and many processes build once.

``python -m ringfa3.build`` builds all units ahead of time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

OLDEST_NVCC = (13, 1)  # 13.0.88 is reported to miscompile some wgmma kernels
FLAGS = (
    "-std=c++20",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-DNDEBUG",  # the call in a failed assert would serialise every wgmma
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-Xcompiler=-fPIC",
    "-shared",
    "-cudart=static",
)
ELEMENTS = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t"}


class BuildError(RuntimeError):
    """A kernel cannot be compiled here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Unit:
    """One library: a direction, a dtype and a head dim, with its tile shape.

    tile_n     keys of a block
    consumers  warpgroups of 64 query rows each
    """

    direction: str
    dtype: str
    head_dim: int
    tile_n: int
    consumers: int

    @property
    def name(self) -> str:
        return f"{self.direction}_{self.dtype}_d{self.head_dim}"

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DRINGFA3_ELEMENT={ELEMENTS[self.dtype]}",
            f"-DRINGFA3_HEAD_DIM={self.head_dim}",
            f"-DRINGFA3_TILE_N={self.tile_n}",
            f"-DRINGFA3_CONSUMERS={self.consumers}",
        )


UNITS = tuple(
    Unit("forward", dtype, head_dim, tile_n, consumers)
    for dtype in ELEMENTS
    for head_dim, tile_n, consumers in ((64, 128, 3), (128, 128, 2), (256, 80, 2))
)


def sources() -> Path:
    """The folder of the kernels' sources, in a wheel or in a checkout."""
    here = Path(__file__).parent
    return here / "csrc" if (here / "csrc").is_dir() else here.parent / "csrc"


def _candidates() -> Iterator[Path]:
    """Where an nvcc may be: CUDA_HOME, PATH, the nvidia-cuda-nvcc wheel."""
    if "CUDA_HOME" in os.environ:
        yield Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        yield Path(folder) / "cu13" / "bin" / "nvcc"


@lru_cache(1)
def compiler() -> tuple[Path, str]:
    """(nvcc, its version). Raises BuildError where none is recent enough."""
    seen = []
    for nvcc in _candidates():
        if not nvcc.is_file():
            continue
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"V(\d+)\.(\d+)\.\d+", said.stdout)
        if version and (int(version[1]), int(version[2])) >= OLDEST_NVCC:
            return nvcc, version[0]
        seen.append(f"{nvcc} ({version[0] if version else 'unknown version'})")
    raise BuildError(
        "nvcc 13.1 or later is needed"
        + (f", found {', '.join(seen)}" if seen else ", none was found")
        + ": pip install 'ringfa3[build]', or set CUDA_HOME"
    )


def cutlass() -> Path:
    """CUTLASS's headers. Raises BuildError where they are not to be found."""
    if "CUTLASS_PATH" in os.environ:
        include = Path(os.environ["CUTLASS_PATH"]) / "include"
    else:
        spec = importlib.util.find_spec("cutlass_library")
        origin = Path(spec.origin).parent if spec and spec.origin else Path()
        include = origin / "source" / "include"
    if not (include / "cute" / "tensor.hpp").is_file():
        raise BuildError(
            "CUTLASS's headers were not found: pip install nvidia-cutlass, or set CUTLASS_PATH to "
            "a checkout of CUTLASS"
        )
    return include


def cache() -> Path:
    """The user's own folder for libraries: $RINGFA3_CACHE, else ~/.cache/ringfa3/kernels.

    Raises BuildError if others can write to it: what lies there is loaded and run.
    """
    folder = Path(os.environ.get("RINGFA3_CACHE", "~/.cache/ringfa3/kernels")).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by others: chmod 700 it, or set RINGFA3_CACHE")
    return folder


def library(unit: Unit) -> Path:
    """The compiled library of a unit, built first if the cache does not have it.

    A library that was built from the same sources with the same flags is taken whatever compiled
    it, so a machine without a compiler can run what another one has built.

    Raises BuildError: no compiler, no headers, or the compiler's own error.
    """
    source = hashlib.sha256(repr((unit, FLAGS)).encode())
    for path in sorted(sources().iterdir()):
        source.update(path.name.encode() + path.read_bytes())
    stem = f"{unit.name}-{source.hexdigest()[:16]}"
    folder = cache()
    if found := _built(folder, stem):
        return found
    nvcc, version = compiler()
    include = cutlass()
    tools = hashlib.sha256(version.encode() + (include / "cutlass" / "version.h").read_bytes())
    from filelock import FileLock  # needed only to build

    with FileLock(folder / f"{stem}.lock"):
        if not _built(folder, stem):
            print(f"ringfa3: compiling {unit.name}, about a minute", file=sys.stderr, flush=True)
            _compile(unit, nvcc, include, folder / f"{stem}-{tools.hexdigest()[:8]}")
    built = _built(folder, stem)
    assert built is not None
    return built


def _built(folder: Path, stem: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"{stem}-*/kernel.so"))), None)


def _compile(unit: Unit, nvcc: Path, include: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        built = Path(work) / "built"
        built.mkdir()
        command: list[str | Path] = [
            nvcc,
            *FLAGS,
            *unit.defines,
            f"-I{include}",
            f"-L{nvcc.parent.parent / 'lib'}",
            "-o",
            built / "kernel.so",
            sources() / f"{unit.direction}.cu",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{unit.name} does not compile:\n{done.stderr.strip()[-2000:]}")
        os.rename(built, folder)


def main() -> None:
    """Builds every unit."""
    try:
        for unit in UNITS:
            print(f"{unit.name}: {library(unit)}")
    except BuildError as error:
        sys.exit(f"ringfa3: {error}")


if __name__ == "__main__":
    main()
