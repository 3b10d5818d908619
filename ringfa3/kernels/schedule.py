"""The schedule of a call: buffers to allocate, then launches, tensor operations and, in a ring,
calls of the driver.

The host code of a call runs on symbolic tensors to build it (`kernels.symbolic`), so all addresses
are (base, offset). The C++ launcher runs the schedule for calls with equal shapes, strides and
settings, on any tensors. csrc/host/program.h has its structure, csrc/host/read_program.h reads
`Schedule.words`.
"""

from __future__ import annotations

import array
import ctypes
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from ringfa3.kernels import backward, forward, local_kv
from ringfa3.kernels.launch import entry_address, pointer_offsets
from ringfa3.kernels.symbolic import (
    ALIGNMENT,
    Address,
    Base,
    ScheduleError,
    Shape,
    SymbolicTensor,
    as_tensor,
    building,
    contiguous_stride,
    decode,
    symbolic_input,
)

if TYPE_CHECKING:
    from ringfa3.build.units import Unit

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "forward": forward.ForwardArgs,
    "preprocess": backward.PreprocessArgs,
    "backward": backward.BackwardArgs,
    "postprocess": backward.PostprocessArgs,
    "publish": local_kv.PublishArgs,
    "add_returns": local_kv.AddReturnsArgs,
    "round_gradients": local_kv.RoundGradientsArgs,
}
LAUNCH, ZERO, COPY, DRIVER_CALL, MEMORY_OPS, SUM_COLUMNS = range(6)  # in words
POINTER = 8  # bytes
DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType
DRIVER_WORDS = 4  # arguments of a driver call, at most
LINE = 96  # characters

Inputs: TypeAlias = Sequence[torch.Tensor | None]
Results: TypeAlias = tuple[torch.Tensor, ...]


class View(NamedTuple):
    """A part of an input or a buffer, in elements; with a negative number a whole table."""

    tensor: int
    offset: int
    shape: Shape
    stride: Shape

    def words(self) -> Iterator[int]:
        yield from (self.tensor, self.offset, len(self.shape), *self.shape)
        yield from (len(self.stride), *self.stride)

    def text(self, names: Sequence[str]) -> str:
        if self.tensor < 0:
            return f"memory {-1 - self.tensor}"
        offset = f"+{self.offset}" if self.offset else ""
        return f"{names[self.tensor]}{offset}{list(self.shape)}"


class Launch(NamedTuple):
    """ringfa3_NAME of a unit; args have 0 where an address of `patches`, by byte, goes."""

    unit: Unit
    name: str
    args: bytes
    patches: tuple[tuple[int, Address], ...]

    def words(self, names: list[str]) -> list[int]:
        names.append(f"{self.name} of {self.unit.name}")
        words = array.array("q", self.args + bytes(-len(self.args) % POINTER))
        patches = (x for at, address in self.patches for x in (at, *address))
        head = LAUNCH, entry_address(self.unit, self.name), len(names) - 1, len(self.args)
        return [*head, *words, len(self.patches), *patches]

    def text(self, names: Sequence[str]) -> str:
        structure = STRUCTURES[self.name]
        fields = dict(zip(pointer_offsets(structure), pointer_names(structure), strict=True))
        found = [
            f"{fields[at]}={names[a.tensor]}{f'+{a.offset}' if a.offset else ''}"
            for at, a in self.patches
        ]
        line = f"launch {self.name} of {self.unit.name}: {' '.join(found)}"
        return textwrap.fill(line, LINE, subsequent_indent="    ", break_on_hyphens=False)


class Fill(NamedTuple):
    """Zeros in a view."""

    target: View

    def words(self, _: list[str]) -> list[int]:
        return [ZERO, *self.target.words()]

    def text(self, names: Sequence[str]) -> str:
        return f"zero {self.target.text(names)}"


class Combine(NamedTuple):
    """COPY: the source in the target. SUM_COLUMNS: target[i] is the sum of source[i]."""

    operation: int
    target: View
    source: View

    def words(self, _: list[str]) -> list[int]:
        return [self.operation, *self.target.words(), *self.source.words()]

    def text(self, names: Sequence[str]) -> str:
        name = "copy" if self.operation == COPY else "sum columns"
        return f"{name} {self.target.text(names)} <- {self.source.text(names)}"


class DriverCall(NamedTuple):
    """An entry point of the CUDA driver and its arguments in C."""

    entry: Any
    arguments: tuple[Any, ...]

    def words(self, names: list[str]) -> list[int]:
        address = cast(int, ctypes.cast(self.entry, ctypes.c_void_p).value)
        names.append(self.entry.__name__)
        values = [x.value or 0 for x in self.arguments]
        values += [0] * (DRIVER_WORDS - len(values))
        return [DRIVER_CALL, address, len(names) - 1, *values]

    def text(self, _: Sequence[str]) -> str:
        return str(self.entry.__name__)


