"""Schedules in words: what travels with a plan, and what a process adds to the words."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.kernels.symbolic import Shape, Symbol
from ringfa3.kernels.uploads import TableRef

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

    words      (n,) int64
    at         (m,) numbers of words that are offsets from symbols
    symbol_of  (m,) numbers of these symbols
    parts, tables, held, waits
               as in `schedule.Schedule`
    spec       what a ring call needs of its transport, a `BufferSpec`
    """

    words: npt.NDArray[np.int64]
    at: npt.NDArray[np.intp]
    symbol_of: npt.NDArray[np.intp]
    symbols: tuple[Symbol, ...]
    parts: tuple[Part, ...]
    tables: tuple[TableRef, ...]
    held: tuple[object, ...]
    waits: tuple[tuple[int, tuple[Wait, ...]], ...]
    spec: Any = None

    def __getstate__(self) -> dict[str, object]:
        return {x.name: getattr(self, x.name) for x in fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        _ = self.references  # while the plan arrives, not in its first call

    @cached_property
    def references(self) -> References:
        """The addresses that `link` adds to words, by numbers that this process has given."""
        numbers = np.array([symbol_number(x) for x in self.symbols], np.intp)
        tables = [
            self.symbol_of == self.symbols.index(("table", n)) for n in range(len(self.tables))
        ]
        other = ~np.logical_or.reduce([np.zeros(len(self.at), bool), *tables])
        of_words = numbers[self.symbol_of[other]]
        return References(
            self.at[other],
            of_words,
            frozenset(of_words.tolist()),
            frozenset(symbol_number(x) for x in self.symbols if x[0] == "entry"),
            [self.at[x] for x in tables],
        )


class References(NamedTuple):
    """Words of a schedule that are offsets from symbols.

    at       their numbers, but for tables
    numbers  of the symbols, as by `symbol_number`
    used     the same numbers
    kernels  those of entry points
    tables   for each table the numbers of its words
    """

    at: npt.NDArray[np.intp]
    numbers: npt.NDArray[np.intp]
    used: frozenset[int]
    kernels: frozenset[int]
    tables: list[npt.NDArray[np.intp]]


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
