"""Schedules in words: what travels with a plan, and what a process adds to the words."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ringfa3.kernels.symbolic import Shape, Symbol
from ringfa3.kernels.uploads import TableRef
from ringfa3.schedules.settings import Settings

if TYPE_CHECKING:
    from ringfa3.schedules.steps import MessageTo

Wait: TypeAlias = tuple[str, int]  # what for, and the rank that ends it


class Part(NamedTuple):
    """A tensor in memory of a symbol; offset in elements."""

    symbol: Symbol
    offset: int
    dtype: torch.dtype
    shape: Shape
    stride: Shape


@dataclass(frozen=True)
class EncodedSchedule:
    """A schedule in words, which `link` makes a program; it can be pickled.

    words      of 64 bits
    at         numbers of words that are offsets from symbols
    symbol_of  numbers of these symbols
    parts, tables, held, waits
               as in `schedule.Schedule`
    exchanges  of each one the messages that it sends, and those that it receives
    spec       of a ring call: what it needs of its transport, a `BufferSpec`
    settings   of a ring call: on which ranks agree
    forward_mode
               what the environment asked for where the schedule was made
    """

    words: array[int]
    at: array[int]
    symbol_of: array[int]
    symbols: tuple[Symbol, ...]
    parts: tuple[Part, ...]
    tables: tuple[TableRef, ...]
    held: tuple[object, ...]
    waits: tuple[tuple[int, tuple[Wait, ...]], ...]
    exchanges: tuple[tuple[Sequence[MessageTo], Sequence[MessageTo]], ...] = ()
    spec: Any = None
    settings: Settings | None = None
    forward_mode: str | None = None

    def __getstate__(self) -> dict[str, object]:
        return {x.name: getattr(self, x.name) for x in fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        _ = self.references  # while the plan arrives, not in its first call

    @cached_property
    def references(self) -> References:
        """The symbols of words, by numbers that this process has given."""
        first = -1 - len(self.parts)
        numbers = [first - x[1] if x[0] == "table" else symbol_number(x) for x in self.symbols]
        return References(
            array("q", [numbers[x] for x in self.symbol_of]),
            frozenset(symbol_number(x) for x in self.symbols if x[0] == "entry"),
        )


class References(NamedTuple):
    """What words of a schedule are offsets from.

    numbers  for each of these words its symbol, as by `symbol_number`; for a table -1 - n: the
             program's memory n, where tables come after parts
    kernels  numbers of entry points
    """

    numbers: array[int]
    kernels: frozenset[int]


_numbers: dict[Symbol, int] = {}
_symbols: dict[int, Symbol] = {}
_count = itertools.count()


def symbol_number(symbol: Symbol) -> int:
    """The number of a symbol in this process: all plans share symbols."""
    number = _numbers.get(symbol)
    if number is None:
        number = next(_count)  # threads may ask at the same time: one number of a symbol is used
        _symbols[number] = symbol  # before others can get the number
        number = _numbers.setdefault(symbol, number)
    return number


def numbered_symbol(number: int) -> Symbol:
    return _symbols[number]