class MemoryOps(NamedTuple):
    """A batch of memory operations of a stream.

    counts  of those that write the number of a wait: byte of the value, and the wait's stream
    """

    entry: Any
    stream: int
    number: int
    operations: bytes
    counts: tuple[tuple[int, int], ...]

    def words(self, names: list[str]) -> list[int]:
        address = cast(int, ctypes.cast(self.entry, ctypes.c_void_p).value)
        names.append(self.entry.__name__)
        head = MEMORY_OPS, address, len(names) - 1, self.stream, self.number, len(self.operations)
        counts = (x for count in self.counts for x in count)
        return [*head, *array.array("q", self.operations), len(self.counts), *counts]

    def text(self, _: Sequence[str]) -> str:
        return f"{self.entry.__name__} of {self.number}, {len(self.counts)} counted"


Step: TypeAlias = Launch | Fill | Combine | DriverCall | MemoryOps


class Buffer(NamedTuple):
    """Memory that the call allocates before a step."""

    shape: Shape
    dtype: torch.dtype
    first: int


class Schedule(NamedTuple):
    """What a call does.

    inputs   how many it has
    outputs  views of whole buffers
    tables   memory of other calls, too, whose addresses the steps have
    kept     objects that live as long
    posts    names of its waits for signals, for each stream, in order
    """

    inputs: int
    buffers: list[Buffer]
    steps: list[Step]
    outputs: list[View]
    tables: list[torch.Tensor]
    kept: list[object]
    posts: list[tuple[int, Sequence[str]]]

    def program(self, library: Any) -> Any:
        """The schedule as the C++ launcher holds it."""
        words, names = self.words()
        return library.program(words, names, tuple(self.tables), tuple(self.kept))

    def words(self) -> tuple[bytes, tuple[str, ...]]:
        """64-bit integers, and the names to which they refer."""
        names: list[str] = []
        whole: list[int] = [len(self.buffers)]
        for shape, dtype, first in self.buffers:
            whole += (DTYPES[dtype], first, len(shape), *shape)
        whole += (self.inputs, len(self.steps))
        for step in self.steps:
            whole += step.words(names)
        whole.append(len(self.outputs))
        for output in self.outputs:
            whole += output.words()
        return array.array("q", _signed(whole)).tobytes(), tuple(names)

    def text(self) -> str:
        """For people: a line for each buffer, step and output."""
        names = [f"in{n}" for n in range(self.inputs)]
        names += [f"b{n}" for n in range(len(self.buffers))]
        lines = []
        buffers = list(zip(names[self.inputs :], self.buffers, strict=True))
        for number, step in enumerate([*self.steps, None]):
            while buffers and (step is None or buffers[0][1].first <= number):
                name, (shape, dtype, _) = buffers.pop(0)
                lines.append(f"{name} = {str(dtype).removeprefix('torch.')}{list(shape)}")
            if step is not None:
                lines.append(step.text(names))
        lines += (f"return {view.text(names)}" for view in self.outputs)
        return "\n".join(lines)


class ScheduleBuilder:
    """`kernels.symbolic.Builder`: collects the steps of a call.

    It holds none of its tensors, which hold it: a cycle would keep a plan's tables until Python
    looks for cycles.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._remainders = [0 if x is None else x.data_ptr() % ALIGNMENT for x in inputs]
        self._made = Schedule(len(inputs), [], [], [], [], [], [])

    def symbolic(self, inputs: Inputs) -> list[torch.Tensor | None]:
        """The inputs of the call."""
        return [symbolic_input(self, number, x) for number, x in enumerate(inputs)]

    def new_buffer(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype not in DTYPES:
            raise ScheduleError(f"it allocates {dtype}")
        made, number = self._made, -1
        if all(shape):  # else nothing reads it
            number = made.inputs + len(made.buffers)
            made.buffers.append(Buffer(tuple(shape), dtype, len(made.steps)))
        base, stride = Base.of(number), contiguous_stride(shape)
        return as_tensor(SymbolicTensor(self, base, shape, stride, dtype, device))

    def zero(self, target: SymbolicTensor) -> None:
        if target.numel():
            self._made.steps.append(Fill(self._view(target)))

    def copy(self, target: SymbolicTensor, source: SymbolicTensor) -> None:
        if target.numel():
            self._made.steps.append(Combine(COPY, self._view(target), self._view(source)))

    def sum_columns(self, target: SymbolicTensor, source: SymbolicTensor) -> None:
        self._made.steps.append(Combine(SUM_COLUMNS, self._view(target), self._view(source)))

    def launch(self, unit: Unit, name: str, args: bytes) -> None:
        structure = STRUCTURES.get(name)
        if structure is None or ctypes.sizeof(structure) != len(args):
            raise ScheduleError(f"it launches {name}")
        patches, words = [], bytearray(args)
        for at in pointer_offsets(structure):
            value = int.from_bytes(args[at : at + POINTER], "little")
            address = decode(value)
            if address is not None:
                tensor, offset = address
                if tensor < len(self._remainders):
                    offset -= self._remainders[tensor]
                patches.append((at, Address(tensor, offset)))
                words[at : at + POINTER] = bytes(POINTER)
            elif value and not any(_contains(x, value) for x in self._made.tables):
                raise ScheduleError(f"{name} reads memory that nobody holds")
        self._made.steps.append(Launch(unit, name, bytes(words), tuple(patches)))

    def calls(
        self, call: tuple[Any, tuple[Any, ...]], counts: Iterable[tuple[int, ctypes.Structure]]
    ) -> None:
        """A call of the CUDA driver, an entry point and its arguments in C.

        counts: memory operations, some of them the call's, whose values are numbers of waits, and
        the numbers of their streams
        """
        entry, arguments = call
        arrays = [x for x in arguments if isinstance(x, ctypes.Array)]
        if not arrays:
            self._made.steps.append(DriverCall(entry, arguments))
            return
        begin, (stream, number, operations, _) = ctypes.addressof(arrays[0]), arguments
        data = bytes(operations)
        here = [(x, ctypes.addressof(x) - begin, on) for on, x in counts]
        counted = ((at + type(x).value.offset, on) for x, at, on in here if 0 <= at < len(data))
        values = stream.value or 0, number.value
        self._made.steps.append(MemoryOps(entry, *values, data, tuple(counted)))

    def holds(self, memory: object) -> None:
        self._made.tables.extend(_tensors(memory))

    def posts(self, stream: int, names: Sequence[str]) -> None:
        """Names of waits of a stream, in order."""
        self._made.posts.append((stream, names))

    def keeps(self, plan: object) -> None:
        self._made.kept.append(plan)

    def _view(self, x: SymbolicTensor) -> View:
        if x.base.memory is not None:
            memory = x.base.memory
            part = memory.as_strided(x.shape, x.stride(), memory.storage_offset() + x.offset)
            self._made.tables.append(part)
            return View(-len(self._made.tables), 0, (), ())
        return View(x.base.number, x.offset, tuple(x.shape), x.stride())

    def finish(self, results: Results) -> Schedule:
        """The schedule of a call that returns these.

        Raises ScheduleError: the call launches no kernel, or returns parts of tensors.
        """
        made = self._made
        if not any(isinstance(step, Launch) for step in made.steps):
            raise ScheduleError("it launches no kernel")
        made.outputs.extend(self._output(x) for x in results)
        if len({view.tensor for view in made.outputs}) < len(made.outputs):
            raise ScheduleError("two results share memory")
        return made

    def _output(self, x: torch.Tensor) -> View:
        """A result, which fills a buffer; from now on the buffer has its shape."""
        view = self._view(x) if isinstance(x, SymbolicTensor) else None
        number = -1 if view is None else view.tensor - self._made.inputs
        if view is None or number < 0 or view.offset or not x.is_contiguous():
            raise ScheduleError("a result is a part of another tensor")
        buffer = self._made.buffers[number]
        if x.numel() != math.prod(buffer.shape):
            raise ScheduleError("a result is a part of another tensor")
        self._made.buffers[number] = buffer._replace(shape=tuple(x.shape))
        return view


def build(inputs: Inputs, call: Callable[..., Results]) -> Schedule:
    """The schedule of call(*inputs), whose host code runs on symbolic tensors.

    Raises ScheduleError: no schedule says what the call does.
    """
    builder = ScheduleBuilder(inputs)
    with building(builder):
        results = call(*builder.symbolic(inputs))
    return builder.finish(tuple(x for x in results if x.numel()))  # dsink may be empty


def pointer_names(structure: Any, prefix: str = "") -> Iterator[str]:
    """The names of a structure's pointers, in order."""
    for name, ctype in structure._fields_:
        if hasattr(ctype, "_fields_"):
            yield from pointer_names(ctype, f"{prefix}{name}.")
        elif ctype is ctypes.c_void_p:
            yield prefix + name


def _tensors(values: object) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _contains(x: torch.Tensor, address: int) -> bool:
    return 0 <= address - x.data_ptr() < x.numel() * x.element_size()


def _signed(values: Sequence[int]) -> Iterator[int]:
    """Addresses of 64 bits as the signed integers with the same bits."""
    return (x - (1 << 64) if x >= 1 << 63 else x for x in values)
