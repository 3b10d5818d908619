"""The schedule of a call: buffers to allocate, then launches, tensor operations and, in a ring,
calls of the driver.

The host code of a call runs on symbolic tensors to build it (`kernels.symbolic`), so all addresses
are (base, offset). Any process can build it: `link` fills in what one process alone has. The C++
launcher runs it for calls with equal shapes, strides and settings, on any tensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from ringfa3.kernels.symbolic import (
    ALIGNMENT,
    OFFSET_BITS,
    SYMBOLS,
    Address,
    Base,
    Gpu,
    ScheduleError,
    Shape,
    Symbol,
    SymbolicTensor,
    as_tensor,
    building,
    contiguous_stride,
    decode,
    symbolic_input,
)
from ringfa3.kernels.uploads import TableRef
from ringfa3.schedules.encoded import EncodedSchedule, Part, Wait
from ringfa3.schedules.steps import (
    ADD,
    ADD_ROWS,
    ALLOCATE,
    COPY,
    FREE,
    GATHER_ROWS,
    POINTER,
    POINTERS,
    SUM_COLUMNS,
    Combine,
    CombineRows,
    DriverCall,
    Exchange,
    Fill,
    Launch,
    MemoryOps,
    MessageTo,
    Step,
    View,
    WaitExchange,
    Words,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringfa3.build.units import Unit

DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType

Inputs: TypeAlias = Sequence[torch.Tensor | None]
Results: TypeAlias = tuple[torch.Tensor, ...]


class Buffer(NamedTuple):
    """Memory that the call allocates before a step."""

    shape: Shape
    dtype: torch.dtype
    first: int


class Schedule(NamedTuple):
    """What a call does.

    inputs   how many it has
    outputs  views of whole buffers
    symbols  and their numbers
    parts    memory of symbols that steps fill, copy or sum
    tables   of symbols ("table", number)
    held     objects that live as long
    waits    for signals, for each stream, in order
    """

    inputs: int
    buffers: list[Buffer]
    steps: list[Step]
    outputs: list[View]
    symbols: dict[Symbol, int]
    parts: list[Part]
    tables: list[TableRef]
    held: list[object]
    waits: dict[int, list[Wait]]

    def encode(self) -> EncodedSchedule:
        """Buffers are allocated before their first step, and freed after their last one."""
        freed = {tensor: n for n, step in enumerate(self.steps) for tensor in step.tensors()}
        for output in self.outputs:
            freed.pop(output.tensor, None)
        words, buffers = Words(self.symbols), deque(self.buffers)
        words.add(0)
        count = 0
        for number, step in enumerate([*self.steps, None]):
            while buffers and (step is None or buffers[0].first <= number):
                shape, dtype, _ = buffers.popleft()
                words.add(ALLOCATE, DTYPES[dtype], len(shape), *shape)
                count += 1
            if step is not None:
                step.encode(words)
                count += 1
            for tensor in sorted(x for x in freed if freed[x] == number and x >= self.inputs):
                words.add(FREE, tensor)
                count += 1
        words.values[0] = count
        words.add(len(self.outputs))
        for output in self.outputs:
            words.add(*output.words())
        return EncodedSchedule(
            words.values,
            words.at,
            words.symbol_of,
            tuple(self.symbols),
            tuple(self.parts),
            tuple(self.tables),
            tuple(self.held),
            tuple((stream, tuple(waits)) for stream, waits in self.waits.items()),
            tuple((x.sends, x.receives) for x in self.steps if isinstance(x, Exchange)),
        )

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

    def plot(self, *others: Schedule) -> Figure:
        """A picture of the steps by stream, of this rank and of others; needs matplotlib."""
        from ringfa3.schedules.plot import marks_of, plot

        return plot([list(marks_of(x.steps)) for x in (self, *others)], "step of the host")


class ScheduleBuilder:
    """`kernels.symbolic.Builder`: collects the steps of a call.

    It holds none of its tensors, which hold it: a cycle would keep a plan's tables until Python
    looks for cycles.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._remainders = [0 if x is None else x.data_ptr() % ALIGNMENT for x in inputs]
        self._made = Schedule(len(inputs), [], [], [], {}, [], [], [], {})
        self._known_tables: dict[tuple[object, ...], int] = {}

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

    def address(self, symbol: Symbol) -> int:
        """The address of a symbol."""
        symbols = self._made.symbols
        return Base.of(SYMBOLS + symbols.setdefault(symbol, len(symbols))).begin

    def memory(
        self,
        symbol: Symbol,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
    ) -> torch.Tensor:
        begin, stride = self.address(symbol), contiguous_stride(shape)
        base = Base((begin >> OFFSET_BITS) - 1, begin)
        return as_tensor(SymbolicTensor(self, base, shape, stride, dtype, device, offset))

    def table(self, table: TableRef) -> int:
        key = table.name, id(table.owner), table.key
        number = self._known_tables.setdefault(key, len(self._made.tables))
        if number == len(self._made.tables):
            self._made.tables.append(table)
        return self.address(("table", number))

    def zero(self, target: SymbolicTensor) -> None:
        if target.numel():
            self._made.steps.append(Fill(self._view(target)))

    def copy(self, target: SymbolicTensor, source: SymbolicTensor) -> None:
        if target.numel():
            self._made.steps.append(Combine(COPY, self._view(target), self._view(source)))

    def sum_columns(self, target: SymbolicTensor, source: SymbolicTensor) -> None:
        self._made.steps.append(Combine(SUM_COLUMNS, self._view(target), self._view(source)))

    def add_to(self, target: SymbolicTensor, source: SymbolicTensor) -> None:
        if target.numel():
            self._made.steps.append(Combine(ADD, self._view(target), self._view(source)))

    def gather_rows(
        self, target: SymbolicTensor, source: SymbolicTensor, index: SymbolicTensor
    ) -> None:
        views = map(self._view, (target, source, index))
        self._made.steps.append(CombineRows(GATHER_ROWS, *views))

    def add_rows(
        self, target: SymbolicTensor, source: SymbolicTensor, index: SymbolicTensor
    ) -> None:
        views = map(self._view, (target, source, index))
        self._made.steps.append(CombineRows(ADD_ROWS, *views))

    def exchange(
        self,
        tensors: Sequence[SymbolicTensor],
        sends: Sequence[MessageTo],
        receives: Sequence[MessageTo],
    ) -> Callable[[], None]:
        """Starts messages of tensors, those that it sends first. Returns what waits for them."""
        steps = self._made.steps
        number = sum(isinstance(step, Exchange) for step in steps)
        made = Exchange(number, tuple(map(self._view, tensors)), tuple(sends), tuple(receives))
        steps.append(made)
        return lambda: steps.append(WaitExchange(made))

    def launch(self, unit: Unit, name: str, args: bytes) -> None:
        if name not in POINTERS:
            raise ScheduleError(f"it launches {name}")
        patches: list[tuple[int, Address]] = []
        addresses: list[tuple[int, Address]] = []
        words = bytearray(args)
        for at in POINTERS[name]:
            value = int.from_bytes(args[at : at + POINTER], "little")
            address = decode(value)
            if address is not None:
                tensor, offset = address
                if tensor < len(self._remainders):
                    offset -= self._remainders[tensor]
                found = addresses if tensor >= SYMBOLS else patches
                found.append((at, Address(tensor, offset)))
                words[at : at + POINTER] = bytes(POINTER)
            elif value:
                raise ScheduleError(f"{name} reads memory that nobody holds")
        self._made.steps.append(Launch(unit, name, bytes(words), tuple(patches), tuple(addresses)))

    def add(self, step: DriverCall | MemoryOps) -> None:
        """A call of the CUDA driver."""
        self._made.steps.append(step)

    def wait(self, stream: int, waits: Sequence[Wait]) -> None:
        """Waits for signals of a stream, in order."""
        self._made.waits.setdefault(stream, []).extend(waits)

    def hold_reference(self, plan: object) -> None:
        self._made.held.append(plan)

    def _view(self, x: SymbolicTensor) -> View:
        number, shape, stride = x.base.number, tuple(x.shape), x.stride()
        if number >= SYMBOLS:
            symbol = list(self._made.symbols)[number - SYMBOLS]
            self._made.parts.append(Part(symbol, x.offset, x.dtype, shape, stride))
            return View(-len(self._made.parts), 0, (), ())
        return View(number, x.offset, shape, stride)

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


def build(inputs: Inputs, call: Callable[..., Results], gpu: Gpu | None = None) -> Schedule:
    """The schedule of call(*inputs), whose host code runs on symbolic tensors.

    gpu: on which the call will run, if it is not that of the inputs.

    Raises ScheduleError: no schedule describes the call.
    """
    builder = ScheduleBuilder(inputs)
    with building(builder, gpu):
        results = call(*builder.symbolic(inputs))
    *most, last = results
    if not all(x.numel() for x in most):  # of a rank without tokens
        raise ScheduleError("a result is empty")
    return builder.finish(results if last.numel() else tuple(most))  # dsink may be empty
