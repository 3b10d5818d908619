"""Tables over several result files: speed over other libraries, and what was run where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ringfa3.bench.common.cases import DIRECTIONS
from ringfa3.bench.common.implementations import FA3, FA4
from ringfa3.bench.common.results import FILE, Results, Summary, summaries
from ringfa3.bench.common.table import Table
from ringfa3.bench.ring.cases import STEPS
from ringfa3.bench.tables.provenance import command

CUDNN = "cuDNN"  # these names stand in the result files
RINGS = ("ring-flash-attn on FA3", "Ulysses on FA3", "PyTorch context_parallel")
LIBRARIES = (FA3, FA4, CUDNN, *RINGS)


def gains(files: Sequence[Results]) -> Iterator[str]:
    """By set, direction and head dim: the geometric mean of the ratios and the worst one."""
    rows = []
    for results in files:
        groups: dict[tuple[str, str, int], dict[str, Summary]] = {}
        for s in summaries(results):
            groups.setdefault((s.set, s.direction, s.head_dim), {})[s.peer] = s
        for (name, direction, d), by_peer in groups.items():
            found = [by_peer.get(library) for library in LIBRARIES]
            cells = [f"{s.geometric_mean:.2f} ({s.worst:.2f})" if s else "" for s in found]
            rows.append([f"`{name.partition(' ')[0]}`", direction, str(d), gpus(results), *cells])
    yield from Table(["`--set`", "direction", "d", "GPUs", *LIBRARIES], rows, 2).markdown()


def runs(files: Mapping[str, Results], base: str) -> Iterator[str]:
    """A line for each file; `base`: the path to the folder of results."""
    rows = []
    for name, results in files.items():
        sets = ", ".join(dict.fromkeys(row.set for row in results.rows))
        steps = any(row.set in STEPS for row in results.rows)  # of both directions
        found = DIRECTIONS["both"] if steps else (row.direction for row in results.rows)
        directions = ", ".join(dict.fromkeys(found))
        link = f"[{sets}: {directions}]({base}/{name}/{FILE})"
        date = str(results.machine["date"])[:10]
        rows.append([link, gpus(results), date, f"`{command(results)}`"])
    yield from Table(["sets and directions", "GPUs", "date", "command"], rows, 4).markdown()


def gpus(results: Results) -> str:
    machine = results.machine
    return f"{machine.get('ranks', 1)} x {machine['device'].removeprefix('NVIDIA ').split()[0]}"
