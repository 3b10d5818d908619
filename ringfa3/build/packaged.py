"""The compiled kernels that a wheel holds, as `ringfa3/libraries/STEM-SHA256/kernel.so`."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from ringfa3.build.cache import log_line

PACKAGE = Path(__file__).parents[1]
FOLDER = "libraries"  # in the package


def packaged_name(stem: str, library: Path) -> str:
    """The name of the folder of a library, whose sources, flags and architecture `stem` hashes."""
    return f"{stem}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}"


@lru_cache(None)
def find_packaged(stem: str) -> Path | None:
    """The library in the installed wheel, or None: it has none, or a damaged one, which is logged.

    Bytes count, not the name alone: a damaged library may load, and compute wrong numbers.
    """
    for library in (PACKAGE / FOLDER).glob(f"{stem}-*/kernel.so"):
        if library.parent.name == packaged_name(stem, library):
            return library
        log_line(f"{library} is damaged, and is not used: install the wheel again")
    return None
