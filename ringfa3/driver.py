"""Calls of the CUDA driver: above all, a stream sets or awaits a word without a kernel.

PyTorch has no such calls. Streams and addresses are plain integers; a stream belongs to the
current device.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_ADDRESS, _STREAM = ctypes.c_uint64, ctypes.c_void_p
_ARGUMENTS = {
    "cuStreamWaitValue32_v2": (_STREAM, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (_STREAM, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _STREAM),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_void_p, ctypes.c_uint),
}


class DriverError(RuntimeError):
    """The driver is not there, is too old, or refused a call."""


def load() -> None:
    """Finds the entry points.

    Raises:
        DriverError: there is no driver, or an entry point is not in it.
    """
    _entries()


def wait(stream: int, address: int, value: int) -> None:
    """The stream goes on when the word is `value`. The word lies in its or in registered memory."""
    _call("cuStreamWaitValue32_v2", stream, address, value, EQUAL)


def write(stream: int, address: int, value: int) -> None:
    """Sets a word, likewise, after all that the stream did before."""
    _call("cuStreamWriteValue32_v2", stream, address, value, 0)


def copy(stream: int, target: int, source: int, size: int) -> None:
    """Copies bytes between any two of the mapped devices."""
    _call("cuMemcpyDtoDAsync_v2", target, source, size, stream)


def register(address: int, size: int) -> int:
    """Lets the current device reach host memory; gives its address there."""
    _call("cuMemHostRegister_v2", address, size, MAPPED)
    there = _ADDRESS()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), address, 0)
    return there.value


@lru_cache(None)
def _entries() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise DriverError(f"no CUDA driver ({problem}): install it") from None
    for name, arguments in _ARGUMENTS.items():
        try:
            getattr(library, name).argtypes = arguments
        except AttributeError:
            said = f"the CUDA driver has no {name}: update it to one for CUDA 12 or later"
            raise DriverError(said) from None
    return library


def _call(name: str, *arguments: object) -> None:
    library = _entries()
    status = getattr(library, name)(*arguments)
    if status:
        said = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(said))
        text = said.value.decode() if said.value else "unknown"
        raise DriverError(f"{name}{arguments}: CUDA error {status}, {text}")
