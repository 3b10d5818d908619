"""If this fails, torchtitan does not train with RingFA3. examples/torchtitan_cp.py in torchtitan's
own trainer: `make torchtitan` installs the package."""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
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


def steps(model: str, world: int, cp: int, tp: int, file: Path) -> Results:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={world}", STEPS, model, str(cp), str(tp), file],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results: Results = torch.load(file)
    return results


@pytest.mark.parametrize(
    ("model", "worlds"), [("llama3", [(2, 1), (4, 1), (4, 2)]), ("qwen3", [(2, 1), (4, 2)])]
)
def test_losses_and_gradients_are_those_of_dense_attention(
    model: str, worlds: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Packed documents, FSDP2 over all ranks, layers recomputed, CP groups of two ranks.

    worlds: ranks, and the degree of tensor parallelism.

    Reference: torchtitan in one process, in float32. Gradients within 5e-6 of it, or 1e-6 of the
    largest gradient; losses of two steps within 1e-5.
    """
    expected = steps(model, 1, 1, 1, tmp_path / "dense.pt")
    floor = 1e-6 * max(x.norm() for name, x in expected.items() if "loss" not in name)
    assert floor > 0
    for world, tp in worlds:
        found = steps(model, world, 2, tp, tmp_path / "found.pt")
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            error = (found[name] - x).norm()
            bound = 1e-5 * x if "loss" in name else max(5e-6 * x.norm(), floor)
            assert error <= bound, (world, tp, name, error / x.norm())


def example() -> Any:
    sys.path.insert(0, str(STEPS.parents[2] / "examples"))
    try:
        return importlib.import_module("torchtitan_cp")
    finally:
        sys.path.pop(0)


def test_the_plan_has_the_documents_of_all_rows() -> None:
    """Also of a row that begins inside a document. Tokens, labels, positions: those of the rank."""
    positions = torch.tensor([[5, 6, 0, 1], [0, 0, 1, 2], [3, 4, 5, 6]])
    ids = torch.arange(12).view(3, 4)
    given = {"positions": positions, "other": 1}
    for rank in range(2):
        inputs, labels, extra = example().shard_input(ids, ids + 100, given, (rank, 2), "cpu", None)
        plan = extra["attention_masks"]
        assert plan.lengths.tolist() == [2, 2, 1, 3, 4]
        assert inputs.shape == labels.shape == extra["positions"].shape == (1, 6)
        assert torch.equal(inputs[0], plan.shard(ids.flatten()))
        assert torch.equal(labels, inputs + 100)
        assert torch.equal(extra["positions"][0], positions.flatten()[inputs[0]])
        assert extra["other"] == 1


def test_the_command_of_the_example_replaces_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in its docstring, up to the trainer, which builds the layers."""
    from torchtitan import trainer
    from torchtitan.config.override import apply_overrides

    built = []

    def build(self: object, config: Any) -> None:
        config.model_spec.model.update_from_config(config=config)
        apply_overrides(config.override, config)
        built.append(config)
        raise KeyboardInterrupt

    spec = example().__doc__.replace("\\\n", "").splitlines()[2]
    command = shlex.split(spec)
    script = command.index("examples/torchtitan_cp.py")
    monkeypatch.setattr(trainer.Trainer, "__init__", build)
    monkeypatch.setattr(sys, "argv", command[script:])
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(STEPS.parents[2] / command[script]), run_name="__main__")
    (config,) = built
    layers = config.model_spec.model.layers
    names = [type(layer.attention.inner_attention).__qualname__ for layer in layers]
    assert names == ["RingAttention.Config"] * 32
    assert config.parallelism.context_parallel_degree == 8
    assert trainer.prepare_context_parallel_input.__name__ == "shard_input"


def plug_in(changes: Callable[[Any], object]) -> None:
    """Plugs RingFA3 into a configuration of torchtitan that is right but for `changes`."""
    parallelism = SimpleNamespace(context_parallel_degree=2, spmd_backend="full_dtensor")
    config = SimpleNamespace(
        model_spec=SimpleNamespace(name="llama3"),
        parallelism=parallelism,
        training=SimpleNamespace(disable_cuda_graphs=True),
    )
    changes(config)
    example().plug_in(config)


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
