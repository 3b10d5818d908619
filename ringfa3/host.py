"""Calls of attention that start in C++.

The C++ launcher (csrc/host) registers kernels of the ops `attention`, `ring_attention` and their
backwards. On one GPU the first call with a signature builds a schedule in Python; it and later
ones of equal shapes, strides, settings and streams run it as a program. Python runs whatever is
unusual: CUDA graph capture, tensor subclasses, float64, 8 bits. With a sink a call begins in
Python, and programs run its ops.

Of rings the library has the autograd. It runs programs of plans for one rank, and over peers'
memory those of several ranks, each after Python has counted the call: see
`ringfa3.symmetric.ring_program`.

RINGFA3_HOST, or `select`, chooses what starts calls: "cpp" or "python".
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ringfa3.build.host_library import MODULE, ensure_host_library
from ringfa3.custom_op import on_hook_change, run_with
from ringfa3.errors import BuildError
from ringfa3.kernels import dispatch, uploads
from ringfa3.kernels.dispatch import log_once
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import ScheduleError
from ringfa3.pass_interface import HostCode, LocalPass
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.tiling import Plan
from ringfa3.schedules.encoded import EncodedSchedule
from ringfa3.schedules.link import Addresses, link, schedule_of, signature_of, upload_tables
from ringfa3.schedules.program_cache import ProgramCache
from ringfa3.schedules.schedule import build
from ringfa3.validation import check_choice

ENVIRONMENT = "RINGFA3_HOST"
HOSTS = ("python", "cpp")
DEFAULT = "cpp"
RINGS = "ring_attention", "ring_attention_backward"
INPUTS = {"attention": slice(0, 4), "attention_backward": slice(0, 8)}  # arguments with data

# While the C++ launcher starts calls: flash_attn_func and flash_attn_varlen_func with positional
# arguments, of which they return None for those that Python must look at.
attend: Callable[..., Any] | None = None
attend_varlen: Callable[..., Any] | None = None

_selected: str | None = None  # None: nobody has chosen yet
_library: Any = None
_lock = threading.Lock()


def ensure() -> None:
    """Makes the choice of RINGFA3_HOST, once. A call on a GPU does so.

    Where the C++ launcher cannot be built or loaded, calls start in Python, which is logged once.

    Raises ValueError: RINGFA3_HOST has another value.
    """
    if _selected is not None:
        return
    name = os.environ.get(ENVIRONMENT, DEFAULT)
    check_choice(ENVIRONMENT, name, HOSTS)
    try:
        select(name)
    except (BuildError, OSError, ImportError, AttributeError) as error:
        select("python")
        log_once(f"C++ launcher unavailable, launching from Python (higher CPU overhead): {error}")


def select(name: str) -> None:
    """Chooses what starts calls on a GPU from now on: "cpp", the C++ launcher, or "python".

    The first choice of "cpp" builds and loads the library, in about 20 s.

    Raises:
        ValueError: there is no such choice.
        BuildError, OSError, ImportError, AttributeError: the library cannot be built or loaded.
    """
    global _selected
    check_choice("host", name, HOSTS)
    with _lock:
        if name == "cpp" and _library is None:
            start(load(ensure_host_library()), "cuda", _driver())
        _selected = name
        _switch()


def library() -> Any:
    """The library while it starts calls, else None. It holds and runs the programs of rings:
    `program` and `run` of csrc/host/module.cpp."""
    return _library if _selected == "cpp" else None


def counts() -> dict[str, int]:
    """Calls of the library's kernels so far, and programs that it holds; empty without a library.

    Of rings, which keep their programs themselves, only `replayed` has calls.

    replayed: by a program; built: by a program that Python built for it, or in Python if no
    schedule describes the call; python: by Python, for other reasons.
    """
    return {} if _library is None else dict(_library.counts())


def forward_call(lse: torch.Tensor) -> int:
    """Number of the ring call that the library began and that returned this LSE; 0: none."""
    return 0 if _library is None else cast(int, _library.forward_call(lse))


class ProgramPass(LocalPass):
    """`LocalPass` by programs of the C++ launcher, which knows a call by its arguments from the
    second one on: Python has no part in it then."""

    def __init__(self, plan: ContextPlan, pass_type: str) -> None:
        super().__init__(plan, pass_type)
        self._plan = plan

    def run_schedule(
        self,
        k: torch.Tensor,
        inputs: tuple[torch.Tensor | None, ...],
        settings: Hashable,
        code: HostCode,
    ) -> tuple[torch.Tensor, ...] | None:
        """As `RingPass.run_schedule`. Python runs captures, and calls that the library leaves to
        it."""
        found = library()
        if found is None or not found.ring_wanted():
            return None
        if dispatch.unit_for("forward", k) is None:  # the PyTorch fallback
            return None
        known = _programs.setdefault(self._plan.hops, ProgramCache())
        stream = CurrentStream.of(k.device)
        signature = signature_of(self._pass_type, inputs, settings)
        schedule = known.schedule(
            signature, lambda: schedule_of(self._plan, signature, inputs, code)
        )
        if schedule is None:
            return None
        program = known.get(  # streams of two GPUs may share an id
            (signature, k.device, stream.id), lambda: _link(schedule, stream, self._plan)
        )
        found.keep_local(program)
        return tuple(found.run(program, inputs, stream.handle, (0, 0, 0)))


def _link(schedule: EncodedSchedule, stream: CurrentStream, plan: ContextPlan | None = None) -> Any:
    """The program of a call on one GPU. plan: whose prepared calls upload their tables with it."""
    if plan is not None:
        upload_tables(plan.prepared.values(), stream)
    return link(_library, schedule, stream, Addresses.of_one_gpu(stream))


# Of plans for one rank.
_programs: weakref.WeakKeyDictionary[Plan, ProgramCache[Any]] = weakref.WeakKeyDictionary()


def on_first_call(find: Callable[..., Any]) -> None:
    """Sets what gives the library calls of prepared plans: `_prepared_calls` of ring/op.py."""
    global _prepared_calls
    _prepared_calls = find


_prepared_calls: Callable[..., Any] | None = None


def load(path: Path) -> Any:
    """The library as a module."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def start(library: Any, device: str, driver: Sequence[int], lengths_by_value: bool = True) -> None:
    """Registers the library's kernels for a type of device.

    driver: addresses, see `_driver`. lengths_by_value: as in csrc/host/ops.h.
    """
    global _library
    library.find_plans(ContextPlan.from_handle)
    library.on_first_call(_prepared_calls)
    library.start(device, *driver, lengths_by_value)
    _library = library
    uploads.launchers[device] = library.to_device
    on_hook_change(library.observe)


