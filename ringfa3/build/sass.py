"""Checks compiled kernels for faults that cost speed and raise no error at run time.

ptxas's remarks show serialised wgmmas and spilled registers. The machine code shows loads and
stores of local memory in the steady loop, which runs for every block of keys.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from ringfa3.build.toolchain import find_program
from ringfa3.errors import BuildError

SERIALISED = r"\(C75(08|10|11|12|14|15|17)\)|wgmma\S* instructions are serialized"
SPILL_BYTES = 32  # that a kernel may store, and load


def ptxas_faults(remarks: str) -> list[str]:
    """Faults in ptxas's remarks (`-Xptxas=-v`); empty if there are none."""
    faults = [line for line in remarks.splitlines() if re.search(SERIALISED, line)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    if not spills:
        faults.append("ptxas's remarks name no kernel: was it compiled with -Xptxas=-v?")
    for stores, loads in spills:
        if max(int(stores), int(loads)) > SPILL_BYTES:
            faults.append(
                f"{stores} bytes of spill stores and {loads} of spill loads, at most "
                f"{SPILL_BYTES} are allowed"
            )
    return faults


def sass_faults(listing: str) -> list[str]:
    """Faults in machine code (`cuobjdump -sass`); empty if there are none."""
    kernels = [code for code in _kernels(listing) if any(c.wgmma for c in code)]
    if not kernels:
        return ["no kernel in the listing has a wgmma"]
    return [fault for code in kernels for fault in _kernel_faults(code)]


def disassemble(library: Path) -> str:
    """The machine code of a library. Raises BuildError: cuobjdump is missing, or fails."""
    cuobjdump, _ = find_program("cuobjdump")
    done = subprocess.run(
        [cuobjdump, "-sass", library], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(f"{cuobjdump} cannot read {library}: {done.stderr.strip()[-500:]}")
    return done.stdout


class Instruction(NamedTuple):
    """One line of a listing, `/*0380*/ @!P0 BRA 0xc3c0 ;`."""

    address: int
    guard: str  # "@!P0", or empty
    opcode: str  # with its modifiers
    operands: str

    @property
    def wgmma(self) -> bool:
        return self.opcode.partition(".")[0] in ("HGMMA", "QGMMA", "IGMMA")

    @property
    def local(self) -> bool:
        return self.opcode.partition(".")[0] in ("LDL", "STL")

    @property
    def target(self) -> int | None:
        """The address it may jump to. BSSY names a reconvergence point and does not jump."""
        if self.opcode.partition(".")[0] not in ("BRA", "JMP", "CALL", "WARPSYNC"):
            return None
        address = re.search(r"0x([0-9a-f]+)$", self.operands)
        return int(address[1], 16) if address else None

    @property
    def ends(self) -> bool:
        """Whether control never falls through to the next instruction."""
        if self.guard:
            return False
        if self.opcode in ("BRA", "JMP"):  # `BRA P1, 0x1230` is conditional
            return "," not in self.operands
        return self.opcode.partition(".")[0] in ("EXIT", "RET", "BRX", "JMX")


def _kernels(listing: str) -> Iterator[list[Instruction]]:
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)([^;]*);"
    for kernel in listing.split("Function :")[1:]:
        yield [
            Instruction(int(address, 16), guard, opcode, operands.strip())
            for address, guard, opcode, operands in re.findall(pattern, kernel)
        ]


def _kernel_faults(code: Sequence[Instruction]) -> Iterator[str]:
    if computed := [c for c in code if c.opcode.partition(".")[0] in ("BRX", "JMX")]:
        yield f"a jump to a computed address at {computed[0].address:#x}: loops cannot be found"
    loops = steady_loops(code)
    if not loops:
        yield "no loop holds the wgmmas"
    for loop in loops:
        local = [code[i] for i in sorted(loop) if code[i].local]
        if local:
            yield (
                f"{len(local)} local loads and stores in the loop of wgmmas at "
                f"{code[min(loop)].address:#x}, first {local[0].opcode} {local[0].operands} at "
                f"{local[0].address:#x}"
            )


def steady_loops(code: Sequence[Instruction]) -> list[frozenset[int]]:
    """The innermost loops that hold a wgmma, as indices into `code`.

    Loops of the control-flow graph, not ranges of addresses: ptxas moves the waits of a loop behind
    the kernel's end and jumps back from there, over code that belongs to no loop.
    """
    follows = _successors(code)
    precedes: list[list[int]] = [[] for _ in code]
    for i, after in enumerate(follows):
        for j in after:
            precedes[j].append(i)
    dominators = _dominators(precedes)
    loops: dict[int, set[int]] = {}
    for i, after in enumerate(follows):
        for head in after:
            if dominators[i] >> head & 1:  # a back edge; the body reaches it without the head
                body = loops.setdefault(head, {head})
                open_ends = [i]
                while open_ends:
                    if (j := open_ends.pop()) not in body:
                        body.add(j)
                        open_ends += precedes[j]
    holding = [frozenset(b) for b in loops.values() if any(code[i].wgmma for i in b)]
    return [loop for loop in holding if not any(other < loop for other in holding)]


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    index = {c.address: i for i, c in enumerate(code)}
    return [
        ([] if c.ends or i + 1 == len(code) else [i + 1])
        + ([index[c.target]] if c.target in index else [])
        for i, c in enumerate(code)
    ]


def _dominators(precedes: Sequence[Sequence[int]]) -> list[int]:
    """Per instruction its dominators, as a bit set; 0 if it is unreachable."""
    sets = [0] * len(precedes)
    changed = True
    while changed:
        changed = False
        for i, before in enumerate(precedes):
            reached = [sets[j] for j in before if sets[j]]
            if i and not reached:
                continue
            now = (reduce(int.__and__, reached) if i else 0) | 1 << i
            changed |= now != sets[i]
            sets[i] = now
    return sets
