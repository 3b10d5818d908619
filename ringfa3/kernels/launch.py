"""The compiled kernels, called: device tables of a plan, and the arguments that cross into C.

The structures mirror csrc/params.h field by field. A ring launches many kernels, so what every
launch does costs the host a few microseconds: arguments are packed as bytes in one step, and
PyTorch is asked for numbers, not for objects.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.planning.tiling import Table, Tiling

if TYPE_CHECKING:  # imported where it is used, so that `python -m ringfa3.build` can be run
    from ringfa3.build.units import Unit

L2_BYTES = 32 << 20  # that heads which run together may share
WORDS = 32  # arrival words of a launch, number 0 among them


class Tensor3(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class ForwardArgs(ctypes.Structure):
    _fields_ = (
        ("q", Tensor3),
        ("k", Tensor3),
        ("v", Tensor3),
        ("out", Tensor3),
        ("partial_out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("lse_head_stride", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("head_section", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


_CODES = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_int32: "i", ctypes.c_float: "f"}


def packer(structure: type[ctypes.Structure]) -> Callable[..., bytes]:
    """The function that makes a structure's bytes of the values of its fields, nested ones flat.

    Several times faster than filling in the structure. A null pointer is 0.
    """
    layout, size = "=", 0
    for offset, kind in _scalars(structure):
        layout += f"{offset - size}x{_CODES[kind]}"
        size = offset + ctypes.sizeof(kind)
    return struct.Struct(f"{layout}{ctypes.sizeof(structure) - size}x").pack


def _scalars(structure: type[ctypes.Structure], base: int = 0) -> Iterator[tuple[int, Any]]:
    """(offset, type) of every number in a structure, in order."""
    fields: Any = structure._fields_
    for name, kind in fields:
        offset = base + getattr(structure, name).offset
        if issubclass(kind, ctypes.Structure):
            yield from _scalars(kind, offset)
        else:
            yield offset, kind


_pack_forward = packer(ForwardArgs)


Fields: TypeAlias = tuple[int, int, int, int, int]  # of a Tensor3


def tensor3(x: torch.Tensor) -> Fields:
    """The fields of a Tensor3 for (tokens, heads, head_dim)."""
    tokens, heads, _ = x.shape
    token_stride, head_stride, _ = x.stride()
    return x.data_ptr(), tokens, heads, token_stride, head_stride


def unit_for(direction: str, q: torch.Tensor) -> Unit | None:
    """The "forward" or "backward" unit for queries like `q` (t, h, d); None: there is no kernel."""
    return _unit_for(direction, q.device, q.dtype, q.shape[-1]) if q.is_cuda else None


@lru_cache(None)
def _unit_for(
    direction: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Unit | None:
    from ringfa3.build.units import UNITS

    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    wanted = (direction, str(dtype).removeprefix("torch."), head_dim)
    return next((u for u in UNITS if (u.direction, u.dtype, u.head_dim) == wanted), None)


@lru_cache(None)
def _entry(unit: Unit, name: str) -> Callable[..., int]:
    from ringfa3.build.compile import ensure_library

    entry = getattr(ctypes.CDLL(str(ensure_library(unit))), f"ringfa3_{name}")
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return cast(Callable[..., int], entry)


class Stream(NamedTuple):
    """Where launches go: what is the current stream of a device."""

    device: torch.device
    handle: int
    captured: bool  # into a CUDA graph

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        with on(device):
            return cls(device, _handle(device.index), torch.cuda.is_current_stream_capturing())


_HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, if it is not."""
    return _HERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def _handle(device: int) -> int:
    """Of the current stream, without the object that `torch.cuda.current_stream` makes."""
    return torch._C._cuda_getCurrentRawStream(device)


def launch(unit: Unit, name: str, args: bytes, stream: Stream) -> None:
    """Calls ringfa3_NAME of a unit's library."""
    with on(stream.device):
        status = _entry(unit, name)(args, stream.handle)
    if status:
        raise RuntimeError(f"{name} of {unit.name} could not be launched: CUDA error {status}")


