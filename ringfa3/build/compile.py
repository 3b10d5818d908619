"""Compiles units, once and outside import. The library of a unit is an entry of the cache.

The name of an entry holds the hashes of architecture, sources and flags, and of the tools.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from ringfa3.build.cache import NOTICE, cache_folder, log_line, make_once
from ringfa3.build.cutlass import include_folder
from ringfa3.build.sass import disassemble, ptxas_faults, sass_faults
from ringfa3.build.toolchain import find_compiler
from ringfa3.build.units import Unit
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
    "-Xptxas=-v",  # its remarks are stored beside the library
    "-Xcompiler=-fPIC,-fno-gnu-unique",  # unique: two builds of a unit would share state
    "-shared",
    "-cudart=static",
)
COMPILE_SECONDS = 40  # of one unit, about
JOB_BYTES = 6 << 30  # of memory, of one compile at most


def source_folder() -> Path:
    """The folder of the kernels' sources, in a wheel or in a checkout."""
    here = Path(__file__).parent.parent  # ringfa3/
    return here / "csrc" if (here / "csrc").is_dir() else here.parent / "csrc"


def ablation_folder() -> Path:
    """The folder of the variants' sources, in a checkout; a wheel does not have it."""
    return Path(__file__).parents[2] / "benchmarks" / "ablation"


def unit_folder(unit: Unit) -> Path:
    """The folder with the file that a unit compiles, `DIRECTION.cu`.

    Raises BuildError: the unit is a variant, and this installation has no ablation.
    """
    if not unit.variant:
        return source_folder()
    if not ablation_folder().is_dir():
        raise BuildError(
            f"{unit.name} is a kernel of the benchmark, and {ablation_folder()} does not exist: "
            "run it from a checkout of the repository"
        )
    return ablation_folder()


def library_stem(unit: Unit) -> str:
    """The first part of a library's entry name: the unit's name, and a hash.

    The hash is of the host's architecture, flags and sources.

    Sources count with their bytes and their paths, in folders at any depth. Those of the host
    library, which kernels do not include, do not count.

    Raises BuildError: as `unit_folder`.
    """
    source = hashlib.sha256(repr((unit, FLAGS, platform.machine())).encode())
    for folder in dict.fromkeys((source_folder(), unit_folder(unit))):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if not name.startswith("host/"):
                source.update(name.encode() + path.read_bytes())
    return f"{unit.name}-{source.hexdigest()[:16]}"


def find_library(unit: Unit) -> Path | None:
    """The library of a unit, if the cache has it."""
    return next(iter(sorted(cache_folder().glob(f"{library_stem(unit)}-*/kernel.so"))), None)


def ensure_library(unit: Unit) -> Path:
    """The compiled library of a unit, built first if the cache does not have it.

    Any compiler's library of the same architecture, sources and flags serves, so a machine without
    a compiler can run the libraries that another machine built.

    Raises BuildError: no compiler, no headers, or the compiler's own error.
    """
    if found := find_library(unit):
        return found
    nvcc, version = find_compiler()
    include = include_folder()
    tools = hashlib.sha256(version.encode() + (include / "cutlass" / "version.h").read_bytes())
    return make_once(
        unit.name,
        f"{library_stem(unit)}-{tools.hexdigest()[:8]}",
        lambda: find_library(unit),
        lambda entry: _compile(unit, nvcc, include, entry),
    )


def _compile(unit: Unit, nvcc: Path, include: Path, entry: Path) -> None:
    log_line(f"compiling {unit.name}, about {COMPILE_SECONDS} s")
    began = time.monotonic()
    command: list[str | Path] = [
        nvcc,
        *FLAGS,
        *unit.defines,
        f"-I{source_folder()}",
        f"-I{include}",
        f"-L{nvcc.parent.parent / 'lib'}",
        "-o",
        entry / "kernel.so",
        unit_folder(unit) / f"{unit.direction}.cu",
    ]
    errors = run_compiler("nvcc", command, unit.name, entry / "kernel.so")
    (entry / "ptxas.txt").write_text(errors)
    log_line(f"compiled {unit.name} in {time.monotonic() - began:.0f} s")


def run_compiler(name: str, command: Sequence[str | Path], what: str, library: Path) -> str:
    """Compiles `what` to `library` by a compiler of that name; what it wrote to stderr.

    Raises BuildError: the compiler's own error.
    """
    # a killed nvcc leaves its temporary files: in a folder that the next build removes
    environment = {**os.environ, "TMPDIR": str(library.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise BuildError(f"{what} does not compile, {name} exited with {done.returncode}:\n{last}")
    with library.open("rb") as file:
        os.fsync(file)  # before the rename: a crash leaves no truncated library
    return done.stderr


def default_jobs() -> int:
    """Number of units to compile at once: MAX_JOBS, else as many as cores and free memory allow.

    Raises BuildError: MAX_JOBS is no positive integer.
    """
    if limit := os.environ.get("MAX_JOBS"):
        if not limit.isdecimal() or int(limit) < 1:
            raise BuildError(f"MAX_JOBS={limit}: it must be a positive integer")
        return int(limit)
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // JOB_BYTES))


def free_memory(machine: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of the machine, or of this process's control group if it has fewer."""
    free = _number(machine, "MemAvailable:") << 10
    try:
        limit = int((group / "memory.max").read_text())  # "max": unlimited
        used = int((group / "memory.current").read_text())
        used -= _number(group / "memory.stat", "inactive_file")  # cached files yield
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def _number(table: Path, name: str) -> int:
    words = table.read_text().split()
    return int(words[words.index(name) + 1])


def build_all(units: Sequence[Unit], at_once: int) -> None:
    """Builds units in parallel. After a failure it starts no unit, and finishes those that run.

    Raises BuildError: of the first unit that fails.
    """
    began = time.monotonic()
    missing = [unit for unit in units if find_library(unit) is None]
    if missing:
        find_compiler()
        include_folder()
        log_line(
            f"{len(missing)} of {len(units)} units to compile, {min(at_once, len(missing))} at once"
        )
    stopped = threading.Event()  # before the failed unit's thread takes another

    def build(unit: Unit) -> None:
        try:
            if not stopped.is_set():
                ensure_library(unit)
        except BaseException:
            stopped.set()
            raise

    pool = ThreadPoolExecutor(at_once)
    try:
        left = {pool.submit(build, unit) for unit in missing}
        while left:
            done, left = wait(left, NOTICE, FIRST_COMPLETED)
            for unit in done:
                unit.result()
            if not done:
                ready, seconds = len(missing) - len(left), time.monotonic() - began
                log_line(f"{ready} of {len(missing)} compiled, {seconds:.0f} s so far")
    except KeyboardInterrupt:
        stopped.set()
        log_line("interrupted: waiting for the running compilers, starting no more")
        raise
    finally:
        pool.shutdown()
    print(
        f"{len(units)} units in {cache_folder()}: {len(missing)} compiled in "
        f"{time.monotonic() - began:.0f} s, {len(units) - len(missing)} were in the cache"
    )


def check_library(unit: Unit) -> list[str]:
    """Faults in the machine code of a unit; empty if it has none.

    Raises BuildError: cuobjdump is missing, or as `ensure_library`.
    """
    path = ensure_library(unit)
    faults = ptxas_faults((path.parent / "ptxas.txt").read_text())
    if unit.direction == "quantise":  # has no matrix product, so no loop of these
        return faults
    return [*faults, *sass_faults(disassemble(path))]
