"""The lines of metrics of the steps, each written while the device computes the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.config import Config
from train.engine.parallel import ParallelLayout
from train.engine.time_split import TimeSplit
from train.log.metrics import Recorder
from train.log.speed import Timing, speed_of


@dataclass(frozen=True)
class StepLine:
    """A line to be written: ``known`` of it so far, and what tells the rest.

    The step took ``seconds``; ``tokens`` and ``pairs`` are as in ``step_flops``,
    ``loss_by_bucket`` is in nats per token.
    """

    known: dict[str, Any]
    seconds: float
    tokens: int
    pairs: int
    loss_by_bucket: Sequence[float]


class StepLines:
    """Completes and writes the line of the latest step, when ``write`` is called.

    To read the events of a step and to write TensorBoard's file takes the host milliseconds, for
    which the device would wait between two steps. ``rows`` is the height of the head; ``recorder``
    is None on all ranks but 0. ``written(seconds, line)`` is called after each line.
    """

    def __init__(
        self,
        config: Config,
        parallel: ParallelLayout,
        rows: int,
        times: TimeSplit | None,
        recorder: Recorder | None,
        written: Callable[[float, dict[str, Any]], None],
    ) -> None:
        self._config, self._parallel, self._rows = config, parallel, rows
        self._times, self._recorder, self._written = times, recorder, written
        self._lock = threading.Lock()
        self._line: StepLine | None = None

    def add(self, line: StepLine) -> None:
        """Give the next line. The line before has been written."""
        with self._lock:
            assert self._line is None
            self._line = line

    def write(self) -> None:
        """Write the line that was added last, once, from any thread; it is written at the return.

        To be called before the end of the next period of ``times``, which has its own split.
        """
        with self._lock:
            line, self._line = self._line, None
            if line is not None:
                self._write(line)

    def _write(self, line: StepLine) -> None:
        timing = Timing(line.seconds, self._parallel.world, self._times)
        whole = dict(line.known)
        try:
            whole |= speed_of(self._config, self._rows, line.tokens, line.pairs, timing)
        finally:  # without the speed if the device is lost
            if self._recorder is not None:
                self._recorder.step(whole, line.loss_by_bucket)
        self._written(line.seconds, whole)
