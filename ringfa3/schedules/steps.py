"""The steps of a schedule, and how words encode them.

csrc/host/program.h reads the words and runs the steps.
"""

from __future__ import annotations

import ctypes
import textwrap
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ringfa3.kernels import backward, forward, local_kv
from ringfa3.kernels.launch import pointer_offsets
from ringfa3.kernels.symbolic import OFFSET_BITS, SYMBOLS, Address, Shape, Symbol

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
POINTERS = {name: pointer_offsets(structure) for name, structure in STRUCTURES.items()}
LAUNCH, ZERO, COPY, DRIVER_CALL, MEMORY_OPS, SUM_COLUMNS, ALLOCATE, FREE = range(8)  # in words
ADD, GATHER_ROWS, ADD_ROWS, EXCHANGE, WAIT_EXCHANGE = range(8, 13)
COMBINED = {COPY: "copy", SUM_COLUMNS: "sum columns", ADD: "add"}
POINTER = 8  # bytes
DRIVER_WORDS = 4  # arguments of a driver call, at most
OPERATION_WORDS = 6  # of cuda_driver.MemoryOp
VALUE = 2  # the word of its value
LINE = 96  # characters


class Words:
    """64-bit words, and which of them are offsets from symbols."""

    def __init__(self, symbols: dict[Symbol, int]) -> None:
        """symbols: by number; new ones are added."""
        self.symbols = symbols
        self.values = array("q")
        self.at = array("q")  # words that are offsets
        self.symbol_of = array("q")  # of each of these

    def add(self, *values: int) -> None:
        self.values.extend(values)

    def add_values(self, values: Sequence[int]) -> None:
        """Adds numbers and symbolic addresses. Every number is below all symbolic addresses."""
        for value in values:
            number = (value >> OFFSET_BITS) - 1 - SYMBOLS
            if number < 0:
                self.values.append(value)
            else:
                self._refer(number, value & ((1 << OFFSET_BITS) - 1))

    def add_bytes(self, data: bytes, addresses: Sequence[tuple[int, Address]] = ()) -> None:
        """Adds bytes after their count; those at some places are addresses of symbols."""
        self.values.append(len(data))
        first = len(self.values)
        self.values.frombytes(data + bytes(-len(data) % POINTER))
        for at, (number, offset) in addresses:
            word = first + at // POINTER
            self.values[word] = offset
            self.at.append(word)
            self.symbol_of.append(number - SYMBOLS)

    def call(self, operation: int, symbol: Symbol, name: str) -> None:
        """Adds a call of a symbol; name: for an error."""
        self.values.append(operation)
        self._refer(self.symbols.setdefault(symbol, len(self.symbols)), 0)
        self.add_bytes(name.encode())

    def _refer(self, number: int, offset: int) -> None:
        self.at.append(len(self.values))
        self.symbol_of.append(number)
        self.values.append(offset)


class View(NamedTuple):
    """A part of an input or a buffer, in elements; with a negative number a whole `Part`."""

    tensor: int
    offset: int
    shape: Shape
    stride: Shape

    def words(self) -> Iterator[int]:
        yield from (self.tensor, self.offset, len(self.shape), *self.shape, *self.stride)

    def text(self, names: Sequence[str]) -> str:
        if self.tensor < 0:
            return f"memory {-1 - self.tensor}"
        offset = f"+{self.offset}" if self.offset else ""
        return f"{names[self.tensor]}{offset}{list(self.shape)}"


class Launch(NamedTuple):
    """ringfa3_NAME of a unit. args have 0 where an address goes.

    patches    addresses of inputs and buffers, by byte
    addresses  of symbols, by byte
    """

    unit: Unit
    name: str
    args: bytes
    patches: tuple[tuple[int, Address], ...]
    addresses: tuple[tuple[int, Address], ...]

    def encode(self, words: Words) -> None:
        entry = "entry", self.unit, self.name
        words.call(LAUNCH, entry, f"{self.name} of {self.unit.name}")
        words.add_bytes(self.args, self.addresses)
        words.add(len(self.patches), *(x for at, address in self.patches for x in (at, *address)))

    def tensors(self) -> Iterator[int]:
        """Inputs and buffers that the step reads or writes, and negative numbers."""
        return (address.tensor for _, address in self.patches)

    def text(self, names: Sequence[str]) -> str:
        structure = STRUCTURES[self.name]
        fields = dict(zip(POINTERS[self.name], pointer_names(structure), strict=True))
        found = [
            f"{fields[at]}={names[a.tensor]}{f'+{a.offset}' if a.offset else ''}"
            for at, a in self.patches
        ]
        line = f"launch {self.name} of {self.unit.name}: {' '.join(found)}"
        return textwrap.fill(line, LINE, subsequent_indent="    ", break_on_hyphens=False)


class Fill(NamedTuple):
    """Zeros in a view."""

    target: View

    def encode(self, words: Words) -> None:
        words.add(ZERO, *self.target.words())

    def tensors(self) -> Iterator[int]:
        yield self.target.tensor

    def text(self, names: Sequence[str]) -> str:
        return f"zero {self.target.text(names)}"


