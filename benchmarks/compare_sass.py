"""Compares the machine code of two builds, unit by unit: `compare_sass.py OLD_CACHE NEW_CACHE`.

Use it for changes that must not change machine code: files moved, symbols renamed. Both caches are
folders that `python -m ringfa3.build` has filled with the same nvcc and CUTLASS. If a cache has
several builds of a unit, the latest counts. The comparison ignores names of kernels. It compares
addresses, encodings, scheduling information, registers and spills.

Prints one line per unit. Exit code 1 on any difference, 2 if a cache has no build of a unit.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ringfa3.build.sass import disassemble
from ringfa3.build.units import Unit, select_units
from ringfa3.errors import BuildError

Code = tuple[str, ...]  # one instruction each: address, text, encoding


class Usage(NamedTuple):
    """The resources of one kernel that ptxas reports."""

    registers: int
    spill_stores: int  # bytes
    spill_loads: int

    def __str__(self) -> str:
        spills = f"{self.spill_stores}/{self.spill_loads} B spilled"
        return f"{self.registers} registers, {spills if any(self[1:]) else 'no spill'}"


def kernels(listing: str) -> list[Code]:
    """The kernels of a `cuobjdump -sass` listing, shortest first, without symbol names."""
    found = []
    for kernel in listing.split("Function :")[1:]:
        body = re.sub(r"\b_Z\w+", "_", kernel.partition("\n")[2])
        parts = re.findall(r"/\*[0-9a-f]{4,}\*/[^;]*;(?:\s*/\* 0x[0-9a-f]+ \*/)*", body)
        found.append(tuple(" ".join(part.split()) for part in parts))
    return sorted(found, key=lambda code: (len(code), code))


def usage(remarks: str) -> list[Usage]:
    """Registers and spills of the kernels in ptxas's remarks, in no kernel's order."""
    pattern = r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers"
    return sorted(
        Usage(int(registers), int(stores), int(loads))
        for stores, loads, registers in re.findall(pattern, remarks)
    )


def difference(old: Sequence[Code], new: Sequence[Code]) -> str | None:
    """The first difference between the kernels of two libraries, or None."""
    if len(old) != len(new):
        return f"{len(old)} kernels, now {len(new)}"
    gone, come = Counter(old) - Counter(new), Counter(new) - Counter(old)
    for before, after in zip(gone.elements(), come.elements(), strict=True):
        lengths = f"{len(before)} instructions, now {len(after)}"
        for x, y in zip(before, after, strict=False):
            if x != y:
                return f"{lengths}; first difference: {x} | {y}"
        return f"{lengths}; one begins with the other"
    return None


def latest(cache: Path, unit: Unit) -> Path:
    """The folder of a unit's latest build. Raises BuildError: there is none."""
    pattern = re.compile(re.escape(unit.name) + r"-[0-9a-f]{16}-[0-9a-f]{8}")
    builds = [path.parent for path in cache.glob(f"{unit.name}-*/kernel.so")]
    builds = [path for path in builds if pattern.fullmatch(path.name)]
    if not builds:
        raise BuildError(f"{cache} has no build of {unit.name}")
    return max(builds, key=lambda path: (path / "kernel.so").stat().st_mtime)


def compare(old: Path, new: Path) -> tuple[bool, str]:
    """Whether two builds of a unit are equal, and what to print."""
    before, after = (kernels(disassemble(path / "kernel.so")) for path in (old, new))
    uses = [usage((path / "ptxas.txt").read_text()) for path in (old, new)]
    of_new = "; ".join(map(str, uses[1]))
    count = sum(map(len, after))
    if found := difference(before, after):
        of_old = "; ".join(map(str, uses[0]))
        return False, f"{found} ({of_new}" + (f", was {of_old})" if of_old != of_new else ")")
    if uses[0] != uses[1]:
        return False, f"same code, other remarks: {uses[0]}, now {uses[1]}"
    return True, f"equal, {count} instructions ({of_new})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", type=Path, metavar="OLD_CACHE")
    parser.add_argument("new", type=Path, metavar="NEW_CACHE")
    parser.add_argument("--units", nargs="+", default=["all"], metavar="UNIT")
    asked = parser.parse_args(arguments)
    whole = True
    try:
        units = select_units(asked.units)
        for number, unit in enumerate(units, 1):
            print(f"{number} of {len(units)}: {unit.name}", file=sys.stderr, flush=True)
            equal, line = compare(latest(asked.old, unit), latest(asked.new, unit))
            print(f"{unit.name}: {line}", flush=True)
            whole &= equal
    except (BuildError, OSError) as error:
        print(f"compare_sass: {error}", file=sys.stderr)
        return 2
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
