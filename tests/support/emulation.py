"""Runs the kernels on the CPU: an emulator (tests/emulator) executes their PTX.

A unit is compiled with its launcher as for a GPU, but to PTX, and linked against the emulator,
which replaces the CUDA runtime. Launcher, tensor maps, barriers and masks are therefore those of
the product. The emulator checks every access against the memory of the tensors, and runs
asynchronous operations at random times between issue and wait. It shows neither speed nor ptxas'
machine code, nor the memory order between CTAs or between the generic and the async proxy in global
memory.
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
from ringfa3.build.units import Unit
from ringfa3.kernels import (
    backward,
    dispatch,
    forward,
    launch,
    local_kv,
    quantise,
    quantised,
    streams,
    uploads,
)
from ringfa3.kernels.quantise import TiledKV
from ringfa3.quantisation.operands import QuantisedQ

SOURCES = Path(__file__).parents[1] / "emulator"
OPTIONS = ("-std=c++20", "-O2", "-fwrapv", "-fPIC", "-Wall", "-Wextra", "-Werror")
PROCESSORS = 3  # SMs of the emulated GPU

EAGERNESS = (0.0, 0.02, 0.3, 1.0)  # chances of an asynchronous operation, for `Machine.settings`


def draws(first: int, count: int) -> list[Any]:
    """Values of a parameter: the `first` of `count` random cases, and for `-m soak` the others."""
    return [range(first), pytest.param(range(first, count), marks=pytest.mark.soak)]


class EmulationError(RuntimeError):
    """A kernel made an error; the message names the instruction and the warp."""


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:16]


def _entry(task: str, name: str, file: str, fill: Callable[[Path], None]) -> Path:
    """A library in the build cache; `fill(folder)` makes it if it is missing."""

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
    """The emulator's library, compiled when its sources change."""
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


class _AllowNewTensors(TorchDispatchMode):
    """Calls `allow` with every tensor that an operation returns."""

    def __init__(self, allow: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.allow = allow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.allow(x)
        return made


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, a tuple or a dataclass."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple):
        for member in x:
            yield from _tensors(member)
    elif isinstance(x, (QuantisedQ, TiledKV)):
        yield from _tensors(tuple(vars(x).values()))


class Machine:
    """Runs units on the CPU. `machine` makes it."""

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
            *[ctypes.c_int] * 5,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        self.runtime.emulator_allow.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.runtime.emulator_launch.restype = ctypes.c_char_p
        self._kept: list[torch.Tensor] = []  # keeps addresses from being reused

    def allow(self, x: torch.Tensor) -> None:
        """Lets kernels access the memory of `x`."""
        storage = x.untyped_storage()
        self._kept.append(x)
        self.runtime.emulator_allow(storage.data_ptr(), storage.nbytes())

    def entry(self, unit: Unit, name: str, arguments: int = 2) -> Callable[..., int]:
        """A unit's C function, whose arguments are pointers. A call raises EmulationError."""
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
        cluster: int = 1,
    ) -> None:
        """Queues the kernel of a PTX text; its parameters are pointers to `tensors`."""
        for x in tensors:
            self.allow(x)
        pointers = b"".join(x.data_ptr().to_bytes(8, "little") for x in tensors)
        sizes = (ctas, threads, shared, programmatic, cluster)
        error = self.runtime.emulator_launch(ptx.encode(), *sizes, pointers, len(pointers))
        if error:
            raise EmulationError(error.decode())

    def finish(self) -> None:
        """Runs the queued launches. Raises EmulationError."""
        if error := self.runtime.emulator_finish():
            raise EmulationError(error.decode())

    def allowing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose kernels may access its arguments, members of tuples and of dataclasses
        among them, and the tensors that it makes."""

        @wraps(call)
        def allowed(*args: Any, **kwargs: Any) -> Any:
            for x in _tensors((*args, *kwargs.values())):
                self.allow(x)
            with _AllowNewTensors(self.allow):
                return call(*args, **kwargs)

        return allowed

    def settings(
        self,
        seed: int,
        async_chance: float = 0.1,
        deadlock_s: float = 2.0,
        resident_ctas: int = 1 << 30,
    ) -> None:
        """Sets how the next launches run. Clears the allowed memory and the error.

        seed            of the order of warps and of the times of asynchronous operations
        async_chance    that an asynchronous operation runs after a warp's turn; 0: as late as legal
        deadlock_s      seconds without any change that count as a deadlock
        resident_ctas   CTAs of a launch that run at once, or the clusters of these
        """
        self.runtime.emulator_reset(seed, async_chance, deadlock_s, resident_ctas)
        uploaded = (forward._tables, backward._tables, quantise._tables)
        others = (quantised._first_tiles, forward.counters, local_kv._uploaded)
        for table in (*uploaded, *others):
            table.clear()
        self._kept.clear()


def unit(
    direction: str, q: torch.Tensor, precision: str = "native", v_dim: int | None = None
) -> Unit:
    """The unit for tensors like q (t, h, d), and V of head dim `v_dim`, by default d."""
    found = dispatch.narrowest_unit(direction, q.dtype, q.shape[-1], precision, v_dim)
    assert found is not None
    return found


@contextmanager
def machine() -> Iterator[Machine]:
    """A Machine; inside the `with`, `ringfa3.kernels` runs CPU tensors on it."""
    emulated = Machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_entry", cache(lambda u, n: emulated.entry(u, f"ringfa3_{n}")))
        for room in (forward, quantised):
            patch.setattr(room, "attend", emulated.allowing(room.attend))
        made = ("channel_statistics", "combine_statistics", "quantise_q", "quantise_kv")
        for name in (*made, "dequantise"):
            patch.setattr(quantise, name, emulated.allowing(getattr(quantise, name)))
        for name in ("__init__", "hop", "dq"):
            method = getattr(backward.BackwardPass, name)
            patch.setattr(backward.BackwardPass, name, emulated.allowing(method))
        for name in ("publish", "add_returns", "round_gradients"):
            method = getattr(local_kv.LocalKVKernels, name)
            patch.setattr(local_kv.LocalKVKernels, name, emulated.allowing(method))
        patch.setattr(dispatch, "unit_for", unit)
        patch.setattr(launch, "_num_sms", lambda _: PROCESSORS)
        patch.setattr(dispatch, "_build_problem", lambda _: None)  # no GPU library is built
        patch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
        patch.setattr(streams, "_handle", lambda _: 0)
        patch.setattr(streams, "_stream_id", lambda _: 0)
        patch.setattr(uploads, "record_event", lambda _: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield emulated
