"""examples/torchtitan_cp.py in torchtitan's own trainer: `make torchtitan` installs the package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make torchtitan")

STEPS = Path(__file__).parent / "support" / "titan_steps.py"
Results = dict[str, torch.Tensor]


def steps(model: str, world: int, cp: int, file: Path) -> Results:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={world}", STEPS, model, str(cp), file],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results: Results = torch.load(file)
    return results


@pytest.mark.parametrize(("model", "worlds"), [("llama3", (2, 4)), ("qwen3", (2,))])
def test_losses_and_gradients_are_those_of_dense_attention(
    model: str, worlds: tuple[int, ...], tmp_path: Path
) -> None:
    """Packed documents, FSDP2 over all ranks, layers recomputed; 4 ranks are two CP groups.

    Reference: torchtitan in one process, in float32. Gradients within 5e-6 of it, or 1e-6 of the
    largest gradient; losses of two steps within 1e-5.
    """
    expected = steps(model, 1, 1, tmp_path / "dense.pt")
    floor = 1e-6 * max(x.norm() for name, x in expected.items() if "loss" not in name)
    assert floor > 0
    for world in worlds:
        found = steps(model, world, 2, tmp_path / "found.pt")
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            error = (found[name] - x).norm()
            bound = 1e-5 * x if "loss" in name else max(5e-6 * x.norm(), floor)
            assert error <= bound, (world, name, error / x.norm())


def plug_in(changes: Callable[[Any], object]) -> None:
    """Plugs RingFA3 into a configuration of torchtitan that is right but for `changes`."""
    sys.path.insert(0, str(STEPS.parents[2] / "examples"))
    try:
        import torchtitan_cp
    finally:
        sys.path.pop(0)
    parallelism = SimpleNamespace(context_parallel_degree=2, spmd_backend="full_dtensor")
    config = SimpleNamespace(
        model_spec=SimpleNamespace(name="llama3"),
        parallelism=parallelism,
        training=SimpleNamespace(disable_cuda_graphs=True),
    )
    changes(config)
    torchtitan_cp.plug_in(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda c: setattr(c.model_spec, "name", "gpt_oss"), "gpt_oss: .* llama3, qwen3 only"),
        (lambda c: setattr(c.parallelism, "context_parallel_degree", 1), "degree=1.* at least 2"),
        (lambda c: setattr(c.parallelism, "spmd_backend", "partial_dtensor"), "partial_dtensor"),
        (lambda c: setattr(c.training, "disable_cuda_graphs", False), "disable_cuda_graphs"),
    ],
)
def test_what_would_not_be_exact_is_refused(changes: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plug_in(changes)
