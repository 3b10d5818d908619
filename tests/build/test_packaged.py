"""If this fails, an installed wheel compiles again, or runs damaged kernels. Kernels of an
installed wheel: which are found, and what happens to those that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfa3.build import packaged, toolchain
from ringfa3.build.compile import ensure_library, find_library, library_stem
from ringfa3.build.units import UNITS
from ringfa3.errors import BuildError
from tests.support.fake_tools import runs

UNIT = UNITS[0]


@pytest.fixture
def library(tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of UNIT in a wheel; the cache does not exist."""
    monkeypatch.setattr(packaged, "PACKAGE", tools / "package")
    packaged.find_packaged.cache_clear()
    built = tools / "kernel.so"
    built.write_bytes(b"compiled elsewhere")
    name = packaged.packaged_name(library_stem(UNIT), built)
    folder = tools / "package" / packaged.FOLDER / name
    folder.mkdir(parents=True)
    return built.rename(folder / "kernel.so")


def without_a_compiler(tools: Path) -> None:
    (tools / "bin" / "nvcc").unlink()
    toolchain.find_program.cache_clear()


def test_a_wheel_needs_neither_compiler_nor_cache(
    library: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a folder for one: without HOME the cache has no name."""
    without_a_compiler(tools)
    assert ensure_library(UNIT) == library
    assert not (tools / "cache").exists()
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("RINGFA3_CACHE")
    monkeypatch.setattr(Path, "expanduser", lambda _: 1 / 0)
    assert find_library(UNIT) == library


@pytest.mark.parametrize("damage", ["bit", "end", "empty"])
def test_a_damaged_library_is_not_loaded(
    library: Path, tools: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    """It is logged once; a compiler builds another, and without one an error says so."""
    whole = library.read_bytes()
    damaged = {"bit": bytes([whole[0] ^ 1]) + whole[1:], "end": whole[:-1], "empty": b""}
    library.write_bytes(damaged[damage])
    assert find_library(UNIT) is find_library(UNIT) is None
    line = f"ringfa3: {library} is damaged, and is not used: install the wheel again\n"
    assert capfd.readouterr().err == line
    assert ensure_library(UNIT).is_relative_to(tools / "cache")
    assert runs(tools) == 1
    packaged.find_packaged.cache_clear()
    for entry in (tools / "cache").glob(f"{UNIT.name}-*"):
        entry.rename(tools / "lost")
    without_a_compiler(tools)
    with pytest.raises(BuildError, match=r"nvcc 13\.1 or later is needed"):
        ensure_library(UNIT)


def test_a_library_of_other_sources_is_not_loaded(
    library: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after an edit of csrc; nor one of another unit, other flags, another architecture."""
    assert find_library(UNITS[1]) is None
    assert capfd.readouterr().err == ""  # it is not damaged
    with monkeypatch.context() as other:
        other.setattr("ringfa3.build.compile.FLAGS", ("-O0",))
        assert find_library(UNIT) is None
    with monkeypatch.context() as other:
        other.setattr("platform.machine", lambda: "aarch64")
        assert find_library(UNIT) is None
    sources = tools / "csrc"
    sources.mkdir()
    (sources / "forward.cu").write_text("changed")
    monkeypatch.setattr("ringfa3.build.compile.source_folder", lambda: sources)
    assert ensure_library(UNIT).is_relative_to(tools / "cache")
    assert runs(tools) == 1
