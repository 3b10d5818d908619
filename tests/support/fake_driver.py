"""The driver and the kernels of a ring on the CPU behind entry points in C, which log each call.

`FakeCuda` runs the streams, `FakeKernels` the kernels. Python and the host library call both by the
same addresses.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringfa3.build.units import Unit
from ringfa3.kernels import launch
from ringfa3.kernels.backward import BackwardArgs
from ringfa3.kernels.forward import ForwardArgs
from ringfa3.kernels.launch import Tensor3, pointer_offsets
from ringfa3.schedules.steps import POINTER, STRUCTURES
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.stream_ops import Stream
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_kernels import FakeKernels

Entry = tuple[object, ...]
COMPUTES = ("copy_", "add_", "zero_", "sum")
COPIES = {"_to_copy": "copy_", "clone": "copy_"}  # the library allocates before


class Place(NamedTuple):
    """Where an address lies: in an input, by number, in the backend's memory, or elsewhere."""

    name: str
    offset: int


class LoggedCuda(FakeCuda):
    """`FakeCuda` whose calls are issued as the driver's are; `refused`: a call that fails."""

    copy = staticmethod(cuda_driver.copy)  # type: ignore[assignment]
    record = staticmethod(cuda_driver.record)  # type: ignore[assignment]
    wait_event = staticmethod(cuda_driver.wait_event)  # type: ignore[assignment]
    batch_memory_ops = staticmethod(cuda_driver.batch_memory_ops)  # type: ignore[assignment]
    issue = staticmethod(cuda_driver.issue)  # type: ignore[assignment]

    def __init__(self, seed: int, kernels: FakeKernels) -> None:
        super().__init__(seed)
        self.kernels = kernels
        self.logs: dict[int, list[Entry]] = {}  # by thread
        self.refused: str | None = None
        self.problems: list[BaseException] = []
        acts: dict[str, Callable[..., None]] = {
            "cuCtxSetCurrent": lambda *_: None,
            "cuEventRecord": lambda e, s: self.events[e or 0].record(self.streams[s or 0]),
            "cuStreamWaitEvent": lambda s, e, _: self.streams[s or 0].wait_event(
                self.events[e or 0]
            ),
            "cuMemcpyDtoDAsync_v2": lambda to, at, n, s: self.move(s or 0, to, at, n),
            "cuStreamBatchMemOp_v2": lambda s, n, x, _: self._words(
                s or 0, [cuda_driver.MemoryOp.from_buffer_copy(x[i]) for i in range(n)]
            ),
        }
        self.entries = {name: self._entry(name, act) for name, act in acts.items()}

    def log(self, *entry: object) -> None:
        self.logs.setdefault(threading.get_ident(), []).append(entry)

    def taken(self) -> list[Entry]:
        """What this thread has done since the last call."""
        return self.logs.pop(threading.get_ident(), [])

    def _in_c(self, name: str, types: tuple[type, ...], act: Callable[..., int]) -> Any:
        def call(*arguments: Any) -> int:
            try:
                return act(*arguments)
            except BaseException as problem:  # an entry point in C raises nothing
                self.problems.append(problem)
                return 719

        made = ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)
        made.__name__ = name  # type: ignore[attr-defined]
        return made

    def _entry(self, name: str, act: Callable[..., None]) -> Any:
        def call(*given: Any) -> int:
            if name == self.refused:
                return 700
            words: list[object] = [x or 0 for x in given if not isinstance(x, ctypes._Pointer)]
            if name == "cuStreamBatchMemOp_v2":
                fields = ("operation", "address", "value", "flags")
                words += [tuple(getattr(given[2][i], f) for f in fields) for i in range(given[1])]
            if name != "cuCtxSetCurrent":  # of the call's begin
                self.log(name, *words)
            act(*given)
            return 0

        return self._in_c(name, cuda_driver._ARGUMENTS[name], call)

    @contextmanager
    def stands_in(self) -> Iterator[None]:
        """Inside `FakeKernels.stands_in`: attention of CPU tensors launches logged kernels."""
        plain = launch._entry

        @cache
        def entry(unit: Unit, name: str) -> Any:
            kernel = plain(unit, name)

            def call(words: int, stream: int) -> int:
                self.log(name, ctypes.string_at(words, ctypes.sizeof(STRUCTURES[name])), stream)
                if name == "forward":
                    self._wait(ForwardArgs.from_address(words))
                elif name == "backward":
                    _clear(BackwardArgs.from_address(words))
                status: int = kernel(words, stream)
                self.kernels.library.fake_forget()  # other threads launch meanwhile
                return status

            return self._in_c(name, (ctypes.c_void_p, ctypes.c_void_p), call)

        with (
            mock.patch.object(launch, "_entry", entry),
            mock.patch.object(cuda_driver, "_entries", return_value=self.entries),
        ):
            yield

    def _wait(self, args: ForwardArgs) -> None:
        """As the kernel waits for arrivals: for all but word 0."""
        if args.arrivals:
            world = len(self.logs)
            words = (ctypes.c_int32 * world).from_address(args.arrivals)
            self.until(lambda: all(words[1:world]))


