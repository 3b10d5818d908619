"""Ring calls over peers' memory as programs, which the C++ launcher runs.

The first call of a call signature and parity builds its schedule. Python begins the call: checks,
agreement, number and parity, settings for the store's monitor, room in the shared memory. The
launcher runs what follows, from the first driver call to the results. From the next such call on
it knows the call by its arguments: Python only counts it, in `ReplayableCall.begin`.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from ringfa3.kernels.schedule import build
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import ALIGNMENT, ScheduleError
from ringfa3.pass_interface import HostCode
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.stream_ops import Stream

MAX_PROGRAMS = 64  # of a plan; beyond that all are forgotten

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Inputs: TypeAlias = tuple[torch.Tensor | None, ...]
Posts: TypeAlias = Sequence[tuple[Stream, Sequence[str]]]


class RingProgram(NamedTuple):
    """A program of the host library.

    library  that made it
    held     by which the library knows it; None if Python runs all such calls
    posts    names of its waits, for each stream, as the watchdog gets them
    """

    library: Any
    held: object | None
    posts: Posts

    @classmethod
    def of(cls, library: Any, inputs: Inputs, code: HostCode) -> RingProgram:
        """The program of a call with this host code; see `kernels.schedule.build`."""
        try:
            schedule = build(inputs, code)
        except ScheduleError:
            return cls(library, None, ())
        posts: dict[Stream, list[str]] = {}
        for on, names in schedule.posts:
            posts.setdefault(Stream(on), []).extend(names)
        return cls(library, schedule.program(library), tuple(posts.items()))

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


Programs: TypeAlias = MutableMapping[Hashable, RingProgram]


def signature_of(inputs: Inputs, settings: Hashable, stream: CurrentStream) -> Hashable:
    """What a call's steps depend on, besides addresses."""
    return settings, stream.id, *(None if x is None else _layout(x) for x in inputs)


def _layout(x: torch.Tensor) -> Hashable:
    """TMA addresses 16 bytes."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT
