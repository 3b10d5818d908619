"""If this fails, kernels read other arguments than Python passes. Structures, records and constants
that Python shares with C++, against csrc/."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ringfa3.build.compile import source_folder
from ringfa3.build.units import UNITS
from ringfa3.kernels import backward, forward, launch, local_kv, quantise, quantised
from ringfa3.planning import tile_schedule, work_split
from ringfa3.quantisation.key_tiles import KEY_TILE_RECORD

MIRRORS = (
    launch.Tensor3,
    forward.ForwardArgs,
    quantised.OperandScales,
    quantised.QuantisedForwardArgs,
    backward.PaddedRows,
    backward.PreprocessArgs,
    backward.BackwardArgs,
    backward.PostprocessArgs,
    local_kv.PublishedRows,
    local_kv.RowRuns,
    local_kv.PublishArgs,
    local_kv.AddReturnsArgs,
    local_kv.RoundGradientsArgs,
    quantise.CentresArgs,
    quantise.StatisticsArgs,
    quantise.QuantiseQArgs,
    quantise.QuantiseKVArgs,
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
RECORDS = {
    "Span": tile_schedule.SPAN,
    "ClippedSpan": tile_schedule.CLIPPED_SPAN,
    "SpanVisit": tile_schedule.VISIT,
    "Tile": tile_schedule.TILE,
    "WorkUnit": work_split.WORK_UNIT,
    "KeyTile": KEY_TILE_RECORD,
}


def offsets() -> dict[str, dict[str, int]]:
    """Python's offset of every field of every structure; "" is the size of the structure."""
    known = {m.__name__: {name: getattr(m, name).offset for name, _ in m._fields_} for m in MIRRORS}
    known |= {
        name: {field: r.fields[field][1] for field in r.names or ()}  # type: ignore[index]
        for name, r in RECORDS.items()
    }
    for m in MIRRORS:
        known[m.__name__][""] = ctypes.sizeof(m)
    for name, r in RECORDS.items():
        known[name][""] = r.itemsize
    return known


def test_fields_are_those_of_the_header_in_order() -> None:
    header = (source_folder() / "params.h").read_text()
    for name, fields in offsets().items():
        body = re.search(rf"struct {name}(?: : (\w+))? {{(.*?)}};", header, re.S)
        assert body is not None
        inherited = [field for field in offsets()[body[1]] if field] if body[1] else []
        code = re.sub(r"//.*", "", body[2])
        declared = [
            re.search(r"(\w+)(\[\w+\])?$", part.strip())[1]  # type: ignore[index]
            for line in code.split(";")
            if line.strip()
            for part in line.split(",")
        ]
        assert inherited + declared == [field for field in fields if field], name


@pytest.mark.parametrize("structure", MIRRORS, ids=lambda m: m.__name__)
def test_packed_bytes_are_those_of_the_structure(structure: type[ctypes.Structure]) -> None:
    """The structure, read from the bytes, has the numbers in order; padding is zero."""
    size = ctypes.sizeof(structure)
    scalars = list(launch._scalars(structure))
    numbers = [
        2**63 + i if kind is ctypes.c_void_p else (-1) ** i * i
        for i, (_, kind) in enumerate(scalars)
    ]
    packed = launch.packer(structure)(*numbers)
    assert len(packed) == size
    found = [kind.from_buffer_copy(packed, offset).value for offset, kind in scalars]
    assert found == numbers
    used = {i for offset, kind in scalars for i in range(offset, offset + ctypes.sizeof(kind))}
    assert not any(packed[i] for i in set(range(size)) - used)


def printed(folder: Path, headers: str, statements: str) -> list[int]:
    """The integers that a C++ program with headers of csrc/ prints, one a line."""
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(f"#include <cstdio>\n{headers}\nint main() {{ {statements} }}\n")
    subprocess.run(["g++", "-std=c++20", f"-I{source_folder()}", source, "-o", program], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in said.split()]


@needs_compiler
def test_a_compiler_lays_structures_out_as_python_does(tmp_path: Path) -> None:
    """Offsets and sizes in bytes, exactly."""
    known = offsets()
    prints = [
        f'printf("%zu\\n", {f"offsetof({name}, {field})" if field else f"sizeof({name})"});'
        for name, fields in known.items()
        for field in fields
    ]
    headers = '#include <cstddef>\n#include "params.h"\nusing namespace ringfa3;'
    said = printed(tmp_path, headers, " ".join(prints))
    assert said == [n for fields in known.values() for n in fields.values()]


@needs_compiler
def test_clusters_and_statistics_are_those_of_the_backward_s_shapes(tmp_path: Path) -> None:
    """`Unit.cluster`, `STATISTIC_WORDS` and `dq_tile`, against what `BackwardShapes` makes of its
    policy."""
    shapes = (source_folder() / "backward" / "shapes.cuh").read_text()
    declared = [
        re.findall(pattern, shapes)
        for pattern in (
            r"static constexpr int Ctas = .*?;",
            r"using Statistic = .*?;",
            r"static constexpr int kDqColumns = .*?;",
            r"static constexpr int kDqTile = .*?;",
        )
    ]
    assert [len(found) for found in declared] == [1] * 4
    headers = f"""
        #include <type_traits>
        #include "backward/policy.h"
        #include "params.h"
        using namespace ringfa3;
        using std::conditional_t;
        template <int D> struct Shapes {{
          static constexpr BackwardPolicy kPolicy = kBackwardPolicy<D>;
          {" ".join(found[0] for found in declared)}
        }};"""
    units = {unit.head_dim: unit for unit in UNITS if unit.direction == "backward"}
    clusters = {d: unit.cluster for d, unit in units.items()}
    assert clusters.keys() == backward.STATISTIC_WORDS.keys()
    prints = [
        f'printf("%d %zu %d\\n", Shapes<{d}>::Ctas, sizeof(Shapes<{d}>::Statistic), '
        f"Shapes<{d}>::kDqTile);"
        for d in clusters
    ]
    said = printed(tmp_path, headers, " ".join(prints))
    words = backward.STATISTIC_WORDS
    assert said == [
        x
        for d, unit in units.items()
        for x in (clusters[d], words[d] * backward.WORD, backward.dq_tile(unit))
    ]
