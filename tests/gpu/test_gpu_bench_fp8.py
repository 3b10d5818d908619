"""If this fails, the published errors of the 8-bit kernels are wrong. `python -m ringfa3.bench fp8
--kernels` on a Hopper GPU: errors are those of the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfa3.bench.__main__ import main
from ringfa3.bench.fp8.kernels import MEASURED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_errors_of_the_kernels_are_those_of_the_reference(tmp_path: Path, head_dim: int) -> None:
    """Of O within 8%: the kernels' order of sums is another, and tensor cores cut them. Of LSE
    within 10% or .002 nats."""
    found = {}
    for name in ("reference", "kernels"):
        folder = tmp_path / name
        options = ["--lengths", "512", "--head-dim", str(head_dim), "--heads", "2", "--seeds", "2"]
        flag = ["--kernels"] if name == "kernels" else []
        assert main(["fp8", *options, *flag, "--device", "cuda", "--out", str(folder)]) == 0
        found[name] = json.loads((folder / "errors.json").read_text())["rows"]
    for of_fallback, of_kernels in zip(found["reference"], found["kernels"], strict=True):
        assert set(of_kernels["out"]) == set(MEASURED)
        for name in MEASURED:
            case = f"{name}, causal {of_kernels['causal']}"
            assert of_kernels["out"][name] == pytest.approx(of_fallback["out"][name], rel=0.08), (
                case
            )
            near = pytest.approx(of_fallback["lse"][name], rel=0.1, abs=2e-3)
            assert of_kernels["lse"][name] == near, case
