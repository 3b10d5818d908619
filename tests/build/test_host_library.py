"""If this fails, calls start in Python although a compiler is there, or the build of the launcher
fails. The build of the host library, with a stand-in for g++; tests/test_host.py compiles it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest
import torch

from ringfa3.build import host_library
from ringfa3.build.__main__ import main
from ringfa3.errors import BuildError

COMPILER = """#!/bin/sh
case "$1" in --version) echo "stand-in 1"; exit 0;; esac
echo x >> "$0.runs"
while [ "$#" -gt 1 ]; do shift; done
{ending}
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ that writes an empty library, and an empty cache."""
    path = tmp_path / "g++"
    path.write_text(COMPILER.format(ending='echo built > "$1"'))
    path.chmod(0o755)
    monkeypatch.setenv("NVCC_CCBIN", str(path))
    monkeypatch.setenv("RINGFA3_CACHE", str(tmp_path / "cache"))
    return path


def runs(compiler: Path) -> int:
    noted = Path(f"{compiler}.runs")
    return len(noted.read_text().splitlines()) if noted.is_file() else 0


def test_a_library_serves_one_version_of_pytorch(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is built once for each."""
    made = []
    for version in (torch.__version__, "2.99.0"):
        monkeypatch.setattr(torch, "__version__", version)
        for _ in range(2):
            main(["--host"])
            made.append(capsys.readouterr().out.strip())
    assert made[0] == made[1] != made[2] == made[3]
    assert all(Path(x).read_text() == "built\n" for x in made)
    assert runs(compiler) == 2


@pytest.mark.parametrize("name", ["platform.machine", "platform.libc_ver"])
def test_a_platform_has_a_library_of_its_own(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Python's SOABI need not name it."""
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "cpython-312")
    first = host_library.ensure_host_library()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(name, lambda: ("another", "1"))
        assert host_library.ensure_host_library().parent != first.parent
    assert host_library.ensure_host_library() == first
    assert runs(compiler) == 2


# Functions that Python 3.15 no longer has: docs.python.org/3/deprecations, "C API".
REMOVED = {
    "PyImport_ImportModuleNoBlock",
    "PySys_ResetWarnOptions",
    "PyUnicode_AsDecodedObject",
    "PyUnicode_AsDecodedUnicode",
    "PyUnicode_AsEncodedObject",
    "PyUnicode_AsEncodedUnicode",
    "PyWeakref_GET_OBJECT",
    "PyWeakref_GetObject",
}


def test_no_function_that_python_removes_is_called() -> None:
    """The library is compiled for whatever Python runs it."""
    sources = [path.read_text() for path in host_library.host_folder().iterdir()]
    called = {name for text in sources for name in re.findall(r"\bPy\w+(?=\()", text)}
    assert "PyCapsule_New" in called
    assert not called & REMOVED


def test_a_folder_may_be_named_in_place_of_a_compiler(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvcc takes it."""
    monkeypatch.setenv("NVCC_CCBIN", str(compiler.parent))
    assert host_library.ensure_host_library().is_file()
    assert runs(compiler) == 1


def test_the_error_of_the_compiler_is_told(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.write_text(COMPILER.format(ending='echo "module.cpp:1: no such thing" >&2; exit 3'))
    with pytest.raises(SystemExit) as ended:
        main(["--host"])
    assert str(ended.value) == (
        f"ringfa3: the C++ launcher does not compile, {compiler.name} exited with 3:\n"
        "module.cpp:1: no such thing"
    )


def test_headers_of_python_are_asked_for(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match=r"Python\.h not found: install Python's headers"):
        host_library.ensure_host_library()
    assert runs(compiler) == 0
