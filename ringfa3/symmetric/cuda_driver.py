"""Calls of the CUDA driver, prepared once and issued often.

Most are stream memory operations, which PyTorch lacks: a stream sets or waits for words without a
kernel, several in one call. Streams, events and addresses are integers and belong to one context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

Call = tuple[Callable[..., int], tuple[object, ...]]  # an entry point, and its arguments in C


class MemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams for a 32-bit value. The driver reads it when the call is issued."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),  # a union: 32-bit operations read the lower half
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: memory of one process that others of its host can map."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_Address, _Handle = ctypes.c_uint64, ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(_Handle),),
    "cuCtxSetCurrent": (_Handle,),
    "cuEventCreate": (ctypes.POINTER(_Handle), ctypes.c_uint),
    "cuEventDestroy_v2": (_Handle,),
    "cuEventRecord": (_Handle, _Handle),
    "cuIpcCloseMemHandle": (_Address,),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Address), IpcHandle, ctypes.c_uint),
    "cuMemAlloc_v2": (ctypes.POINTER(_Address), ctypes.c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_Address), ctypes.c_void_p, ctypes.c_uint),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, ctypes.c_size_t, _Handle),
    "cuStreamBatchMemOp_v2": (_Handle, ctypes.c_uint, ctypes.POINTER(MemoryOp), ctypes.c_uint),
    "cuStreamWaitEvent": (_Handle, _Handle, ctypes.c_uint),
}


class DriverError(RuntimeError):
    """There is no driver, it is too old, or a call failed."""


def load() -> None:
    """Loads the entry points.

    Raises:
        DriverError: there is no driver, or it lacks an entry point.
    """
    _entries()


def entry_address(name: str) -> int:
    """The address of an entry point."""
    found: Any = _entries()[name]
    return cast(int, ctypes.cast(found, ctypes.c_void_p).value)


# Calls made at once


def current_context() -> int:
    """Raises DriverError: this thread has none."""
    current = _Handle()
    _now("cuCtxGetCurrent", ctypes.byref(current))
    if current.value is None:
        raise DriverError("no CUDA context is current")
    return current.value


def register_host_memory(address: int, size: int) -> int:
    """Maps host memory for the current device; returns its address there."""
    _now("cuMemHostRegister_v2", address, size, _MAPPED)
    mapped = _Address()
    _now("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, 0)
    return mapped.value


def unregister_host_memory(address: int) -> None:
    """Ends `register_host_memory`; takes the host's address."""
    _now("cuMemHostUnregister", address)


def allocate(size: int) -> int:
    """The address of `size` new bytes on the current device."""
    allocated = _Address()
    _now("cuMemAlloc_v2", ctypes.byref(allocated), size)
    return allocated.value


def free(address: int) -> None:
    """Frees memory of `allocate`, after the device's work on it."""
    _now("cuMemFree_v2", address)


def ipc_handle(address: int) -> str:
    """A handle by which other processes of the host can map memory of `allocate`."""
    handle = IpcHandle()
    _now("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle).hex()


def ipc_open(handle: str) -> int:
    """Maps another process's memory for the current device; returns its address there."""
    mapped = _Address()
    memory = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    _now("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), memory, _LAZY_PEER_ACCESS)
    return mapped.value


def ipc_close(address: int) -> None:
    """Unmaps memory of `ipc_open`."""
    _now("cuIpcCloseMemHandle", address)


def new_event() -> int:
    """An event that counts as passed until it is recorded."""
    event = _Handle()
    _now("cuEventCreate", ctypes.byref(event), _NO_TIMING)
    assert event.value is not None
    return event.value


def destroy_event(event: int) -> None:
    _now("cuEventDestroy_v2", event)


# Calls prepared for `issue`


def set_context(context: int) -> Call:
    """Makes a context current: a thread may have none before it calls CUDA's runtime."""
    return _entries()["cuCtxSetCurrent"], (_Handle(context),)


def copy(stream: int, target: int, source: int, size: int) -> Call:
    """Copies `size` bytes between any devices whose memory is mapped here."""
    arguments = (_Address(target), _Address(source), ctypes.c_size_t(size), _Handle(stream))
    return _entries()["cuMemcpyDtoDAsync_v2"], arguments


def record(stream: int, event: int) -> Call:
    return _entries()["cuEventRecord"], (_Handle(event), _Handle(stream))


def wait_event(stream: int, event: int) -> Call:
    return _entries()["cuStreamWaitEvent"], (_Handle(stream), _Handle(event), ctypes.c_uint(0))


def wait(address: int, value: int) -> MemoryOp:
    """The stream waits until the word, in memory that the device addresses, is `value`."""
    return MemoryOp(_WAIT, address, value, _EQUAL)


def write(address: int, value: int) -> MemoryOp:
    """The stream sets a word after all its earlier operations."""
    return MemoryOp(_WRITE, address, value)


def batch_memory_ops(stream: int, operations: Sequence[MemoryOp]) -> tuple[Call, list[MemoryOp]]:
    """One call of the operations, in order, and the operations that it reads when it is issued:
    their values may change until then."""
    array = (MemoryOp * len(operations))(*operations)
    arguments = (_Handle(stream), ctypes.c_uint(len(array)), array, ctypes.c_uint(0))
    return (_entries()["cuStreamBatchMemOp_v2"], arguments), [array[i] for i in range(len(array))]


def issue(calls: Iterable[Call]) -> None:
    """Makes prepared calls, in order.

    Raises:
        DriverError: one fails.
    """
    for entry, arguments in calls:
        if status := entry(*arguments):
            raise error(entry.__name__, status)


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
            raise DriverError(
                f"the CUDA driver has no {name}: update it to one for CUDA 12 or later"
            ) from None
        entries[name].argtypes = arguments
    return entries


def _now(name: str, *arguments: object) -> None:
    if status := _entries()[name](*arguments):
        raise error(name, status)


def error(name: str, status: int) -> DriverError:
    """The error of a call that has returned a status."""
    string = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorString(status, ctypes.byref(string))
    text = string.value.decode() if string.value else "unknown"
    return DriverError(f"{name}: CUDA error {status}, {text}")