def _clear(args: BackwardArgs) -> None:
    """The fake kernel adds to float32 dK and dV; those that it is given hold anything."""
    grads: list[Tensor3] = [args.dk, args.dv]
    for x in grads if args.float32_grads else ():
        for token in range(x.tokens):
            for head in range(x.heads):
                at = token * x.token_stride + head * x.head_stride
                ctypes.memset(x.data + 4 * at, 0, 4 * x.head_dim)


class Computations(TorchDispatchMode):
    """Logs tensor operations that read or write data."""

    def __init__(self, cuda: LoggedCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in COPIES:
            args = (result, args[0])
        name = COPIES.get(name, name)
        if name in COMPUTES:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            self.cuda.log(name, *(_described(x) for x in tensors))
        return result


def _described(x: torch.Tensor) -> Entry:
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype


def in_terms(
    log: list[Entry],
    inputs: Sequence[torch.Tensor | None],
    backend: SymmetricBackend,
    waits: Sequence[int],
) -> list[Entry]:
    """A log of one call, with addresses in terms of its inputs, and without what differs from call
    to call: counts are of the waits since `waits`, and buffers have no names: a result may have the
    address of an earlier buffer."""
    known = {str(number): x for number, x in enumerate(inputs) if x is not None}
    known["arrivals"] = backend.arrivals
    counters = {backend.signals.counter(s): s for s in Stream}

    def place(address: int) -> Place:
        for name, x in known.items():
            size = x.untyped_storage().nbytes()
            if 0 <= address - x.untyped_storage().data_ptr() < size:
                return Place(name, address - x.data_ptr())
        for base, memory in backend.group.meeting.cuda.memory.items():  # type: ignore[attr-defined]
            if 0 <= address - base < len(memory):
                return Place("shared memory", address)
        return Place("a buffer or table", 0)

    found: list[Entry] = []
    for name, *rest in log:
        if name in STRUCTURES:
            words, stream = bytearray(rest[0]), rest[1]  # type: ignore[call-overload]
            places = []
            for at in pointer_offsets(STRUCTURES[str(name)]):
                address = int.from_bytes(words[at : at + POINTER], "little")
                places.append(place(address) if address else None)
                words[at : at + POINTER] = bytes(POINTER)
            found.append((name, bytes(words), tuple(places), stream))
        elif name == "cuStreamBatchMemOp_v2":
            operations = [
                (kind, at, value - waits[counters[at]] if at in counters else value, flags)
                for kind, at, value, flags in rest[3:]  # type: ignore[misc]
            ]
            found.append((name, *rest[:2], *operations))
        elif str(name).startswith("cu"):
            found.append((name, *rest))
        else:
            found.append((name, *((place(x[0]), *x[1:]) for x in rest)))  # type: ignore[index]
    return found
