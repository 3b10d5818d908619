"""Compiles the CUDA kernels: one shared library per unit, once, outside import.

A unit is (direction, dtype, head dim). Its library is an entry of the cache, named by the hashes
of sources and flags, and of the tools.

``python -m ringfa3.build`` builds units ahead of time, ``--check`` judges their machine code.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ringfa3.build import sass
from ringfa3.build.cache import NOTICE, cache, once, say
from ringfa3.build.cutlass import cutlass
from ringfa3.build.toolchain import compiler
from ringfa3.errors import BuildError

FLAGS = (
    "-std=c++20",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-DNDEBUG",  # the call in a failed assert would serialise every wgmma
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-Xptxas=-v",  # its remarks are kept beside the library
    "-Xcompiler=-fPIC",
    "-shared",
    "-cudart=static",
)
ELEMENTS = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t"}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
# Kernels of the benchmark's ablation, never of the product: the part that each one lacks.
VARIANTS = {
    "without-overlap": "-DRINGFA3_WITHOUT_OVERLAP",  # softmax beside the products of its warpgroup
    "without-ping-pong": "-DRINGFA3_WITHOUT_PING_PONG",  # turns of the warpgroups
    "without-specialisation": "-DRINGFA3_UNSPECIALISED",  # warps that only load
}
SECONDS = 40  # that a unit takes to compile, about
JOB_BYTES = 6 << 30  # of memory that a compile may take


@dataclass(frozen=True)
class Unit:
    """One library: a direction, a dtype and a head dim, with its tile shape.

    tile_m   query rows: of a tile forward, of a block backward
    tile_n   keys: of a block forward, of a tile backward
    variant  one of `VARIANTS`, or empty: the product
    """

    direction: str
    dtype: str
    head_dim: int
    tile_m: int
    tile_n: int
    variant: str = ""

    @property
    def name(self) -> str:
        parts = (self.direction, f"d{self.head_dim}", SHORT[self.dtype], self.variant)
        return "-".join(filter(None, parts))

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DRINGFA3_ELEMENT={ELEMENTS[self.dtype]}",
            f"-DRINGFA3_HEAD_DIM={self.head_dim}",
            f"-DRINGFA3_TILE_M={self.tile_m}",
            f"-DRINGFA3_TILE_N={self.tile_n}",
            *((VARIANTS[self.variant],) if self.variant else ()),
        )


SHAPES = (  # (direction, head_dim, tile_m, tile_n)
    ("forward", 64, 192, 128),
    ("forward", 128, 128, 128),
    ("forward", 256, 128, 80),
    ("backward", 64, 128, 128),
    ("backward", 128, 64, 128),
    ("backward", 256, 64, 64),
)
UNITS = tuple(
    Unit(direction, dtype, head_dim, tile_m, tile_n)
    for dtype in ELEMENTS
    for direction, head_dim, tile_m, tile_n in SHAPES
)


def sources() -> Path:
    """The folder of the kernels' sources, in a wheel or in a checkout."""
    here = Path(__file__).parent.parent  # ringfa3/
    return here / "csrc" if (here / "csrc").is_dir() else here.parent / "csrc"


def ablation() -> Path:
    """The folder of the variants' sources, in a checkout; a wheel does not have it."""
    return Path(__file__).parents[2] / "benchmarks" / "ablation"


def folder_of(unit: Unit) -> Path:
    """The folder with the file that a unit compiles, `DIRECTION.cu`.

    Raises BuildError: the unit is a variant, and this installation has no ablation.
    """
    if not unit.variant:
        return sources()
    if not ablation().is_dir():
        raise BuildError(
            f"{unit.name} is a kernel of the benchmark, and {ablation()} does not exist: run it "
            "from a checkout of the repository"
        )
    return ablation()


def stem(unit: Unit) -> str:
    """The first part of the names of a unit's libraries: its name, and a hash of all sources and
    flags. Sources are hashed with their paths, in folders at any depth.

    Raises BuildError: as `folder_of`.
    """
    source = hashlib.sha256(repr((unit, FLAGS)).encode())
    for folder in dict.fromkeys((sources(), folder_of(unit))):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            source.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"{unit.name}-{source.hexdigest()[:16]}"


def built(unit: Unit) -> Path | None:
    """The library of a unit, if the cache has it."""
    return next(iter(sorted(cache().glob(f"{stem(unit)}-*/kernel.so"))), None)


def library(unit: Unit) -> Path:
    """The compiled library of a unit, built first if the cache does not have it.

    A library that was built from the same sources with the same flags is taken whatever compiled
    it, so a machine without a compiler can run what another one has built.

    Raises BuildError: no compiler, no headers, or the compiler's own error.
    """
    if found := built(unit):
        return found
    nvcc, version = compiler()
    include = cutlass()
    tools = hashlib.sha256(version.encode() + (include / "cutlass" / "version.h").read_bytes())
    return once(
        unit.name,
        f"{stem(unit)}-{tools.hexdigest()[:8]}",
        lambda: built(unit),
        lambda entry: _compile(unit, nvcc, include, entry),
    )


