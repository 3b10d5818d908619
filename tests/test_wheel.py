"""If this fails, the installed package lacks files, or does not run. A wheel of this tree,
installed in another place: what is in it, and that it runs there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import runpy, sys, torch
import ringfa3
from ringfa3.build.compile import source_folder

q, k, v = (torch.randn(1, 48, heads, 16) for heads in (4, 2, 2))
out = ringfa3.RingFA3Attention(4, 2, 16)(q, k, v)
dense = [x.transpose(1, 2) for x in (q, k, v)]
reference = torch.nn.functional.scaled_dot_product_attention(
    *dense, is_causal=True, enable_gqa=True
)
print("error", (out.transpose(1, 2) - reference).abs().max().item())
print("package", ringfa3.__file__)
print("sources", source_folder())
sys.argv = ["doctor"]
runpy.run_module("ringfa3.doctor", run_name="__main__")
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """What a command prints; it may end with 0, or with the doctor's 1."""
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel is installed, alone."""
    folder = tmp_path_factory.mktemp("wheel")
    said = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    wheels = list(folder.glob("ringfa3-*.whl"))
    assert len(wheels) == 1, said
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", folder / "site", wheels[0], cwd=folder)
    return folder / "site"


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_holds_the_package_and_the_sources_of_the_kernels(site: Path) -> None:
    """As many files as the tree has, and nothing of tests, trainer, benchmarks or results."""
    package = {f"ringfa3/{name}" for name in files(ROOT / "ringfa3")}
    kernels = {f"ringfa3/csrc/{name}" for name in files(ROOT / "csrc")}
    assert {"ringfa3/py.typed", "ringfa3/csrc/params.h"} <= package | kernels
    found = {name for name in files(site) if ".dist-info/" not in name}
    assert found == package | kernels
    (licence,) = site.glob("ringfa3-*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()


def test_an_installed_wheel_attends_and_runs_the_doctor(site: Path, tmp_path: Path) -> None:
    """From another folder, on the CPU, float32: within 1e-5 of PyTorch's attention."""
    environment = {**os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    said = run(sys.executable, "-c", PROGRAM, cwd=tmp_path, env=environment)
    told = dict(line.split(maxsplit=1) for line in said.splitlines() if " " in line)
    assert float(told["error"]) < 1e-5, said
    assert Path(told["package"]).is_relative_to(site)
    assert Path(told["sources"]) == site / "ringfa3" / "csrc"
    assert "This machine can build: " in said
