"""Compiles units, once and outside import. The library of a unit is an entry of the cache.

The name of an entry holds the hashes of architecture, sources and flags, and of the tools.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ringfa3.build.cache import Making, cache_folder, cache_path, log_line, making
from ringfa3.build.cutlass import include_folder
from ringfa3.build.ninja import Edge, run_edges
from ringfa3.build.packaged import find_packaged
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


def included(unit: Unit) -> dict[str, Path]:
    """The sources of a unit by their names: the file that it compiles, and what that includes.

    They are read from the text: in `#include "name"` the name is that of a file beside the one
    that includes it, or in `source_folder`. `_check_dependencies` compares them with what the
    compiler read.

    Raises BuildError: as `unit_folder`.
    """
    folder, root = unit_folder(unit), source_folder()
    found: dict[str, Path] = {}
    left = [folder / f"{unit.direction}.cu"]
    while left:
        path = left.pop()
        home = root if path.is_relative_to(root) else folder
        name = path.relative_to(home).as_posix()
        if name in found:
            continue
        found[name] = path
        for other in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"(.+?)"', path.read_text(), re.M):
            beside = (path.parent / other, root / other)
            left += [Path(os.path.normpath(p)) for p in beside if p.is_file()][:1]
    return found


def library_stem(unit: Unit) -> str:
    """The first part of a library's entry name: the unit's name, and a hash.

    The hash is of the host's architecture, the flags, and the names and bytes of `included`: a
    changed header makes other libraries of the units that include it, and of no other.

    Raises BuildError: as `unit_folder`.
    """
    source = hashlib.sha256(repr((unit, FLAGS, platform.machine())).encode())
    for name, path in sorted(included(unit).items()):
        source.update(name.encode() + path.read_bytes())
    return f"{unit.name}-{source.hexdigest()[:16]}"


def find_library(unit: Unit) -> Path | None:
    """The library of a unit, if the installed wheel or the cache has it."""
    stem = library_stem(unit)
    packaged = find_packaged(stem)
    if packaged or not cache_path().is_dir():
        return packaged
    return next(iter(sorted(cache_folder().glob(f"{stem}-*/kernel.so"))), None)


def ensure_library(unit: Unit) -> Path:
    """The compiled library of a unit, built first if the wheel and the cache do not have it.

    Any compiler's library of the same architecture, sources and flags serves, so a machine without
    a compiler can run the libraries that another machine built.

    Raises BuildError: no compiler, no headers, or the compiler's own error.
    """
    if found := find_library(unit):
        return found
    _make([unit], 1)
    found = find_library(unit)
    assert found is not None  # `_make` raises otherwise
    return found


def _make(units: Sequence[Unit], at_once: int) -> None:
    """Compiles the units that the cache lacks. It waits for those that another process compiles.

    It waits without a lock of its own: no two processes wait for each other, and no unit stays
    idle while its maker waits.
    """
    wait = False
    while left := [unit for unit in units if find_library(unit) is None]:
        wait = not _make_free(left, at_once, wait)


def _make_free(units: Sequence[Unit], at_once: int, wait: bool) -> bool:
    """Compiles units that no other process compiles; whether there are any.

    wait: for the first one, if another process compiles it.
    """
    nvcc, version = find_compiler()
    include = include_folder()
    header = (include / "cutlass" / "version.h").read_bytes()
    tools = hashlib.sha256(version.encode() + header).hexdigest()[:8]
    edges: dict[str, tuple[Unit, Making, ExitStack]] = {}
    compiles: list[Edge] = []
    with ExitStack() as locks:
        for unit in units:
            lock = locks.enter_context(ExitStack())
            name, find = f"{library_stem(unit)}-{tools}", functools.partial(find_library, unit)
            made = lock.enter_context(making(unit.name, name, find, wait and unit is units[0]))
            if isinstance(made, Making):
                edges[unit.name] = unit, made, lock
                compiles.append(_edge(unit, nvcc, include, made.folder))
        if len(compiles) == len(units) == 1:
            log_line(f"compiling {units[0].name}, about {COMPILE_SECONDS} s")
        if compiles:
            run_edges(compiles, at_once, lambda edge: _finish(edge, *edges[edge.name]))
    return bool(compiles)


def _edge(unit: Unit, nvcc: Path, include: Path, entry: Path) -> Edge:
    library, source = entry / "kernel.so", unit_folder(unit) / f"{unit.direction}.cu"
    command: list[str | Path] = [
        nvcc,
        *FLAGS,
        *unit.defines,
        f"-I{source_folder()}",
        f"-I{include}",
        f"-L{nvcc.parent.parent / 'lib'}",
        *("-MMD", "-MF", f"{library}.d"),
        "-o",
        library,
        source,
    ]
    return Edge(unit.name, command, source, library, entry.parent)


def _finish(edge: Edge, unit: Unit, made: Making, lock: ExitStack) -> None:
    """Makes a compiled library an entry of the cache, and lets other processes use it.

    Raises BuildError: the compile failed, or read a source that the entry's name ignores.
    """
    with lock:
        try:
            (made.folder / "ptxas.txt").write_text(edge.errors())
            _check_dependencies(unit, edge)
            made.publish()
        except BuildError as error:
            made.fail(error)
            raise
        log_line(f"compiled {unit.name} in {edge.seconds:.0f} s")


def _check_dependencies(unit: Unit, edge: Edge) -> None:
    known = {path.resolve() for path in included(unit).values()}
    for path in edge.dependencies:
        path = path.resolve()
        ours = any(path.is_relative_to(f.resolve()) for f in (source_folder(), unit_folder(unit)))
        if ours and path not in known:
            raise BuildError(
                f"{unit.name} includes {path} in a way that its name does not cover: write "
                '#include "NAME" with a name below csrc'
            )


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
        log_line(
            f"{len(missing)} of {len(units)} units to compile, {min(at_once, len(missing))} at once"
        )
        _make(missing, at_once)
    print(
        f"{len(units)} units: {len(missing)} compiled in {time.monotonic() - began:.0f} s, "
        f"{len(units) - len(missing)} were there; the cache is {cache_path()}"
    )


def check_library(unit: Unit) -> list[str]:
    """Faults in the machine code of a unit; empty if it has none.

    Raises BuildError: cuobjdump is missing, or as `ensure_library`.
    """
    path = ensure_library(unit)
    remarks = path.parent / "ptxas.txt"
    if not remarks.is_file():
        return [f"{remarks} does not exist: a wheel has no remarks, check where it was built"]
    faults = ptxas_faults(remarks.read_text())
    if unit.direction == "quantise":  # has no matrix product, so no loop of these
        return faults
    return [*faults, *sass_faults(disassemble(path))]