class Combine(NamedTuple):
    """COPY: the source in the target. SUM_COLUMNS: target[i] is the sum of source[i]. ADD: the
    source is added to the target."""

    operation: int
    target: View
    source: View

    def encode(self, words: Words) -> None:
        words.add(self.operation, *self.target.words(), *self.source.words())

    def tensors(self) -> Iterator[int]:
        yield from (self.target.tensor, self.source.tensor)

    def text(self, names: Sequence[str]) -> str:
        name = COMBINED[self.operation]
        return f"{name} {self.target.text(names)} <- {self.source.text(names)}"


class CombineRows(NamedTuple):
    """GATHER_ROWS: target[i] is source[rows[i]]. ADD_ROWS: source[i] is added to
    target[rows[i]]."""

    operation: int
    target: View
    source: View
    rows: View

    def encode(self, words: Words) -> None:
        words.add(self.operation)
        for view in (self.target, self.source, self.rows):
            words.add(*view.words())

    def tensors(self) -> Iterator[int]:
        yield from (self.target.tensor, self.source.tensor, self.rows.tensor)

    def text(self, names: Sequence[str]) -> str:
        name = "gather rows" if self.operation == GATHER_ROWS else "add rows"
        target, source, rows = (x.text(names) for x in self[1:])
        return f"{name} {target} <- {source} by {rows}"


class MessageTo(NamedTuple):
    """What a message has besides its tensor; as in `ringfa3.ring.p2p.Message`."""

    peer: int
    what: str
    tag: int


class Exchange(NamedTuple):
    """Starts messages, which use the views until `WaitExchange` of the same number.

    sends, receives  of each message
    """

    number: int
    views: tuple[View, ...]
    sends: tuple[MessageTo, ...]
    receives: tuple[MessageTo, ...]

    def encode(self, words: Words) -> None:
        words.add(EXCHANGE, self.number, len(self.views))
        for view in self.views:
            words.add(*view.words())

    def tensors(self) -> Iterator[int]:
        return (view.tensor for view in self.views)

    def text(self, names: Sequence[str]) -> str:
        verbs = ["to"] * len(self.sends) + ["from"] * len(self.receives)
        each = zip(self.views, verbs, (*self.sends, *self.receives), strict=True)
        moved = (f"{view.text(names)} {verb} rank {m.peer}" for view, verb, m in each)
        line = f"exchange {self.number}: {', '.join(moved)}"
        return textwrap.fill(line, LINE, subsequent_indent="    ", break_on_hyphens=False)


class WaitExchange(NamedTuple):
    """Waits for the messages of an exchange."""

    exchange: Exchange

    def encode(self, words: Words) -> None:
        words.add(WAIT_EXCHANGE, self.exchange.number)

    def tensors(self) -> Iterator[int]:
        return self.exchange.tensors()

    def text(self, _: Sequence[str]) -> str:
        return f"wait for exchange {self.exchange.number}"


class DriverCall(NamedTuple):
    """A function of the CUDA driver, and its arguments, some of which are symbolic addresses.

    description  for people
    """

    name: str
    arguments: tuple[int, ...]
    description: str

    def encode(self, words: Words) -> None:
        words.call(DRIVER_CALL, ("driver", self.name), self.name)
        words.add_values(self.arguments)
        words.add(*[0] * (DRIVER_WORDS - len(self.arguments)))

    def tensors(self) -> Iterator[int]:
        return iter(())

    def text(self, _: Sequence[str]) -> str:
        return self.description


class MemoryOps(NamedTuple):
    """A batch of memory operations of a stream.

    stream       a symbolic address
    operations   (operation, address, value, flags) as in cuda_driver.MemoryOp
    counts       of those that write the number of a wait: operation, and the wait's stream
    description  for people
    """

    name: str
    stream: int
    operations: tuple[tuple[int, int, int, int], ...]
    counts: tuple[tuple[int, int], ...]
    description: str

    def encode(self, words: Words) -> None:
        words.call(MEMORY_OPS, ("driver", self.name), self.name)
        words.add_values((self.stream,))
        words.add(len(self.operations))
        for operation in self.operations:
            words.add_values((*operation, 0, 0))
        words.add(len(self.counts))
        for number, stream in self.counts:
            words.add(number * OPERATION_WORDS + VALUE, stream)

    def tensors(self) -> Iterator[int]:
        return iter(())

    def text(self, _: Sequence[str]) -> str:
        return self.description


Step: TypeAlias = (
    Launch | Fill | Combine | CombineRows | Exchange | WaitExchange | DriverCall | MemoryOps
)


def pointer_names(structure: type[ctypes.Structure], prefix: str = "") -> Iterator[str]:
    """The names of a structure's pointers, in order."""
    for name, ctype, *_ in structure._fields_:
        if issubclass(ctype, ctypes.Structure):
            yield from pointer_names(ctype, f"{prefix}{name}.")
        elif ctype is ctypes.c_void_p:
            yield prefix + name
