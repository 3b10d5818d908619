"""Finds the schedule of a call, and links it: fills in the addresses that one process alone has."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ringfa3.kernels import dispatch, forward
from ringfa3.kernels.dispatch import has_kernels, log_once
from ringfa3.kernels.launch import entry_address, num_ctas
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import ALIGNMENT, Gpu, ScheduleError
from ringfa3.kernels.uploads import upload
from ringfa3.pass_interface import HostCode
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.schedules.encoded import EncodedSchedule, Part, numbered_symbol
from ringfa3.schedules.schedule import DTYPES, Inputs, build

_built = 0

# The address of a symbol, by its type, from what follows the type.
Resolvers = Mapping[str, Callable[..., int]]


class Signature(NamedTuple):
    """What the schedule of a plan's call depends on.

    settings: on which launches depend, besides the inputs. layouts: of the inputs, by `layouts_of`.
    """

    pass_type: str
    num_sms: int
    settings: Hashable
    layouts: bytes


def signature_of(
    pass_type: str, inputs: Inputs, settings: Hashable, gpu: Gpu | None = None
) -> Signature:
    """The signature of a plan's call; the first input is given. gpu: as in `build`."""
    assert inputs[0] is not None
    sms = num_ctas(inputs[0].device) if gpu is None else gpu.num_sms
    return Signature(pass_type, sms, settings, layouts_of(inputs))


SCALAR_TYPES = {**DTYPES, torch.float64: 7}  # c10::ScalarType


def layouts_of(inputs: Inputs) -> bytes:
    """Shapes, strides, dtypes and alignments of inputs as words, as `Key` of csrc/host/key.h.

    TMA addresses 16 bytes, so steps depend on where in 16 bytes an input begins.
    """
    words: list[int] = []
    for x in inputs:
        if x is None:
            words.append(-1)
        else:
            begin = x.data_ptr() % ALIGNMENT
            words.append(x.dim() | SCALAR_TYPES[x.dtype] << 8 | begin << 16)
            words += (*x.shape, *x.stride())
    return struct.pack(f"={len(words)}q", *words)


