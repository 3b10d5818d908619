"""If this fails, a wheel with kernels does not run on a machine without compilers.
`pytest -m gpu tests/gpu/test_gpu_wheel.py` runs it.

RINGFA3_WHEEL names the wheel. Without it the test builds one, for which it needs the extra `wheel`
and perhaps four minutes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ringfa3.build.compile import ensure_library
from ringfa3.build.units import select_units
from tests.support.wheels import install, run_without_compilers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
UNITS = ["forward-d128-bf16", "backward-d128-bf16"]
SECONDS = 60

ATTEND = """
import torch, ringfa3
from torch.nn.functional import scaled_dot_product_attention

def run(attend, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(torch.ones_like(out))
    return [x.double() for x in (out, *(leaf.grad for leaf in leaves))]

def dense(q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)

def error(results, reference):
    pairs = zip(results, reference, strict=True)
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1500, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
ours = lambda q, k, v: ringfa3.flash_attn_func(q, k, v, causal=True)
reference = run(dense, q.double(), k.double(), v.double())
pytorch = error(run(dense, q, k, v), reference)
for _ in range(3):
    print(ringfa3.__file__, error(run(ours, q, k, v), reference) / pytorch)
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    if given := os.environ.get("RINGFA3_WHEEL"):
        return Path(given).resolve()
    from ringfa3.build.wheel import build_wheel

    units = select_units(UNITS)
    for unit in units:
        ensure_library(unit)
    return build_wheel(units, tmp_path)


def test_an_installed_wheel_attends_at_once(wheel: Path, tmp_path: Path) -> None:
    """Forward and gradients, three times, in 60 s from `pip install`.

    The error against float64 is at most 1.5 of that of PyTorch's attention in bf16. Nothing is
    compiled; one line says that calls start in Python.
    """
    began = time.monotonic()
    python = install(wheel, tmp_path / "elsewhere")
    said, errors = run_without_compilers(python, ATTEND, tmp_path / "cache")
    seconds = time.monotonic() - began
    lines = [line.split() for line in said.splitlines()]
    assert len(lines) == 3
    for package, ratio in lines:
        assert Path(package).is_relative_to(tmp_path / "elsewhere")
        assert float(ratio) < 1.5
    (line,) = (line for line in errors.splitlines() if line.startswith("ringfa3: "))
    assert line.startswith("ringfa3: C++ launcher unavailable, launching from Python")
    assert not list((tmp_path / "cache").glob("*/kernel.so"))
    assert seconds < SECONDS
