"""If this fails, `python -m ringfa3.build` compiles the wrong kernels, or hides an error of the
compiler. The build and its command line. Scripts stand in for nvcc and cuobjdump."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ringfa3.build import toolchain
from ringfa3.build.__main__ import main
from ringfa3.build.compile import (
    COMPILE_SECONDS,
    default_jobs,
    ensure_library,
    find_library,
    free_memory,
    library_stem,
    source_folder,
)
from ringfa3.build.units import FP8_VARIANTS, UNITS, VARIANTS, select_units
from ringfa3.errors import BuildError
from tests.support import fake_tools
from tests.support.compiler_listings import LISTING, REMARKS, SPILLED
from tests.support.fake_tools import (
    runs,
)


def test_a_unit_is_built_once_and_found_without_a_compiler(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ensure_library(UNITS[0])
    assert first.read_text() == "library\n"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    toolchain.find_program.cache_clear()
    assert ensure_library(UNITS[0]) == first
    assert runs(tools) == 1


def test_units_do_not_share_a_library(tools: Path) -> None:
    assert len({ensure_library(unit) for unit in UNITS}) == len(UNITS)


def test_another_source_is_another_library(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_library(UNITS[0])
    sources = tools / "csrc"
    sources.mkdir()
    (sources / "forward.cu").write_text("changed")
    monkeypatch.setattr("ringfa3.build.compile.source_folder", lambda: sources)
    assert ensure_library(UNITS[0]) != first


def test_a_changed_header_makes_libraries_of_the_units_that_include_it(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through other headers, from their folder or the root; names count as bytes do."""
    sources = tools / "csrc"
    texts = {
        "forward.cu": '#include "hopper/tma.cuh"\n#include <cute/tensor.hpp>\n',
        "backward.cu": '#include "params.h"\n',
        "hopper/tma.cuh": '  # include "warp.cuh"\n#include "params.h"\n',
        "hopper/warp.cuh": "one",
        "params.h": "one",
        "unused.h": "one",
    }
    for name, text in texts.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text)
    monkeypatch.setattr("ringfa3.build.compile.source_folder", lambda: sources)
    units = [next(u for u in UNITS if u.direction == name) for name in ("forward", "backward")]

    def changed(change: Callable[[], object]) -> list[bool]:
        before = [library_stem(unit) for unit in units]
        change()
        return [library_stem(u) != stem for u, stem in zip(units, before, strict=True)]

    warp = sources / "hopper" / "warp.cuh"
    assert changed(lambda: warp.write_text("two")) == [True, False]
    assert changed(lambda: (sources / "params.h").write_text("two")) == [True, True]
    assert changed(lambda: (sources / "unused.h").write_text("two")) == [False, False]
    assert changed(lambda: warp.rename(sources / "warp.cuh")) == [True, False]


