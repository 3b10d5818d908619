"""A picture of schedules: the steps of each stream of each rank, in the order of the host. Needs
matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringfa3.schedules.steps import DriverCall, Launch, MemoryOps, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = "COMPUTE"  # the stream of launches and tensor operations
COLOURS = {Launch: "tab:blue", DriverCall: "tab:orange", MemoryOps: "tab:green"}


def plot(ranks: Sequence[Sequence[Step]]) -> Figure:
    """The steps of ranks 0, 1, ...: a row for each stream of a rank, a column for each step of the
    host. Lengths mean no time."""
    from matplotlib.figure import Figure

    rows: dict[tuple[int, str], list[tuple[int, Step]]] = {}
    for rank, steps in enumerate(ranks):
        for column, step in enumerate(steps):
            rows.setdefault((rank, stream_of(step)), []).append((column, step))
    columns = max(map(len, ranks), default=0)
    figure = Figure(figsize=(2 + 1.2 * columns, 1 + 0.7 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    order = sorted(rows)
    for row, key in enumerate(order):
        for column, step in rows[key]:
            colour = COLOURS.get(type(step), "tab:gray")
            axes.barh(row, 0.95, left=column, height=0.9, color=colour, alpha=0.4)
            axes.text(column + 0.03, row, label(step), fontsize=5, va="center")
    axes.set_yticks(range(len(order)), [f"rank {rank} {stream}" for rank, stream in order])
    axes.set(xlim=(0, max(columns, 1)), ylim=(len(order) - 0.5, -0.5), xlabel="step of the host")
    return figure


def stream_of(step: Step) -> str:
    """The name of a step's stream."""
    if isinstance(step, (DriverCall, MemoryOps)):
        return step.description.partition(" ")[0]
    return COMPUTE


def label(step: Step) -> str:
    """A few words on a step."""
    if isinstance(step, Launch):
        return step.name
    if isinstance(step, (DriverCall, MemoryOps)):
        words = step.description.partition(" ")[2]
        return words.replace(", ", "\n").replace(" <- ", "\n<- ")
    return type(step).__name__.lower()
