"""``log.wandb``: sends the scalars to Weights & Biases.

An error of W&B does not end training: it is reported once, and nothing more is sent.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

from train.config import Config
from train.run.run_folder import RunFolder


class WandbRun:
    """The W&B run of a run folder. A resumed run continues it, by the id in the folder."""

    def __init__(
        self, config: Config, folder: RunFolder, print_line: Callable[[str], None]
    ) -> None:
        self._print_line = print_line
        self._run: Any = None
        self._attempt(lambda: self._open(config, folder))

    def log(self, values: dict[str, float], step: int) -> None:
        """Log scalars after ``step`` optimiser steps."""
        if self._run is not None:
            # A resumed run repeats steps, and W&B drops steps below its own counter. Our step is
            # therefore a separate metric, used as the x axis.
            self._attempt(lambda: self._run.log({**values, "step": step}))

    def close(self) -> None:
        """Send the remaining scalars."""
        if self._run is not None:
            self._attempt(lambda: self._run.finish())
            self._run = None

    def _open(self, config: Config, folder: RunFolder) -> None:
        import wandb

        kept = folder.wandb_id
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n")
        self._run = wandb.init(
            project=config.log.wandb_project,
            name=config.run.name,
            id=kept.read_text().strip(),
            resume="allow",
            dir=str(folder.path),
            config=dataclasses.asdict(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            summary = " ".join(str(error).split())
            line = f"Weights & Biases is off from now on: {type(error).__name__}: {summary}"
            self._print_line(line)
