"""CUTLASS's headers: of CUTLASS_PATH, of an installed package, or fetched once into the cache.

The build needs headers only. The package nvidia-cutlass depends on 320 MB of other packages, so
this module downloads its wheel without them and unpacks the headers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from ringfa3.build.cache import cache_folder, cache_path, log_line, make_once
from ringfa3.errors import BuildError

WHEEL = "nvidia-cutlass>=4.2,<5"
ENTRY = "cutlass-4.2"  # named by the version in WHEEL
INSIDE = "cutlass_library/source/include/"  # of the wheel
REMEDY = "pip install --no-deps nvidia-cutlass, or set CUTLASS_PATH to a checkout of CUTLASS"


def find_include_folder() -> Path | None:
    """The include folder on this machine: of CUTLASS_PATH, the package, the cache; None without.

    Raises BuildError: CUTLASS_PATH is set and has none.
    """
    if "CUTLASS_PATH" in os.environ:
        include = Path(os.environ["CUTLASS_PATH"]) / "include"
        if not _complete(include):
            raise BuildError(
                f"CUTLASS_PATH={os.environ['CUTLASS_PATH']} has no include/cute/tensor.hpp: set it "
                "to a checkout of CUTLASS, or unset it"
            )
        return include
    spec = importlib.util.find_spec("cutlass_library")
    package = Path(spec.origin).parent / "source" / "include" if spec and spec.origin else None
    return package if package and _complete(package) else _fetched()


def include_folder() -> Path:
    """The include folder; if this machine has none, fetches it into the cache and says so.

    Raises BuildError: the headers cannot be fetched.
    """
    return find_include_folder() or make_once(ENTRY, ENTRY, _fetched, _fetch)


def cutlass_version(include: Path) -> str:
    """CUTLASS's version; "unknown" if its header does not state it."""
    text = (include / "cutlass" / "version.h").read_text()
    parts = [re.search(rf"#define CUTLASS_{p}\s+(\d+)", text) for p in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(p[1] if p else "?" for p in parts) if any(parts) else "unknown"


def pip_is_installed() -> bool:
    """Whether pip is among the installed packages.

    A search for the module `pip` would not do: before Python 3.12 setuptools takes it for a run of
    pip. Then this process cannot import setuptools, as torch.compile does.
    """
    return any(importlib.metadata.distributions(name="pip"))


def _complete(include: Path) -> bool:
    return all((include / f).is_file() for f in ("cute/tensor.hpp", "cutlass/version.h"))


def _fetched() -> Path | None:
    """The include folder in the cache, or None. Raises BuildError: others can write there."""
    if not cache_path().is_dir():
        return None
    includes = (entry / "include" for entry in sorted(cache_folder().glob(f"{ENTRY}*")))
    return next((include for include in includes if _complete(include)), None)


def _fetch(entry: Path) -> None:
    log_line(f"CUTLASS's headers not found: fetching the wheel {WHEEL} with pip, about 6 MB")
    command = (sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary=:all:")
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check", "--retries=1")
    where = entry.parent / "wheel"
    done = subprocess.run(
        (*command, *quiet, "--dest", where), capture_output=True, text=True, check=False
    )
    wheels = list(where.glob("*.whl"))
    if done.returncode or not wheels:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise BuildError(
            f"CUTLASS's headers could not be fetched: `{' '.join(command[1:])}` with "
            f"{sys.executable} failed:\n{last}\n{REMEDY}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wanted = [n for n in wheel.namelist() if n.startswith(INSIDE) or "LICENSE" in n]
        wheel.extractall(where, wanted)
    if not _complete(where / INSIDE):
        raise BuildError(f"{wheels[0].name} has no CUTLASS headers: {REMEDY}")
    os.rename(where / INSIDE, entry / "include")
    for licence in where.glob("*.dist-info/**/LICENSE*"):
        os.rename(licence, entry / licence.name)
