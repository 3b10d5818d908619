"""The kernels on the CPU: their PTX, run by the emulator in tests/emulator.

A unit is compiled with its launcher as for a GPU, but to PTX, and linked against an emulator that
stands in for the CUDA runtime. So launcher, tensor maps, barriers and masks are those of the
product. Every access is checked against the tensors there are, and what is asynchronous runs at
random times between issue and wait. Not shown here: speed, what ptxas makes of the PTX, and memory
order between CTAs or between ordinary and bulk accesses to global memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringfa3.build.cache import cache_folder, make_once
from ringfa3.build.compile import FLAGS, default_jobs, library_stem, source_folder, unit_folder
from ringfa3.build.cutlass import include_folder
from ringfa3.build.toolchain import find_compiler, find_host_compiler
from ringfa3.build.units import UNITS, Unit
from ringfa3.kernels import backward, dispatch, launch

SOURCES = Path(__file__).parents[1] / "emulator"
OPTIONS = ("-std=c++20", "-O2", "-fwrapv", "-fPIC", "-Wall", "-Wextra", "-Werror")
PROCESSORS = 3  # CTAs that run at a time


class EmulationError(RuntimeError):
    """A kernel did what it must not do; the message names instruction and warp."""


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:16]


def _entry(task: str, name: str, file: str, fill: Callable[[Path], None]) -> Path:
    """An entry of the build cache with one library in it."""

    def found() -> Path | None:
        path = cache_folder() / name / file
        return path if path.is_file() else None

    return make_once(task, name, found, fill)


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


@cache
def emulator() -> Path:
    """The emulator's library, compiled once for its sources."""
    include = find_compiler()[0].parent.parent / "include"
    files = sorted(SOURCES.iterdir())
    name = "emulator-" + _digest(repr(OPTIONS), *(f.name.encode() + f.read_bytes() for f in files))

    def fill(entry: Path) -> None:
        def one(source: Path) -> Path:
            out = entry / f"{source.stem}.o"
            _run([find_host_compiler(), *OPTIONS, f"-I{include}", "-c", source, "-o", out])
            return out

        with ThreadPoolExecutor(default_jobs()) as pool:
            objects = list(pool.map(one, (f for f in files if f.suffix == ".cpp")))
        _run([find_host_compiler(), "-shared", "-o", entry / "libemulator.so", *objects])

    return _entry("emulator", name, "libemulator.so", fill)


def _library(unit: Unit) -> Path:
    """The library of a unit with PTX instead of machine code, linked against the emulator."""
    nvcc, version = find_compiler()
    include = include_folder()
    runtime = emulator()
    dropped = ("-gencode", "-Xptxas", "-cudart")
    flags = [flag for flag in FLAGS if not flag.startswith(dropped)]
    flags += ["-gencode=arch=compute_90a,code=compute_90a", "-no-compress", "-cudart=none"]
    name = f"emulated-{library_stem(unit)}-{_digest(repr(flags), version, str(runtime))}"

    def fill(entry: Path) -> None:
        source = unit_folder(unit) / f"{unit.direction}.cu"
        headers = (f"-I{source_folder()}", f"-I{include}")
        link = (f"-L{runtime.parent}", "-lemulator", f"-Xlinker=-rpath={runtime.parent}")
        output = ("-o", entry / "kernel.so")
        _run([nvcc, *flags, *unit.defines, *headers, *output, source, *link])

    return _entry(f"emulated-{unit.name}", name, "kernel.so", fill)


