"""A run folder as a stopped run leaves it."""

from __future__ import annotations

import dataclasses
import json

from train.config import Config
from train.run.run_folder import RunFolder


def hold_run(config: Config) -> RunFolder:
    """``config.run.dir`` with an unfinished run of ``config``, which has made no step."""
    folder = RunFolder(config)
    folder.make()
    folder.config.write_text(json.dumps(dataclasses.asdict(config)))
    folder.metrics.touch()
    return folder
