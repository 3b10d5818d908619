"""``mode=check``: the checks that come after those of the config, without a run."""

from __future__ import annotations

import os

from train.config import Config
from train.data.corpus import all_files
from train.engine.parallel import choose_device
from train.log.profiler import require_profilable


def run(config: Config) -> None:
    """Check the device and the files of the corpus; rank 0 prints the result."""
    require_profilable(config.profile, choose_device(config))
    files = all_files(config.data)
    if os.environ.get("RANK", "0") == "0":
        print(f"The settings are valid; the corpus has {len(files)} files. Nothing was started.")
