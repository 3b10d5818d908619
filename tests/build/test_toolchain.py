"""If this fails, the build takes a compiler that miscompiles, or reports none without the remedy.
The choice of a compiler, and the errors without one. Scripts stand in for nvcc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ringfa3.build import toolchain
from ringfa3.errors import BuildError
from tests.support import fake_tools


def test_cuda_home_then_path_then_the_wheel(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or old one does not hide the next."""
    home = tools / "bin/nvcc"
    path = fake_tools.nvcc(tools / "path")
    wheel = fake_tools.nvcc(tools / "wheels", "13.5.37")
    monkeypatch.setenv("PATH", f"{path.parent}:{tools / 'host'}")
    found = []
    for spoil in (lambda: None, home.unlink, lambda: fake_tools.nvcc(tools / "path", "13.0.88")):
        spoil()
        toolchain.find_program.cache_clear()
        found.append(toolchain.find_compiler())
    assert found == [(home, "V13.2.5"), (path, "V13.2.5"), (wheel, "V13.5.37")]


@pytest.mark.parametrize("version", ["13.0.88", "12.8.93"])
def test_the_error_names_an_old_compiler_its_path_and_the_remedy(tools: Path, version: str) -> None:
    fake_tools.nvcc(tools, version)
    with pytest.raises(BuildError) as error:
        toolchain.find_compiler()
    assert str(error.value) == (
        f"nvcc 13.1 or later is needed, found {tools}/bin/nvcc (V{version}): pip install "
        "'ringfa3[build]', or set CUDA_HOME to a toolkit that has it"
    )


def test_an_nvcc_beside_headers_of_another_cuda_does_not_count(tools: Path) -> None:
    """pip installs such a pair if PyTorch pins an older runtime; the headers reject that nvcc."""
    wheel = fake_tools.nvcc(tools / "wheels", "13.5.37")
    api = tools / "include/cuda_runtime_api.h"
    api.write_text("/** */\n#define CUDART_VERSION  13020\n")
    assert toolchain.find_compiler() == (tools / "bin/nvcc", "V13.2.5")
    api.write_text("/** */\n#define CUDART_VERSION  13000\n")
    toolchain.find_program.cache_clear()
    assert toolchain.find_compiler() == (wheel, "V13.5.37")
    wheel.unlink()
    toolchain.find_program.cache_clear()
    with pytest.raises(BuildError, match=r"\(V13\.2\.5 with headers of CUDA 13\.0\): pip"):
        toolchain.find_compiler()


def test_the_error_without_a_compiler_names_the_places(tools: Path) -> None:
    (tools / "bin/nvcc").unlink()
    with pytest.raises(BuildError, match="none was found in CUDA_HOME, PATH or the wheels: pip"):
        toolchain.find_compiler()


def test_wheel_folders_are_where_wheels_unpack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert toolchain.wheel_folders()[0] == tmp_path / "nvidia" / "cu13"


def test_nvcc_needs_a_cplusplus_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "host/g++").unlink()
    with pytest.raises(BuildError, match=r"host C\+\+ compiler g\+\+ not found: .*NVCC_CCBIN"):
        toolchain.find_compiler()
    fake_tools.script(tools / "other", "")
    monkeypatch.setenv("NVCC_CCBIN", str(tools / "other"))
    assert toolchain.find_compiler()[0] == tools / "bin/nvcc"
