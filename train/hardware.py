"""The option of the group ``hardware`` for this machine's GPUs."""

from __future__ import annotations

import re
from pathlib import Path

USUAL = "h200"  # on a machine without a GPU, or with one that has no file
KNOWN = ("h100", "h200")


def hardware_here(root: Path = Path("/")) -> str:
    """The file of ``configs/hardware`` for the GPUs that the NVIDIA driver lists; else ``USUAL``.

    ``root`` contains ``proc``. The name of a GPU is a word: a GH200 is no H200.
    """
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = re.search(r"^Model:(.*)$", path.read_text(), re.MULTILINE)
        words = model[1].lower().split() if model else []
        for name in KNOWN:
            if name in words:
                return name
    return USUAL