def _compile(unit: Unit, nvcc: Path, include: Path, entry: Path) -> None:
    say(f"compiling {unit.name}, about {SECONDS} s")
    began = time.monotonic()
    command: list[str | Path] = [
        nvcc,
        *FLAGS,
        *unit.defines,
        f"-I{sources()}",
        f"-I{include}",
        f"-L{nvcc.parent.parent / 'lib'}",
        "-o",
        entry / "kernel.so",
        folder_of(unit) / f"{unit.direction}.cu",
    ]
    own = {**os.environ, "TMPDIR": str(entry.parent)}  # so that nothing stays if it is killed
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise BuildError(
            f"{unit.name} does not compile, nvcc ended with {done.returncode}:\n{last}"
        )
    (entry / "ptxas.txt").write_text(done.stderr)
    with (entry / "kernel.so").open("rb") as library:
        os.fsync(library)  # so that no crash leaves a short file under a good name
    say(f"compiled {unit.name} in {time.monotonic() - began:.0f} s")


def jobs() -> int:
    """Units to compile at once: MAX_JOBS, else what cores and free memory allow.

    Raises BuildError: MAX_JOBS is no positive integer.
    """
    if told := os.environ.get("MAX_JOBS"):
        if not told.isdecimal() or int(told) < 1:
            raise BuildError(f"MAX_JOBS={told}: it must be a positive integer")
        return int(told)
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // JOB_BYTES))


def free_memory(machine: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: those of the machine, or fewer if a control group limits this process."""
    free = _number(machine, "MemAvailable:") << 10
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        used -= _number(group / "memory.stat", "inactive_file")  # cached files, given up on demand
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def _number(table: Path, name: str) -> int:
    words = table.read_text().split()
    return int(words[words.index(name) + 1])


def chosen(selectors: Sequence[str]) -> list[Unit]:
    """Units that have every word of a selector, `d128`, `bf16`, `forward-d128-bf16`; or all.

    Raises BuildError: a selector fits none.
    """
    if "all" in selectors:
        return list(UNITS)
    for selector in selectors:
        if not any(_fits(unit, selector) for unit in UNITS):
            raise BuildError(
                f"no unit is called {selector}: allowed are all, "
                f"{', '.join(unit.name for unit in UNITS)}, and parts of these like d128-bf16"
            )
    return [unit for unit in UNITS if any(_fits(unit, selector) for selector in selectors)]


def _fits(unit: Unit, selector: str) -> bool:
    return set(selector.split("-")) <= set(unit.name.split("-"))


def build_all(units: Sequence[Unit], at_once: int) -> None:
    """Builds units in parallel; what was begun when one fails is still finished and kept.

    Raises BuildError: the first that fails.
    """
    began = time.monotonic()
    missing = [unit for unit in units if built(unit) is None]
    if missing:
        compiler()
        cutlass()
        say(
            f"{len(missing)} of {len(units)} units to compile, {min(at_once, len(missing))} at once"
        )
    stopped = threading.Event()  # set before the thread of a failed unit could begin another

    def one(unit: Unit) -> None:
        try:
            if not stopped.is_set():
                library(unit)
        except BaseException:
            stopped.set()
            raise

    pool = ThreadPoolExecutor(at_once)
    try:
        left = {pool.submit(one, unit) for unit in missing}
        while left:
            done, left = wait(left, NOTICE, FIRST_COMPLETED)
            for unit in done:
                unit.result()
            if not done:
                ready, seconds = len(missing) - len(left), time.monotonic() - began
                say(f"{ready} of {len(missing)} compiled, {seconds:.0f} s so far")
    except KeyboardInterrupt:
        stopped.set()
        say("interrupted: what compiles now is finished, nothing more is begun")
        raise
    finally:
        pool.shutdown()
    print(
        f"{len(units)} units in {cache()}: {len(missing)} compiled in "
        f"{time.monotonic() - began:.0f} s, {len(units) - len(missing)} were there"
    )


def check(unit: Unit) -> list[str]:
    """What is wrong with the machine code of a unit that was built; empty if nothing is.

    Raises BuildError: cuobjdump is missing.
    """
    path = library(unit)
    remarks = (path.parent / "ptxas.txt").read_text()
    return [
        *sass.ptxas_faults(remarks),
        *sass.sass_faults(sass.disassemble(path)),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m ringfa3.build`. Exit code 1 where a unit does not compile or fails its check."""
    parser = argparse.ArgumentParser(prog="python -m ringfa3.build", description=main.__doc__)
    parser.add_argument(
        "--units", nargs="+", default=["all"], metavar="UNIT", help="d128-bf16 ..., or all"
    )
    parser.add_argument("-j", "--jobs", type=int, help="at once; default: by cores and free memory")
    parser.add_argument("--check", action="store_true", help="judge the machine code of the units")
    parser.add_argument("--headers", action="store_true", help="fetch CUTLASS's headers only")
    asked = parser.parse_args(arguments)
    if asked.jobs is not None and asked.jobs < 1:
        parser.error(f"-j {asked.jobs}: it must be at least 1")
    try:
        if asked.headers:
            print(cutlass())
            return
        units = chosen(asked.units)
        build_all(units, asked.jobs or jobs())
        faults = {unit: check(unit) for unit in units} if asked.check else {}
    except (BuildError, OSError) as error:
        sys.exit(f"ringfa3: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for unit, found in faults.items():
        print(f"{unit.name}: " + ("; ".join(found) or "machine code as meant"))
    sys.exit(1 if any(faults.values()) else 0)
