"""Ring calls over peers' memory as programs, which the host library replays.

The first calls of a kind and parity run in Python, then one beside a recorder. The next one Python
begins: checks, agreement, number and parity, settings for the store's monitor, room in the shared
memory. What follows, from the first driver call to the results, is replayed. From then on the
library knows the call by its arguments: Python only counts it, in `ReplayableCall.begin`.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from ringfa3.kernels.program import ProgramError, ProgramRecorder
from ringfa3.kernels.recording import recording
from ringfa3.kernels.streams import CurrentStream
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.stream_ops import Stream

# Of a kind and parity, the number of the call that is recorded, which takes the host about 2 ms. A
# plan that serves many steps repays them. Packed documents give each step a plan of its own; it has
# up to 64 calls of a kind and parity in 128 layers, or in 42 that recompute attention.
RECORDED_CALL = 65
MAX_PROGRAMS = 64  # of a plan; beyond that all are forgotten, and counted anew
ALIGNMENT = 16  # bytes

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Inputs: TypeAlias = tuple[torch.Tensor | None, ...]
Posts: TypeAlias = Sequence[tuple[Stream, Sequence[str]]]


class RingProgram(NamedTuple):
    """A program of the host library.

    library  that made it
    held     by which the library knows it; None if Python runs all calls of the kind
    posts    names of its waits, for each stream, as the watchdog gets them
    """

    library: Any
    held: object | None
    posts: Posts

    def run(self, inputs: Inputs, stream: CurrentStream, waits: Sequence[int]) -> Tensors:
        """The results of a call on a stream, the current one. waits: of earlier calls, by stream.

        Raises:
            DriverError: the driver refuses a call.
            RuntimeError: CUDA refuses a launch.
        """
        results: Any = self.library.run(self.held, inputs, stream.handle, tuple(waits))
        if isinstance(results[0], str):
            raise cuda_driver.error(*results)
        return tuple(results)


class Beginner(Protocol):
    """What begins and ends calls of a rank: a backend."""

    def begin_again(self, call: ReplayableCall, lse: torch.Tensor | None) -> Begun | None:
        """As `ReplayableCall.begin`."""

    def returned(self, lse: torch.Tensor) -> None:
        """The forward call under way returns this LSE."""

    def report_failure(self, error: Exception) -> None:
        """Tells the other ranks that an error ends the call under way."""


Begun: TypeAlias = tuple[object, tuple[int, ...]]  # of a program; waits of earlier calls, by stream


class ReplayableCall:
    """A call that the host library replays whenever its arguments come again.

    agreed         of the group, by which it begins again
    stream         the compute stream
    cache_version  of the backend's call cache
    programs       by parity
    """

    def __init__(self, backend: Beginner, agreed: Any, stream: object, cache_version: int) -> None:
        self._backend, self.agreed = backend, agreed
        self.stream, self.cache_version = stream, cache_version
        self.programs: list[RingProgram | None] = [None, None]

    def begin(self, lse: torch.Tensor | None) -> Begun | None:
        """Begins the call. None, and nothing has begun: Python must look at it.

        lse: of a backward, by which it names its forward call
        """
        return self._backend.begin_again(self, lse)

    def returned(self, lse: torch.Tensor) -> None:
        """The forward call under way returns this LSE."""
        self._backend.returned(lse)

    def refused(self, name: str, status: int) -> NoReturn:
        """The driver has refused a call of the program: tells the other ranks and raises."""
        error = cuda_driver.error(name, status)
        self._backend.report_failure(error)
        raise error

    def failed(self, memory: bool, text: str) -> None:
        """The program has failed, for lack of memory or otherwise: tells the other ranks."""
        self._backend.report_failure((torch.OutOfMemoryError if memory else RuntimeError)(text))


Programs: TypeAlias = MutableMapping[Hashable, RingProgram | int]  # int: calls so far, in Python


def kind_of(inputs: Inputs, settings: Hashable, stream: CurrentStream) -> Hashable:
    """What a call's steps depend on, besides addresses: calls of one kind have the same."""
    return settings, stream.id, *(None if x is None else _layout(x) for x in inputs)


def _layout(x: torch.Tensor) -> Hashable:
    """TMA addresses 16 bytes."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT


class ProgramRecording:
    """Around a call that Python runs: counts it, and makes a program from `RECORDED_CALL` on."""

    def __init__(self, library: Any, programs: Programs, kind: Hashable, inputs: Inputs) -> None:
        """library: for which it records. programs: in which the kind has no program."""
        self._library, self._programs, self._kind = library, programs, kind
        self._modes = ExitStack()
        if kind not in programs and len(programs) >= MAX_PROGRAMS:
            programs.clear()
        earlier = programs.get(kind, 0)
        assert isinstance(earlier, int)
        programs[kind] = earlier + 1
        self._recorder = ProgramRecorder(inputs) if earlier + 1 >= RECORDED_CALL else None

    def __enter__(self) -> ProgramRecording:
        if self._recorder is not None:
            self._modes.enter_context(recording(self._recorder))
            self._modes.enter_context(self._recorder)
        return self

    def __exit__(self, *problem: Any) -> None:
        self._modes.__exit__(*problem)

    def keep(self, results: Tensors) -> None:
        """As `ringfa3.pass_interface.Recording.keep`."""
        recorder = self._recorder
        if recorder is None:
            return
        try:
            words = recorder.words(results)
        except ProgramError:
            self._programs[self._kind] = RingProgram(self._library, None, ())
            return
        memory = tuple(recorder.names), tuple(recorder.tables), tuple(recorder.kept)
        held = self._library.program(words, *memory)
        posts: dict[Stream, list[str]] = {}
        for on, names in recorder.posts:
            posts.setdefault(Stream(on), []).extend(names)
        self._programs[self._kind] = RingProgram(self._library, held, tuple(posts.items()))