def stop() -> None:
    """Removes the library's kernels and programs. Nobody has chosen then; tests begin so."""
    global _library, _selected
    select("python")
    if _library is not None:
        _library.stop()
        for name in (*INPUTS, *RINGS):  # PyTorch remembers which keys had kernels
            getattr(torch.ops.ringfa3, name).default._dispatch_cache.clear()
    _programs.clear()
    uploads.launchers.clear()
    _library = _selected = None


def _driver() -> tuple[int, ...]:
    """The addresses of the functions of csrc/host/driver.h."""
    shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    cuda = ctypes.CDLL("libcuda.so.1")
    functions = (
        shim.aoti_torch_get_current_cuda_stream,
        cuda.cuCtxGetCurrent,
        cuda.cuStreamIsCapturing,
        cuda.cuStreamGetId,
    )
    return tuple(cast(int, ctypes.cast(x, ctypes.c_void_p).value) for x in functions)


def _switch() -> None:
    """Lets the library start calls, or not, as it is chosen."""
    global attend, attend_varlen
    if _library is None:
        return
    on = _selected == "cpp"
    _library.enable(on)
    attend, attend_varlen = (_library.attend, _library.attend_varlen) if on else (None, None)
    run_with(_build if on else None)


def _build(name: str, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Runs an op's kernel in Python, or, if the library asks for a program, builds and runs it."""
    if not _library.wanted():
        return kernel(*arguments)
    part = INPUTS[name]
    inputs = arguments[part]

    def code(*symbolic: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = kernel(*symbolic, *arguments[part.stop :])
        return results

    stream = CurrentStream.of(inputs[0].device)
    try:
        program = _link(build(inputs, code).encode(), stream)
    except ScheduleError:
        _library.decline()
        return kernel(*arguments)
    results = _library.run(program, inputs, stream.handle, (0, 0, 0))
    _library.keep(program)
    if name == "attention_backward" and len(results) == 3:  # an empty dsink
        return *results, inputs[0].new_empty((0,), dtype=torch.float32)
    return results
