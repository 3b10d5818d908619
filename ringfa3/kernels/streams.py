"""CUDA streams of launches: which one is current, and its identity.

A stream handle is no identity. The driver reuses the handle of a destroyed stream, and the handle
of the per-thread default stream is 2 in every thread. The driver's stream id is unique for the life
of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import NamedTuple, cast

import torch

from ringfa3.kernels.symbolic import current_builder

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CurrentStream(NamedTuple):
    """The current stream of a device.

    captured  whether a CUDA graph captures it
    id        the driver's stream id; 0 if captured: the driver gives none during a capture
    """

    device: torch.device
    handle: int
    captured: bool
    id: int

    @classmethod
    def of(cls, device: torch.device) -> CurrentStream:
        """While a schedule is built: no stream, since it may run on any."""
        if current_builder() is not None:
            return cls(device, 0, False, 0)
        with on(device):
            handle, captured = _handle(device.index), torch.cuda.is_current_stream_capturing()
            return cls(device, handle, captured, 0 if captured else _stream_id(handle))


_NO_CHANGE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, if it is not."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NO_CHANGE if here else torch.cuda.device(device)


def record_event(device: torch.device) -> torch.cuda.Event:
    """An event after the work that the current stream of a device has so far."""
    with on(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def finish(event: torch.cuda.Event) -> None:
    """Blocks the host until an event that no graph captured is done; legal in a capture, too.

    By default a capture forbids its thread to wait for events, because the event may belong to the
    capture.
    """
    with relaxed_capture():
        event.synchronize()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread make the calls that the default capture mode forbids as unsafe."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:  # `mode` holds the mode of before
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _handle(device: int) -> int:
    """The current stream's, without the object that `torch.cuda.current_stream` makes."""
    return torch._C._cuda_getCurrentRawStream(device)


def _stream_id(handle: int) -> int:
    number = ctypes.c_uint64()
    _call("cuStreamGetId", ctypes.c_void_p(handle), ctypes.byref(number))
    return number.value


def _call(name: str, *arguments: object) -> None:
    status = _entry(name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed: CUDA driver error {status}")


@lru_cache(None)
def _entry(name: str) -> Callable[..., int]:
    return cast(Callable[..., int], getattr(ctypes.CDLL("libcuda.so.1"), name))
