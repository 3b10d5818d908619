"""The progress of a run on the console."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from train.console import LineConsole, in_lines
from train.log.smoothing import mean, window_of
from train.log.units import bits, in_words, perplexity

SECONDS_BETWEEN_LINES = 10.0  # if stdout is not a terminal


class FiguresBar(Progress):
    """A progress bar with ``figures`` below it, in lines that break between figures only."""

    figures: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the figures."""
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text("\n".join(in_lines(self.figures, self.console.width)))


class StepProgress:
    """A bar with the figures of the latest step on a terminal, else a line every 10 s.

    Losses are in nats per token; that of training is a mean over the last steps. Prints nothing on
    a quiet console.
    """

    def __init__(self, console: LineConsole, steps: int) -> None:
        self._console, self._steps = console, steps
        self._recent: deque[tuple[float, float]] = deque(maxlen=window_of(steps))
        self._held_out: list[str] = []
        self._line_due = 0.0
        self._bar = FiguresBar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, record: dict[str, Any], mfu: float | None = None) -> None:
        """Show a step; ``record`` has its main figures, under the keys of ``metrics.jsonl``.

        ``mfu`` is that of the latest step whose line is complete.
        """
        self._recent.append((record["loss"], record["nats_per_byte"]))
        self._bar.figures = [*self._losses(), *_speed(record, mfu)]
        self._bar.update(self._task, completed=record["step"])
        now = time.monotonic()
        last = record["step"] == self._steps
        if not self._console.is_terminal and (now >= self._line_due or last):
            self._print(record["step"], self._bar.figures)
            self._line_due = now + SECONDS_BETWEEN_LINES

    def validated(self, step: int, nats_per_token: float, nats_per_byte: float, n: int) -> None:
        """Print the result of a validation of ``n`` bytes; later lines show it too."""
        held_out = f"held out {in_words(nats_per_token, nats_per_byte)}"
        self._print(step, [held_out, f"of {n:,} bytes"])
        self._held_out = [f"held out {nats_per_token:.3f} at step {step}"]

    def _losses(self) -> list[str]:
        loss, per_byte = (mean(values) for values in zip(*self._recent, strict=True))
        units = [f"perplexity {perplexity(loss):.4g}", f"{bits(per_byte):.3f} bits per byte"]
        return [f"train {loss:.3f} nats per token", *units, *self._held_out]

    def _print(self, step: int, parts: list[str]) -> None:
        parts = [f"step {step}/{self._steps}", *parts]
        width = self._console.width if self._console.is_terminal else sum(map(len, parts)) * 2
        self._console.print("\n".join(in_lines(parts, width)))


def _speed(record: dict[str, Any], mfu: float | None) -> list[str]:
    parts = [f"lr {record['lr']:.2e}", f"norm {record['grad_norm']:.3g}"]
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")
    parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    if "slowest_rank" in record:
        seconds = record["rank_s"]
        slowest, median = max(seconds), statistics.median(seconds)
        parts.append(f"slowest rank {record['slowest_rank']}: {slowest:.3g} s, median {median:.3g}")
    return parts
