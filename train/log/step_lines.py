"""The metrics line of each step, written while the device computes the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.config import Config
from train.engine.parallel import ParallelLayout
from train.engine.time_split import TimeSplit
from train.log.metrics import Recorder
from train.log.speed import Timing, own_seconds, speed_of


@dataclass(frozen=True)
class StepLine:
    """A metrics line to be written: its values so far, ``known``, and the input of the others.

    The step took ``seconds``, and ``cpu_seconds`` of this process on all its cores; ``tokens`` and
    ``pairs`` are as in ``step_flops``, ``loss_by_bucket`` is in nats per token.
    """

    known: dict[str, Any]
    seconds: float
    cpu_seconds: float
    tokens: int
    pairs: int
    loss_by_bucket: Sequence[float]


class StepLines:
    """Completes and writes the line of the latest step, when ``write`` is called.

    Reading a step's events and writing TensorBoard's file takes the host milliseconds. Between two
    steps the device would wait for it. ``rows`` is the number of rows of the head; ``recorder`` is
    None on all ranks but 0. ``written(seconds, line)`` is called after each line. ``own_seconds``
    is the latest step's time without what this rank waited for others, 0 before the first line.
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
        self.own_seconds = 0.0

    def add(self, line: StepLine) -> None:
        """Add the next line. The line before must have been written."""
        with self._lock:
            assert self._line is None
            self._line = line

    def write(self) -> None:
        """Write the line that was added last, if it is not written yet; any thread may call this.

        Call it before the next period of ``times`` ends, which would replace this line's split.
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
            self.own_seconds = own_seconds(whole, line.cpu_seconds, self._config.parallel.cp)
        finally:  # if the device is lost, the line has no speed
            if self._recorder is not None:
                self._recorder.step(whole, line.loss_by_bucket)
        self._written(line.seconds, whole)
