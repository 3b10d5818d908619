"""Calls of the CUDA driver, prepared once and issued often.

Above all, a stream sets or awaits words without a kernel, several in one call; PyTorch has nothing
of the kind. Streams, events and addresses are plain integers and belong to one context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

Call = tuple[Callable[..., int], tuple[object, ...]]  # an entry point, and its arguments in C


class WordOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of 32 bits. A call reads it when it is issued."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),  # a union of 32 and 64 bits; the lower half counts
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: memory of one process, for others of the host."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_Address, _Handle = ctypes.c_uint64, ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(_Handle),),
    "cuCtxSetCurrent": (_Handle,),
    "cuEventCreate": (ctypes.POINTER(_Handle), ctypes.c_uint),
    "cuEventRecord": (_Handle, _Handle),
    "cuIpcCloseMemHandle": (_Address,),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Address), IpcHandle, ctypes.c_uint),
    "cuMemAlloc_v2": (ctypes.POINTER(_Address), ctypes.c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_Address), ctypes.c_void_p, ctypes.c_uint),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, ctypes.c_size_t, _Handle),
    "cuStreamBatchMemOp_v2": (_Handle, ctypes.c_uint, ctypes.POINTER(WordOperation), ctypes.c_uint),
    "cuStreamWaitEvent": (_Handle, _Handle, ctypes.c_uint),
}


class DriverError(RuntimeError):
    """The driver is not there, is too old, or refused a call."""


def load() -> None:
    """Finds the entry points.

    Raises:
        DriverError: there is no driver, or an entry point is not in it.
    """
    _entries()


# At once


def context() -> int:
    """The current context. Raises DriverError: this thread has none."""
    found = _Handle()
    _now("cuCtxGetCurrent", ctypes.byref(found))
    if found.value is None:
        raise DriverError("no CUDA context is current")
    return found.value


def register(address: int, size: int) -> int:
    """Lets the current device reach host memory; gives its address there."""
    _now("cuMemHostRegister_v2", address, size, _MAPPED)
    there = _Address()
    _now("cuMemHostGetDevicePointer_v2", ctypes.byref(there), address, 0)
    return there.value


def allocate(size: int) -> int:
    """Memory of the current device."""
    made = _Address()
    _now("cuMemAlloc_v2", ctypes.byref(made), size)
    return made.value


def free(address: int) -> None:
    """Frees what `allocate` gave, when the device has done with it."""
    _now("cuMemFree_v2", address)


def share(address: int) -> str:
    """By what other processes of the host find memory that `allocate` gave."""
    handle = IpcHandle()
    _now("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle).hex()


def attach(handle: str) -> int:
    """The address, for the current device, of what another process has shared."""
    there = _Address()
    memory = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    _now("cuIpcOpenMemHandle_v2", ctypes.byref(there), memory, _LAZY_PEER_ACCESS)
    return there.value


def detach(address: int) -> None:
    _now("cuIpcCloseMemHandle", address)


def new_event() -> int:
    """An event that has passed."""
    made = _Handle()
    _now("cuEventCreate", ctypes.byref(made), _NO_TIMING)
    assert made.value is not None
    return made.value


# Prepared


def enter(context: int) -> Call:
    """Makes a context the current one: a thread may have none before it calls CUDA's runtime."""
    return _entries()["cuCtxSetCurrent"], (_Handle(context),)


def copy(stream: int, target: int, source: int, size: int) -> Call:
    """Copies bytes between any two of the mapped devices."""
    arguments = (_Address(target), _Address(source), ctypes.c_size_t(size), _Handle(stream))
    return _entries()["cuMemcpyDtoDAsync_v2"], arguments


def record(stream: int, event: int) -> Call:
    return _entries()["cuEventRecord"], (_Handle(event), _Handle(stream))


def await_event(stream: int, event: int) -> Call:
    return _entries()["cuStreamWaitEvent"], (_Handle(stream), _Handle(event), ctypes.c_uint(0))


def wait(address: int, value: int) -> WordOperation:
    """A stream goes on when the word is `value`. The word lies in registered memory."""
    return WordOperation(_WAIT, address, value, _EQUAL)


def write(address: int, value: int) -> WordOperation:
    """Sets a word, after all that the stream did before."""
    return WordOperation(_WRITE, address, value)


def batch(stream: int, operations: Sequence[WordOperation]) -> tuple[Call, list[WordOperation]]:
    """The operations in one call, in order, and what it will read: their values may be changed."""
    array = (WordOperation * len(operations))(*operations)
    arguments = (_Handle(stream), ctypes.c_uint(len(array)), array, ctypes.c_uint(0))
    return (_entries()["cuStreamBatchMemOp_v2"], arguments), [array[i] for i in range(len(array))]


def issue(calls: Iterable[Call]) -> None:
    """Makes prepared calls, in order.

    Raises:
        DriverError: one is refused.
    """
    for entry, arguments in calls:
        if status := entry(*arguments):
            raise _refused(entry.__name__, status)


@lru_cache(None)
def _entries() -> dict[str, Callable[..., int]]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise DriverError(f"no CUDA driver ({problem}): install it") from None
    entries = {}
    for name, arguments in _ARGUMENTS.items():
        try:
            entries[name] = getattr(library, name)
        except AttributeError:
            said = f"the CUDA driver has no {name}: update it to one for CUDA 12 or later"
            raise DriverError(said) from None
        entries[name].argtypes = arguments
    return entries


def _now(name: str, *arguments: object) -> None:
    if status := _entries()[name](*arguments):
        raise _refused(name, status)


def _refused(name: str, status: int) -> DriverError:
    said = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorString(status, ctypes.byref(said))
    text = said.value.decode() if said.value else "unknown"
    return DriverError(f"{name}: CUDA error {status}, {text}")
