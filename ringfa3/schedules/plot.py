"""A picture of what ranks do: the marks of each stream of each rank. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringfa3.schedules.steps import DriverCall, Launch, MemoryOps, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = "COMPUTE"  # the stream of launches and tensor operations
COLOURS = {Launch: "tab:blue", DriverCall: "tab:orange", MemoryOps: "tab:green"}


class Mark(NamedTuple):
    """A labelled cell of the picture, in a column and in the row of a rank's stream."""

    column: int
    stream: str
    label: str
    colour: str


def plot(ranks: Sequence[Sequence[Mark]], columns_are: str) -> Figure:
    """The marks of ranks 0, 1, ...: a row for each stream of a rank. Lengths mean no time."""
    from matplotlib.figure import Figure

    order = sorted({(rank, mark.stream) for rank, marks in enumerate(ranks) for mark in marks})
    columns = max((mark.column + 1 for marks in ranks for mark in marks), default=1)
    figure = Figure(figsize=(2 + 1.2 * columns, 1 + 0.7 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    for rank, marks in enumerate(ranks):
        for column, stream, label, colour in marks:
            row = order.index((rank, stream))
            axes.barh(row, 0.95, left=column, height=0.9, color=colour, alpha=0.4)
            axes.text(column + 0.03, row, label, fontsize=5, va="center")
    axes.set_yticks(range(len(order)), [f"rank {rank} {stream}" for rank, stream in order])
    axes.set_xticks([column + 0.475 for column in range(columns)], map(str, range(columns)))
    axes.set(xlim=(0, columns), ylim=(len(order) - 0.5, -0.5), xlabel=columns_are)
    return figure


def marks_of(steps: Sequence[Step]) -> Iterator[Mark]:
    """The steps of a schedule: a column for each step of the host."""
    for column, step in enumerate(steps):
        yield Mark(column, *_stream_and_label(step), COLOURS.get(type(step), "tab:gray"))


def _stream_and_label(step: Step) -> tuple[str, str]:
    if isinstance(step, (DriverCall, MemoryOps)):
        stream, _, words = step.description.partition(" ")
        return stream, words.replace(", ", "\n").replace(" <- ", "\n<- ")
    return COMPUTE, step.name if isinstance(step, Launch) else type(step).__name__.lower()
