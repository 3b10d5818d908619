"""Starts kernels: finds their entry points, packs their arguments, addresses their tensors.

The structures mirror csrc/params.h field by field. A ring launches many kernels, so a launch may
cost the host a few microseconds only: this module packs arguments as bytes in one step, and takes
numbers from PyTorch rather than objects.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from ringfa3.kernels.streams import CurrentStream, on
from ringfa3.kernels.symbolic import current_builder, gpu_elsewhere

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit

INSUFFICIENT_DRIVER = 35  # of cudaError: older than the CUDA runtime in the library
OLD_DRIVER = " (the driver is too old for the kernels: update it to 580 or later)"
L2_BYTES = 32 << 20  # of the L2 cache, that K and V of a head section may take


class Tensor3(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


_CODES = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_int32: "i", ctypes.c_float: "f"}


def pointer_offsets(structure: type[ctypes.Structure]) -> tuple[int, ...]:
    """The first byte of every pointer in a structure."""
    return tuple(offset for offset, ctype in _scalars(structure) if ctype is ctypes.c_void_p)


def packer(structure: type[ctypes.Structure]) -> Callable[..., bytes]:
    """A function from the values of a structure's fields, nested ones flattened, to its bytes.

    It is several times faster than filling in the structure. A null pointer is 0.
    """
    layout, size = "=", 0
    for offset, ctype in _scalars(structure):
        layout += f"{offset - size}x{_CODES[ctype]}"
        size = offset + ctypes.sizeof(ctype)
    return struct.Struct(f"{layout}{ctypes.sizeof(structure) - size}x").pack


def _scalars(structure: type[ctypes.Structure], base: int = 0) -> Iterator[tuple[int, Any]]:
    """(offset, type) of every number in a structure, in order."""
    fields: Any = structure._fields_
    for name, ctype in fields:
        offset = base + getattr(structure, name).offset
        if issubclass(ctype, ctypes.Structure):
            yield from _scalars(ctype, offset)
        elif issubclass(ctype, ctypes.Array):
            member: Any = ctype._type_
            size = ctypes.sizeof(member)
            yield from ((offset + i * size, member) for i in range(ctype._length_))
        else:
            yield offset, ctype


Fields: TypeAlias = tuple[int, int, int, int, int, int]  # of a Tensor3


def tensor3(x: torch.Tensor) -> Fields:
    """The fields of a Tensor3 for (tokens, heads, head_dim)."""
    token_stride, head_stride, _ = x.stride()
    return x.data_ptr(), *x.shape, token_stride, head_stride


def launch(unit: Unit, name: str, args: bytes, stream: CurrentStream) -> None:
    """Calls ringfa3_NAME of a unit's library, or adds the call to the schedule that is built.

    Raises RuntimeError: CUDA refuses the launch.
    """
    builder = current_builder()
    if builder is not None:
        builder.launch(unit, name, args)
        return
    with on(stream.device):
        status = _entry(unit, name)(args, stream.handle)
    if status:
        remedy = OLD_DRIVER if status == INSUFFICIENT_DRIVER else ""
        text = f"{name} of {unit.name} could not be launched: CUDA error {status}{remedy}"
        raise RuntimeError(text)


def entry_address(unit: Unit, name: str) -> int:
    """The address of ringfa3_NAME of a unit's library."""
    found: Any = _entry(unit, name)
    return cast(int, ctypes.cast(found, ctypes.c_void_p).value)


@lru_cache(None)
def _entry(unit: Unit, name: str) -> Callable[..., int]:
    from ringfa3.build.compile import ensure_library

    entry = getattr(ctypes.CDLL(str(ensure_library(unit))), f"ringfa3_{name}")
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return cast(Callable[..., int], entry)


def tma_fields(x: torch.Tensor) -> Fields | None:
    """As `tensor3`; None if TMA cannot address x: its strides and begin must be whole 16 bytes."""
    tokens, heads, head_dim = x.shape
    token_stride, head_stride, last = x.stride()
    begin = x.data_ptr()
    if last != 1 or token_stride <= 0 or head_stride <= 0:
        return None
    if ((token_stride | head_stride) * x.element_size() | begin) % 16:
        return None
    return begin, tokens, heads, head_dim, token_stride, head_stride


def tma_addressable(x: torch.Tensor) -> tuple[torch.Tensor, Fields]:
    """`x`, or a copy of it that TMA can address, and its fields."""
    fields = tma_fields(x)
    if fields is None:  # not `contiguous`, which may return a tensor that begins anywhere
        x = x.clone(memory_format=torch.contiguous_format)
        fields = tensor3(x)
    return x, fields


@lru_cache(4096)
def heads_per_section(bytes_per_head: int, kv_heads: int) -> int:
    """KV heads of a section: sections of equal size, whose tensors fit the L2 cache."""
    sections = max(1, min(kv_heads, round(bytes_per_head * kv_heads / L2_BYTES)))
    return -(-kv_heads // sections)


def num_ctas(device: torch.device) -> int:
    """CTAs of a persistent launch: one per SM."""
    gpu = gpu_elsewhere()
    return gpu.num_sms if gpu is not None else _num_sms(device.index)


@lru_cache(None)
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