def test_a_source_that_the_name_of_a_library_ignores_is_an_error(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's depfile shows it: here a macro hides the include."""
    sources = tools / "csrc"
    sources.mkdir()
    (sources / "forward.cu").write_text('#define H "hidden.h"\n#include H\n')
    (sources / "hidden.h").touch()
    monkeypatch.setattr("ringfa3.build.compile.source_folder", lambda: sources)
    written = "a\\ b.o: {0}/forward.cu /usr/include/stdio.h \\\n  {1}"
    for hidden, fails in (("/usr/include/math.h", False), (f"{sources}/hidden.h", True)):
        depfile = written.format(sources, hidden)
        (tools / "depfile").write_text(depfile + "\n")
        body = f'while [ "$1" != -MF ]; do shift; done; cat {tools}/depfile > "$2"'
        fake_tools.nvcc(tools, body=body)
        if not (tools / "host" / "cat").exists():
            fake_tools.link(tools / "host", "cat")
        if not fails:
            made = ensure_library(UNITS[0])
            made.unlink()
            continue
        with pytest.raises(BuildError, match=r"includes .*hidden.h in a way that its name"):
            ensure_library(UNITS[0])
        assert find_library(UNITS[0]) is None


def test_an_architecture_has_libraries_of_its_own(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of x86_64 and aarch64 may share a home; each of the two finds its own library again."""

    def here(machine: str) -> Path:
        monkeypatch.setattr("platform.machine", lambda: machine)
        return ensure_library(UNITS[0])

    first, other = here("x86_64"), here("aarch64")
    assert other.parent != first.parent
    assert (here("x86_64"), here("aarch64")) == (first, other)


def test_a_variant_compiles_the_ablation_with_the_headers_of_the_product(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources of the ablation count for variants only; without them the error says what to do."""
    folder = tools / "ablation"
    monkeypatch.setattr("ringfa3.build.compile.ablation_folder", lambda: folder)
    product = UNITS[0]
    variant = replace(product, variant="without-overlap")
    for call in (library_stem, ensure_library):
        with pytest.raises(BuildError, match="does not exist: run it from a checkout"):
            call(variant)
    folder.mkdir()
    (folder / "forward.cu").write_text("one")
    before = library_stem(product), library_stem(variant)
    (folder / "forward.cu").write_text("two")
    after = library_stem(product), library_stem(variant)
    assert before[0] == after[0]
    assert before[1] != after[1]
    fake_tools.nvcc(tools, body=f'echo "$arguments" > {tools}/command')
    ensure_library(variant)
    command = (tools / "command").read_text().split()
    assert str(folder / "forward.cu") in command
    assert f"-I{source_folder()}" in command


def test_the_first_use_says_what_it_does(tools: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A line at the start, with the time, and one at the end. A later use prints nothing."""
    name = UNITS[0].name
    ensure_library(UNITS[0])
    began, ended = capfd.readouterr().err.splitlines()
    assert began == f"ringfa3: compiling {name}, about {COMPILE_SECONDS} s"
    assert re.fullmatch(rf"ringfa3: compiled {name} in \d+ s", ended)
    ensure_library(UNITS[0])
    assert capfd.readouterr() == ("", "")


def test_temporary_files_of_nvcc_lie_in_the_working_folder(tools: Path) -> None:
    """A killed nvcc would leave them in /tmp."""
    fake_tools.nvcc(tools, body=f'echo "$TMPDIR" > {tools}/where')
    made = ensure_library(UNITS[0])
    assert Path((tools / "where").read_text().strip()).parent == made.parent.parent


D64_INT8 = ("forward-d64-bf16-int8", "forward-d64-fp16-int8")


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        (["all"], [u.name for u in UNITS if u.direction == "forward"]),
        (["d128-bf16"], [f"forward-d128-bf16{x}" for x in ("", "-fp8", "-int8", "-clips")]),
        (["d64-clips"], ["forward-d64-bf16-clips", "forward-d64-fp16-clips"]),
        (["forward-d128-bf16"], ["forward-d128-bf16"]),
        (["d64-int8", "forward-d128-bf16"], ["forward-d128-bf16", *D64_INT8]),
        (["d64-fp16-fp8"], ["forward-d64-fp16-fp8"]),
    ],
)
def test_selectors_are_parts_of_names(selectors: list[str], names: list[str]) -> None:
    assert [u.name for u in select_units(selectors) if u.direction == "forward"] == names


def test_main_builds_missing_units(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_library(select_units(["forward-d64-bf16"])[0])
    with pytest.raises(SystemExit) as ended:
        main(["--units", "forward-d64-bf16", "forward-d128-bf16"])
    assert ended.value.code == 0
    assert runs(tools) == 2
    out = capsys.readouterr().out
    assert re.fullmatch(
        rf"2 units: 1 compiled in \d+ s, 1 were there; the cache is {tools}/cache\n", out
    )


def test_two_jobs_compile_two_units_at_once(tools: Path) -> None:
    """Each compile waits until the other has started."""
    both = (
        f'n=0; while [ "$(wc -l < {tools}/log)" -lt 2 ]; do n=$((n + 1)); '
        "[ $n -lt 400 ] || exit 1; sleep 0.05; done"
    )
    fake_tools.link(tools / "host", "wc")
    fake_tools.nvcc(tools, body=both)
    with pytest.raises(SystemExit) as ended:
        main(["--units", "forward-d64-bf16", "forward-d128-bf16", "-j", "2"])
    assert ended.value.code == 0


def test_one_job_compiles_one_unit_at_a_time(tools: Path) -> None:
    alone = f"mkdir {tools}/busy || exit 1; sleep 0.2; rmdir {tools}/busy"
    fake_tools.nvcc(tools, body=alone)
    with pytest.raises(SystemExit) as ended:
        main(["--units", "all", "-j", "1"])
    assert ended.value.code == 0


def test_a_failed_compile_ends_the_build_with_its_last_lines(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1. No further unit starts; built units stay."""
    fails = 'case "$arguments" in *HEAD_DIM=128*) seq 1 40 >&2; echo no room >&2; exit 2;; esac'
    fake_tools.link(tools / "host", "seq")
    fake_tools.nvcc(tools, body=fails)
    with pytest.raises(SystemExit) as ended:
        main(["--units", "forward-d64-bf16", "forward-d128-bf16", "forward-d256", "-j", "1"])
    message = str(ended.value.code)  # Python prints a string and exits with 1
    first, *last = message.splitlines()
    assert first == "ringfa3: forward-d128-bf16 does not compile, nvcc exited with 2:"
    assert last == [*map(str, range(22, 41)), "no room"]
    assert runs(tools) == 2
    assert find_library(select_units(["forward-d64-bf16"])[0])


def test_exit_codes_and_messages_of_the_command_line(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tools.nvcc(tools, body="echo no such instruction >&2; exit 1")
    command = [sys.executable, "-m", "ringfa3.build", "--units", "d128-bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nvcc exited with 1:\nno such instruction" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SystemExit, match="unknown unit d96: allowed are all, forward-d64"):
        main(["--units", "d96"])
    with pytest.raises(SystemExit) as ended:
        main(["-j", "0"])
    assert ended.value.code == 2
    assert "-j 0: it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gibibytes", "cores", "told", "expected"),
    [(64, 8, None, 8), (20, 8, None, 3), (2, 8, None, 1), (64, 2, "5", 5), (64, 2, "", 2)],
)
def test_jobs_by_memory_and_cores(
    monkeypatch: pytest.MonkeyPatch, gibibytes: int, cores: int, told: str | None, expected: int
) -> None:
    monkeypatch.setattr("ringfa3.build.compile.free_memory", lambda: gibibytes << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    if told is not None:
        monkeypatch.setenv("MAX_JOBS", told)
    assert default_jobs() == expected


@pytest.mark.parametrize("told", ["0", "-1", "many", "2.5"])
def test_a_wrong_max_jobs_raises(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("MAX_JOBS", told)
    with pytest.raises(BuildError, match=f"MAX_JOBS={told}: it must be a positive integer"):
        default_jobs()


def test_free_memory_of_the_machine_or_the_control_group(tmp_path: Path) -> None:
    machine, group = tmp_path / "meminfo", tmp_path / "group"
    machine.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n")
    assert free_memory(machine, group) == 4000 << 10
    group.mkdir()
    for limit, expected in (("max", 4000 << 10), ("3000000", 1_500_000), ("1000000", 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("2000000\n")
        (group / "memory.stat").write_text("active_file 7\ninactive_file 500000\n")
        assert free_memory(machine, group) == expected


@pytest.mark.parametrize(
    ("remarks", "listing", "fault"),
    [
        (REMARKS, LISTING, None),
        (REMARKS, SPILLED, "1 local loads and stores in the loop of wgmmas"),
        (REMARKS.replace(" 0 bytes spill stores", " 4000 bytes spill stores"), LISTING, "4000"),
        ("", LISTING, "name no kernel"),
    ],
)
def test_check_judges_remarks_and_machine_code(
    tools: Path,
    capsys: pytest.CaptureFixture[str],
    remarks: str,
    listing: str,
    fault: str | None,
) -> None:
    """The second run judges a library that the cache has, from its stored remarks."""
    (tools / "remarks").write_text(remarks)
    (tools / "listing").write_text(listing)
    fake_tools.link(tools / "host", "cat")
    fake_tools.nvcc(tools, body=f"cat {tools}/remarks >&2")
    version = '[ "$1" = --version ] && echo "release, V13.4.92"'
    fake_tools.script(tools / "bin/cuobjdump", f"{version} || cat {tools}/listing")
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["--units", "forward-d64-bf16", "--check"])
        assert ended.value.code == (0 if fault is None else 1)
        said = capsys.readouterr().out.splitlines()[-1]
        assert said.startswith("forward-d64-bf16: ")
        assert (fault or "machine code is as expected") in said
    assert runs(tools) == 1


def test_check_without_cuobjdump_fails(tools: Path) -> None:
    with pytest.raises(SystemExit, match=r"cuobjdump 13\.1 or later is needed"):
        main(["--units", "forward-d64-bf16", "--check"])


def test_variants_are_units_of_their_own() -> None:
    """Names, flags and libraries differ from the product's; `all` does not include them."""
    for product_name, variants in (
        ("forward-d128-fp16", VARIANTS),
        ("forward-d128-fp16-fp8", FP8_VARIANTS),
    ):
        (product,) = select_units([product_name])
        for name, (define, tile) in variants.items():
            variant = product.as_variant(name)
            assert variant.name == f"{product.name}-{name}"
            tile_m, tile_n = tile or (product.tile_m, product.tile_n)
            of_tile = replace(product, tile_m=tile_m, tile_n=tile_n)
            assert variant.defines == (*of_tile.defines, *([define] if define else []))
            assert library_stem(variant) != library_stem(product)
            assert variant not in UNITS
