"""The option of the group ``hardware`` for this machine's GPUs."""

from __future__ import annotations

import re
from pathlib import Path

FILES = Path(__file__).parents[1] / "configs" / "hardware"
USUAL = "h200"  # on a machine without a GPU, or with one that has no file


def hardware_here(root: Path = Path("/")) -> str:
    """The file of ``configs/hardware`` for the GPUs that the NVIDIA driver lists; else ``USUAL``.

    ``root`` contains ``proc``. The name of a GPU is a word: a GH200 is no H200.
    """
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = re.search(r"^Model:(.*)$", path.read_text(), re.MULTILINE)
        words = model[1].lower().split() if model else []
        for file in sorted(FILES.glob("*.yaml")):
            if file.stem in words:
                return file.stem
    return USUAL