class _Layout(NamedTuple):
    """Of an input; `dtype` is a number."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    alignment: int


def _decoded(layouts: bytes) -> list[_Layout | None]:
    words = list(struct.unpack(f"={len(layouts) // 8}q", layouts))
    found: list[_Layout | None] = []
    while words:
        first = words.pop(0)
        if first < 0:
            found.append(None)
            continue
        dims = first & 255
        shape, strides = tuple(words[:dims]), tuple(words[dims : 2 * dims])
        found.append(_Layout(shape, strides, first >> 8 & 255, first >> 16))
        del words[: 2 * dims]
    return found


def _differences(wanted: Signature, found: Signature) -> list[str]:
    """The names of what differs, without values: there are finitely many such lists."""
    names = [
        name for name in ("num_sms", "settings") if getattr(wanted, name) != getattr(found, name)
    ]
    pairs = list(zip(_decoded(wanted.layouts), _decoded(found.layouts), strict=True))
    if any((x is None) != (y is None) for x, y in pairs):
        names.append("optional inputs (sink, gradient of LSE)")
    both = [(x, y) for x, y in pairs if x is not None and y is not None]
    for name in _Layout._fields:
        if any(getattr(x, name) != getattr(y, name) for x, y in both):
            names.append(name)
    return names


def schedule_of(
    plan: ContextPlan,
    signature: Signature,
    inputs: Inputs,
    code: HostCode,
    use_prepared: bool = True,
) -> EncodedSchedule | None:
    """The schedule of a call with this host code, as it was prepared or built now.

    None: no schedule describes the call.
    """
    prepared: dict[Any, EncodedSchedule] = plan.prepared if use_prepared else {}
    found = prepared.get(signature)
    first = inputs[0]
    assert first is not None
    if found is None:
        alike = [x for x in list(prepared) if x.pass_type == signature.pass_type]
        nearest = min((_differences(signature, x) for x in alike), key=len, default=["pass_type"])
        if prepared:
            log_once(
                f"{signature.pass_type}: the KernelSpecs of a plan differ from a call in "
                f"{', '.join(nearest)}, so the call builds a schedule; give plan_context the "
                "KernelSpec of the call"
            )
    elif dispatch.unit_for("forward", first) is not None and has_kernels(
        x[1] for x in found.symbols if x[0] == "entry"
    ):
        return found
    global _built
    _built += 1
    try:
        return build(inputs, code).encode()
    except ScheduleError:
        return None


def schedules_built() -> int:
    """How many schedules of ring calls this process has built at a call, prepared ones apart."""
    return _built


class Addresses:
    """Addresses of symbols in this process, each looked up once, for calls of one stream.

    resolve     the address of a symbol, by its type, from what follows the type
    of_numbers  by the number of a symbol; UNKNOWN before its look-up
    """

    def __init__(self, resolve: Resolvers, tensor_of: Callable[[Part], torch.Tensor]) -> None:
        """tensor_of: memory of a symbol."""
        self._resolve, self.tensor_of = resolve, tensor_of
        self._lock = threading.Lock()
        self.of_numbers = array("q")

    @classmethod
    def of_one_gpu(cls, stream: CurrentStream) -> Addresses:
        """A call on one GPU has kernels and a work counter."""
        return cls(kernel_resolvers(stream), _no_memory)

    def look_up(self, numbers: Iterable[int]) -> None:
        """Adds the addresses of symbols that have none; negative numbers are no symbols.

        Raises BuildError, OSError: a kernel cannot be built or loaded.
        """
        with self._lock:
            known = self.of_numbers
            for number in {x for x in numbers if x >= 0}:
                known.extend([UNKNOWN] * (number + 1 - len(known)))
                if known[number] != UNKNOWN:
                    continue
                name, *rest = numbered_symbol(number)
                known[number] = _signed(self._resolve[name](*rest))
                if name == "entry":
                    _loaded.add(number)


UNKNOWN = -(1 << 63)  # no address of memory; kUnknown of csrc/host/program.h
_loaded: set[int] = set()  # symbols of kernels


def kernels_loaded(schedule: EncodedSchedule) -> bool:
    """Whether this process has loaded all kernels of a schedule for a program."""
    return schedule.references.kernels <= _loaded


def kernel_resolvers(stream: CurrentStream) -> Resolvers:
    """Of launches on a stream. The process never frees a work counter."""
    return {
        "entry": entry_address,
        "counter": lambda: forward.counters.get(stream).data_ptr(),
    }


def _no_memory(part: Part) -> torch.Tensor:
    raise AssertionError(f"a call of one GPU has no {part.symbol}")


def upload_tables(schedules: Iterable[EncodedSchedule], stream: CurrentStream) -> None:
    """Uploads the tables of schedules, a plan's, by one copy."""
    upload([table.copy for schedule in schedules for table in schedule.tables], stream)


def link(
    library: Any, schedule: EncodedSchedule, stream: CurrentStream, addresses: Addresses
) -> Any:
    """The program of the C++ launcher for calls on a stream, that of the addresses. Uploads tables
    that no call has needed.

    Raises BuildError, OSError: a kernel cannot be built or loaded.
    """
    given = link_arguments(schedule, memory_of(schedule, stream, addresses), addresses)
    made = library.program(*given)
    if made is None:
        addresses.look_up(schedule.references.numbers)
        made = library.program(*given)
    return made


def memory_of(
    schedule: EncodedSchedule, stream: CurrentStream, addresses: Addresses
) -> tuple[torch.Tensor, ...]:
    """The memory of a program: parts, then tables, which are uploaded."""
    tables = [table.copy.on(stream).memory for table in schedule.tables]

    def tensor_of(part: Part) -> torch.Tensor:
        name, *rest = part.symbol
        if name != "table":
            return addresses.tensor_of(part)
        table = tables[rest[0]].view(part.dtype)
        return table[part.offset :].as_strided(part.shape, part.stride)

    return *map(tensor_of, schedule.parts), *tables


def link_arguments(
    schedule: EncodedSchedule, memory: tuple[torch.Tensor, ...], addresses: Addresses
) -> tuple[object, ...]:
    """What `program` of the C++ launcher takes; memory: from `memory_of`."""
    numbers = schedule.references.numbers
    return schedule.words, schedule.at, numbers, addresses.of_numbers, memory, schedule.held


def _signed(address: int) -> int:
    """64 bits as the signed integer with the same bits."""
    return address - (1 << 64) if address >= 1 << 63 else address
