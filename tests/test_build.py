"""The build without a compiler's help: a script stands in for nvcc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringfa3 import build, kernels

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release, V{version}"; exit; fi
echo run >> "{log}"
{body}
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in nvcc and CUTLASS, an empty cache; gives the folder, `log` has a line per run."""
    for folder in ("bin", "include/cute", "include/cutlass"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "include/cute/tensor.hpp").touch()
    (tmp_path / "include/cutlass/version.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    monkeypatch.setenv("RINGFA3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    install(tmp_path)
    return tmp_path


def install(folder: Path, version: str = "13.2.5", body: str = ":") -> None:
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(version=version, log=folder / "log", body=body))
    nvcc.chmod(0o755)
    build.compiler.cache_clear()


def runs(folder: Path) -> int:
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_unit_is_built_once_and_found_without_a_compiler(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.library(build.UNITS[0])
    assert first.read_text() == "library\n"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    build.compiler.cache_clear()
    assert build.library(build.UNITS[0]) == first
    assert runs(tools) == 1
    assert (tools / "cache").stat().st_mode & 0o777 == 0o700


def test_units_do_not_share_a_library(tools: Path) -> None:
    assert len({build.library(unit) for unit in build.UNITS}) == len(build.UNITS)


def test_another_source_is_another_library(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library(build.UNITS[0])
    sources = tools / "csrc"
    sources.mkdir()
    (sources / "forward.cu").write_text("changed")
    monkeypatch.setattr(build, "sources", lambda: sources)
    assert build.library(build.UNITS[0]) != first


def test_eight_processes_build_once(tools: Path) -> None:
    install(tools, body="sleep 1")
    code = "from ringfa3 import build; build.library(build.UNITS[0])"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(8)]
    assert [p.wait(60) for p in processes] == [0] * 8
    assert runs(tools) == 1


def test_a_build_that_fails_or_is_killed_leaves_nothing_behind(tools: Path) -> None:
    install(tools, body="echo no such instruction >&2; exit 1")
    with pytest.raises(build.BuildError, match="no such instruction"):
        build.library(build.UNITS[0])
    install(tools, body="kill -9 $PPID")
    code = "from ringfa3 import build; build.library(build.UNITS[0])"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode != 0
    install(tools)
    assert build.library(build.UNITS[0]).read_text() == "library\n"


def test_an_old_compiler_is_named_with_the_remedy(tools: Path) -> None:
    install(tools, version="13.0.88")
    with pytest.raises(build.BuildError, match=r"13\.1 or later .*V13\.0\.88.*ringfa3\[build\]"):
        build.library(build.UNITS[0])


def test_missing_headers_are_named_with_the_remedy(tools: Path) -> None:
    (tools / "include/cute/tensor.hpp").unlink()
    with pytest.raises(build.BuildError, match="pip install nvidia-cutlass"):
        build.library(build.UNITS[0])


def test_a_folder_that_others_can_write_is_refused(tools: Path) -> None:
    (tools / "cache").mkdir()
    os.chmod(tools / "cache", 0o777)
    with pytest.raises(build.BuildError, match="can be written by others: chmod 700"):
        build.library(build.UNITS[0])


def test_arguments_mirror_the_header() -> None:
    """Field by field, in order, with csrc/params.h."""
    header = (build.sources() / "params.h").read_text()
    for name, mirror in (("Tensor3", kernels._Tensor3), ("ForwardArgs", kernels._ForwardArgs)):
        body = re.search(rf"struct {name} {{(.*?)}};", header, re.S)
        assert body is not None
        code = re.sub(r"//.*", "", body[1])
        declared = [
            re.search(r"(\w+)$", part.strip())[1]  # type: ignore[index]
            for line in code.split(";")
            if line.strip()
            for part in line.split(",")
        ]
        assert declared == [field for field, _ in mirror._fields_]