def attend(
    unit: Unit,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiling: Tiling,
    scale: float,
    out: torch.Tensor,
    running: torch.Tensor,
    lse: torch.Tensor,
    arrivals: torch.Tensor | None = None,
    sm_margin: int = 0,
) -> None:
    """`reference.attend` on the GPU: one hop, tiles of `unit.tile_m` rows; shapes as there.

    Heads and tokens may have any stride of whole 16 bytes; q, k and v of others, and those that do
    not begin on 16 bytes, are copied. Calls may run on any number of streams at once, and in CUDA
    graphs that replay beside them.

    Args:
        arrivals: (words,) int32, at most 32, on the device. Keys of a span with arrival n > 0 are
            first read once arrivals[n] is not 0, so a copy that writes them and then the word may
            run beside the kernel; but no kernel may, which could find no SM free. A negative word
            calls the span off: the kernel ends without reading its keys, and where a row of a tile
            would have seen them, out (or running) and lse of the whole tile are NaN. K and V that
            wait must not need a copy.
        sm_margin: SMs left free, for kernels that run beside this one.

    Raises ValueError: spans wait, and `arrivals` is missing or does not fit; `sm_margin` leaves no
    SM; `out` has another stride. RuntimeError: the first call with a tiling is captured.
    """
    num_ctas = ctas(q.device, sm_margin)
    if not len(tiling.tiles):
        return
    if not len(tiling.spans):  # nothing is seen, here or at another hop
        out.zero_()
        lse.fill_(-torch.inf)
        return
    out_fields = _fields(out)
    if out_fields is None:
        raise ValueError(f"out has strides {out.stride()}: all but the last must be whole 16 bytes")
    heads, (tokens, kv_heads, head_dim) = q.shape[1], k.shape
    stream = Stream.current(q.device)
    tables = _tables.get(tiling, stream, (), lambda: _Tables.of(tiling, q.device))
    if tables.last_word:
        _check_arrivals(arrivals, tables.last_word, k, v)
    q, q_fields = addressable(q)
    k, k_fields = addressable(k)
    v, v_fields = addressable(v)
    args = _pack_forward(
        *q_fields,
        *k_fields,
        *v_fields,
        *out_fields,
        running.data_ptr(),
        lse.data_ptr(),
        lse.stride(0),
        tables.tiles.data_ptr(),
        tables.spans.data_ptr(),
        0 if arrivals is None else arrivals.data_ptr(),
        _counter(stream).data_ptr(),
        len(tiling.tiles),
        heads_together(2 * tokens * head_dim * k.itemsize, kv_heads) * (heads // kv_heads),
        num_ctas,
        scale,
    )
    launch(unit, "forward", args, stream)


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counter(stream: Stream) -> torch.Tensor:
    """(1,) int32, zero whenever a launch on the stream begins.

    A kernel leaves it zero, so the launches of a stream, which run one after the other, share one.
    A captured launch has its own, zeroed within the graph: graphs may replay on any stream.
    """
    known = None if stream.captured else _counters.get(stream[:2])
    if known is None:
        known = torch.zeros(1, dtype=torch.int32, device=stream.device)
        if not stream.captured:
            known = _counters.setdefault(stream[:2], known)
    return known


def _check_arrivals(
    arrivals: torch.Tensor | None, last: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Raises ValueError unless words up to number `last` can be waited for."""
    if arrivals is None:
        raise ValueError(f"spans wait for words up to {last}: arrivals is missing")
    given = f"arrivals is {arrivals.dtype} {tuple(arrivals.shape)} on {arrivals.device}"
    whole = arrivals.dtype == torch.int32 and arrivals.dim() == 1 and arrivals.is_contiguous()
    if not whole or arrivals.device != k.device:
        raise ValueError(f"{given}: it must be contiguous int32 (words,) on {k.device}")
    if not last < len(arrivals) <= WORDS:
        raise ValueError(f"{given}: {last + 1} to {WORDS} words are allowed")
    if not (aligned(k) and aligned(v)):
        raise ValueError("k and v that wait for arrival words need strides of whole 16 bytes")


def aligned(x: torch.Tensor) -> bool:
    """Whether the bulk copies of the GPU can address it, (tokens, heads, d)."""
    return _fields(x) is not None


def _fields(x: torch.Tensor) -> Fields | None:
    """As `tensor3`, if bulk copies can address it: asked of PyTorch once, as all numbers cost."""
    tokens, heads, _ = x.shape
    token_stride, head_stride, last = x.stride()
    begin = x.data_ptr()
    if last != 1 or token_stride <= 0 or head_stride <= 0:
        return None
    if ((token_stride | head_stride) * x.element_size() | begin) % 16:
        return None
    return begin, tokens, heads, token_stride, head_stride


def addressable(x: torch.Tensor) -> tuple[torch.Tensor, Fields]:
    """`x`, or a copy that bulk copies can address, for a Tensor3.

    Not `contiguous`, which returns what begins anywhere.
    """
    fields = _fields(x)
    if fields is None:
        x = x.clone(memory_format=torch.contiguous_format)
        fields = tensor3(x)
    return x, fields


@lru_cache(4096)
def heads_together(bytes_per_head: int, kv_heads: int) -> int:
    """KV heads that run together: sections of equal size whose tensors fit the L2 cache."""
    sections = max(1, min(kv_heads, round(bytes_per_head * kv_heads / L2_BYTES)))
    return -(-kv_heads // sections)


def ctas(device: torch.device, sm_margin: int) -> int:
    """CTAs of a launch, one per SM. Raises ValueError: a margin that leaves none."""
    processors = _processors(device.index)
    if not 0 <= sm_margin < processors:
        raise ValueError(f"sm_margin={sm_margin}: 0 to {processors - 1} are allowed on {device}")
    return processors - sm_margin


@lru_cache(None)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


T = TypeVar("T")


class Uploads(Generic[T]):
    """What kernels read of plans or tilings in device memory; it goes with its owner.

    Uploaded once for each stream that reads it: so the upload comes before the launches, and what
    the memory holds next after them. A captured launch, which cannot upload, reads what an earlier
    call on any stream did; that is kept for good, for the graph has its addresses.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[object, dict[tuple[object, ...], T]]
        self._known = weakref.WeakKeyDictionary()
        self._captured: set[object] = set()

    def get(
        self, owner: object, stream: Stream, key: tuple[object, ...], make: Callable[[], T]
    ) -> T:
        """What `make` uploads for owner and key, known or new. RuntimeError: new and captured."""
        known = self._known.get(owner)
        if known is None:
            known = self._known.setdefault(owner, {})
        anywhere = (stream.device, *key)  # the first upload, whatever stream it was on
        here = anywhere if stream.captured else (*anywhere, stream.handle)
        found = known.get(here)
        if found is None:
            if stream.captured:
                raise RuntimeError("attention with a new plan is captured: run it once before")
            found = known[here] = make()
            known.setdefault(anywhere, found)
        if stream.captured:
            self._captured.add(owner)
        return found

    def clear(self) -> None:
        self._known.clear()
        self._captured.clear()


class _Tables(NamedTuple):
    """A tiling in device memory, and the highest arrival word of its spans."""

    tiles: torch.Tensor
    spans: torch.Tensor
    last_word: int

    @classmethod
    def of(cls, tiling: Tiling, device: torch.device) -> _Tables:
        """Of a tiling that has spans."""
        tiles, spans = (upload(table, device) for table in (tiling.tiles, tiling.spans))
        return cls(tiles, spans, int(tiling.spans["arrival"].max()))


_tables: Uploads[_Tables] = Uploads()


def upload(table: Table | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """The records of a table, as int32 words in device memory."""
    words = np.frombuffer(table.tobytes(), np.int32).copy()
    return torch.from_numpy(words).to(device, non_blocking=True)