class _Owned(TorchDispatchMode):
    """Tells the emulator of every tensor that is made: kernels may touch these and no more."""

    def __init__(self, own: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.own = own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.own(x)
        return made


class Machine:
    """Runs units on the CPU. Made by `machine`."""

    def __init__(self) -> None:
        self.runtime = ctypes.CDLL(str(emulator()), ctypes.RTLD_GLOBAL)
        self.runtime.emulator_finish.restype = ctypes.c_char_p
        self.runtime.emulator_reset.argtypes = (
            ctypes.c_uint64,
            ctypes.c_double,
            ctypes.c_double,
            ctypes.c_size_t,
        )
        self.runtime.emulator_launch.argtypes = (
            ctypes.c_char_p,
            *[ctypes.c_int] * 4,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        self.runtime.emulator_own.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.runtime.emulator_launch.restype = ctypes.c_char_p
        self._kept: list[torch.Tensor] = []  # so that no address is another tensor's

    def own(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self._kept.append(x)
        self.runtime.emulator_own(storage.data_ptr(), storage.nbytes())

    def entry(self, unit: Unit, name: str, arguments: int = 2) -> Callable[..., int]:
        """A unit's C function, with pointers for arguments; failures raise EmulationError."""
        function = getattr(ctypes.CDLL(str(_library(unit))), name)
        function.argtypes = (ctypes.c_void_p,) * arguments

        def call(*args: Any) -> int:
            status = function(*args)
            self.finish()
            return int(status)

        return call

    def launch(
        self,
        ptx: str,
        *tensors: torch.Tensor,
        ctas: int = 1,
        threads: int = 32,
        shared: int = 0,
        programmatic: bool = False,
    ) -> None:
        """Queues the kernel of a PTX text, whose parameters are pointers to tensors."""
        for x in tensors:
            self.own(x)
        pointers = b"".join(x.data_ptr().to_bytes(8, "little") for x in tensors)
        sizes = (ctas, threads, shared, programmatic)
        said = self.runtime.emulator_launch(ptx.encode(), *sizes, pointers, len(pointers))
        if said:
            raise EmulationError(said.decode())

    def finish(self) -> None:
        """Runs what was launched. Raises EmulationError."""
        if said := self.runtime.emulator_finish():
            raise EmulationError(said.decode())

    def owning(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose kernels may touch its tensors and those that it makes, and no others."""

        @wraps(call)
        def owned(*args: Any, **kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if isinstance(x, torch.Tensor):
                    self.own(x)
            with _Owned(self.own):
                return call(*args, **kwargs)

        return owned

    def settings(
        self,
        seed: int,
        eagerness: float = 0.1,
        patience: float = 2.0,
        resident: int = 1 << 30,
    ) -> None:
        """Of the launches to come. No tensor's memory is known any more, nor any error.

        eagerness   of asynchronous work: 0 as late as possible, 1 soon
        patience    seconds in which nothing changes until a launch is given up
        resident    CTAs of a launch that find room; other kernels have the rest
        """
        self.runtime.emulator_reset(seed, eagerness, patience, resident)
        for known in (launch._tables, launch._counters, backward._tables, backward._grids):
            known.clear()
        self._kept.clear()


def unit(direction: str, q: torch.Tensor) -> Unit:
    """The unit for tensors like q (t, h, d)."""
    wanted = (direction, str(q.dtype).removeprefix("torch."), q.shape[-1])
    return next(u for u in UNITS if (u.direction, u.dtype, u.head_dim) == wanted)


@contextmanager
def machine() -> Iterator[Machine]:
    """A Machine, on which `ringfa3.kernels.launch` runs CPU tensors as long as it is open."""
    emulated = Machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_entry", cache(lambda u, n: emulated.entry(u, f"ringfa3_{n}")))
        patch.setattr(launch, "attend", emulated.owning(launch.attend))
        for name in ("__init__", "hop", "dq"):
            method = getattr(backward.BackwardPass, name)
            patch.setattr(backward.BackwardPass, name, emulated.owning(method))
        patch.setattr(launch, "unit_for", unit)
        patch.setattr(launch, "_processors", lambda _: PROCESSORS)
        patch.setattr(dispatch, "_problem", lambda _: None)  # their GPU libraries need not be there
        patch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
        patch.setattr(launch, "_handle", lambda _: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield emulated
