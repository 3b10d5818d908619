"""CUTLASS's headers: the user's own, those of an installed package, or fetched once.

Only headers are needed. The nvidia-cutlass package drags in 320 MB of other packages, so the one
wheel is fetched without them and its headers are unpacked into the cache.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from ringfa3.build.cache import cache, location, once, say
from ringfa3.errors import BuildError

WHEEL = "nvidia-cutlass>=4.2,<5"
ENTRY = "cutlass-4.2"  # named by what WHEEL asks for
INSIDE = "cutlass_library/source/include/"  # of the wheel
REMEDY = "pip install --no-deps nvidia-cutlass, or set CUTLASS_PATH to a checkout of CUTLASS"


def here() -> Path | None:
    """The include folder that is on this machine: CUTLASS_PATH, the package, the cache.

    Raises BuildError if CUTLASS_PATH has none.
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


def cutlass() -> Path:
    """The include folder, fetched into the cache first if this machine has none; it says so.

    Raises BuildError: it cannot be fetched.
    """
    return here() or once(ENTRY, ENTRY, _fetched, _fetch)


def version(include: Path) -> str:
    """CUTLASS's version, "unknown" where its header does not tell."""
    text = (include / "cutlass" / "version.h").read_text()
    parts = [re.search(rf"#define CUTLASS_{p}\s+(\d+)", text) for p in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(p[1] if p else "?" for p in parts) if any(parts) else "unknown"


def _complete(include: Path) -> bool:
    return all((include / f).is_file() for f in ("cute/tensor.hpp", "cutlass/version.h"))


def _fetched() -> Path | None:
    """In the cache; None where there is none. A folder that others can write is refused."""
    if not location().is_dir():
        return None
    includes = (entry / "include" for entry in sorted(cache().glob(f"{ENTRY}*")))
    return next((include for include in includes if _complete(include)), None)


def _fetch(entry: Path) -> None:
    say(f"CUTLASS's headers are not here: fetching the wheel {WHEEL} with pip, about 6 MB")
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
            f"{sys.executable} said\n{last}\n{REMEDY}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wanted = [n for n in wheel.namelist() if n.startswith(INSIDE) or "LICENSE" in n]
        wheel.extractall(where, wanted)
    if not _complete(where / INSIDE):
        raise BuildError(f"{wheels[0].name} has no CUTLASS headers: {REMEDY}")
    os.rename(where / INSIDE, entry / "include")
    for licence in where.glob("*.dist-info/**/LICENSE*"):
        os.rename(licence, entry / licence.name)
