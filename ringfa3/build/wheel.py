"""Builds wheels that hold compiled kernels. hatchling writes the wheel, auditwheel its tag.

The libraries contain CUDA's runtime and know nothing of Python or PyTorch: the Python tag is
`py3-none`. The platform tag states the oldest C library whose symbols suffice.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.wheel import WheelBuilder

from ringfa3.build.cache import working_folder
from ringfa3.build.compile import ensure_library, library_stem, source_folder
from ringfa3.build.packaged import FOLDER, packaged_name
from ringfa3.build.units import Unit
from ringfa3.errors import BuildError


def build_wheel(units: Sequence[Unit], folder: Path) -> Path:
    """A wheel in `folder` with the package, the sources of the kernels, and compiled `units`.

    Raises BuildError: this is no checkout, auditwheel fails, or as `ensure_library`. OSError: the
    folder cannot be written.
    """
    root = source_folder().parent
    if not (root / "pyproject.toml").is_file():
        raise BuildError(f"{root} has no pyproject.toml: run it from a checkout of the repository")
    libraries = {}
    for unit in units:
        library = ensure_library(unit)
        name = packaged_name(library_stem(unit), library)
        libraries[str(library)] = f"ringfa3/{FOLDER}/{name}/{library.name}"
    with working_folder("wheel") as work:
        (plain,) = _Wheel(str(root), libraries).build(directory=str(work))
        _tag(plain, work / "tagged")
        (tagged,) = (work / "tagged").iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(tagged, folder))


class _Wheel(WheelBuilder):
    """libraries: paths on this machine, and their names in the wheel."""

    def __init__(self, root: str, libraries: dict[str, str]) -> None:
        super().__init__(root)
        self.libraries = libraries

    def get_default_build_data(self) -> dict[str, Any]:
        tag = f"py3-none-linux_{platform.machine()}"
        changes = {"pure_python": False, "tag": tag, "force_include": self.libraries}
        return {**super().get_default_build_data(), **changes}


def _tag(plain: str, folder: Path) -> None:
    """Writes the wheel into `folder`, with the platform tag that its libraries allow."""
    command = (sys.executable, "-m", "auditwheel", "repair", "--patcher", "none")  # only the tag
    done = subprocess.run(
        (*command, "--wheel-dir", folder, plain), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise BuildError(f"auditwheel failed; `pip install 'ringfa3[wheel]'` brings it:\n{last}")
