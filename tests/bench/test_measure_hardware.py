"""If this fails, the file of a new GPU's speeds makes predictions wrong. The file that
`benchmarks.measure_hardware` writes, of figures that no GPU measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from benchmarks import measure_hardware
from benchmarks.measure_hardware import CONFIGS, hardware, products, slowest, text_of
from train.config import HardwareConfig, register_schema
from train.model.matmul import add_matmul

FAST = dict(
    zip(
        [
            *("forward_tflops.0", "forward_tflops.1", "backward_tflops.0", "backward_tflops.1"),
            *("matmul_tflops.0", "matmul_tflops.1", "matmul_tflops.2", "memory_gb_s"),
            *("host_link_gb_s", "memory_gb", "context_gb", "nccl_gb", "link_gb_s"),
        ],
        [601.26, 702.0, 550.0, 600.0, 500.0, 600.0, 700.0, 2800.4, 54.0, 150.758, 0.8, 1.5, 300.0],
        strict=True,
    )
)
SLOW = {**FAST, "forward_tflops.1": 640.0, "nccl_gb": 1.702, "memory_gb_s": 3000.0}
ALONE = {key: value for key, value in FAST.items() if key not in ("nccl_gb", "link_gb_s")}


def test_the_slowest_rank_counts_and_the_largest_memory() -> None:
    found = slowest([FAST, SLOW])
    assert found["forward_tflops.0"] == 601.0
    assert (found["forward_tflops.1"], found["memory_gb_s"]) == (640.0, 2800.0)
    assert (found["nccl_gb"], found["memory_gb"]) == (1.71, 150.75)  # never less, never more


def test_widths_are_those_of_the_models() -> None:
    """Llama-3-8B: 218,103,808 weights in the matrices of a block."""
    widths = [products(model)[0] for model in measure_hardware.MODELS]
    assert widths == [768, 2048, 4096]
    assert sum(a * b for a, b in products("8b")[1]) == 218_103_808


def test_products_are_a_block_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of 2 s, 3 matrices: 3 products of 2 FLOPs each, and the sums are those of dW."""
    sums: list[torch.Tensor] = []

    def product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        add_matmul(total, a, b)
        sums.append(total)

    monkeypatch.setattr(measure_hardware, "ROWS", 5)
    monkeypatch.setattr(measure_hardware, "random", lambda *shape: torch.ones(*shape).bfloat16())
    monkeypatch.setattr(measure_hardware, "seconds", lambda call: call() or 2.0)
    monkeypatch.setattr(measure_hardware, "add_matmul", product)
    shapes = [(8, 4), (4, 8), (8, 8)]
    speed = measure_hardware.matmul_speed(shapes)
    assert speed == pytest.approx(3 * 2 * 5 * (32 + 32 + 64) / 2 / 1e12)
    assert [tuple(total.shape) for total in sums] == [(4, 8), (8, 4), (8, 8)]
    assert all(total.dtype == torch.float32 and (total == 5).all() for total in sums)


@pytest.mark.parametrize("figures", [FAST, ALONE], ids=["several", "one"])
def test_the_trainer_reads_the_file(figures: dict[str, float], tmp_path: Path) -> None:
    """All figures arrive in ``hardware=NAME``; the heading says what has its default."""
    made = hardware("mine", figures)
    text = text_of(made, figures, "a GPU", 2)
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(text)
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        overrides = ["hardware=mine", f"hydra.searchpath=[file://{tmp_path}]"]
        read = compose("config", overrides).hardware
    assert dict(read) == dataclasses.asdict(made)
    assert read.forward_tflops == [601.26, 702.0]
    default, alone = HardwareConfig(), figures is ALONE
    assert read.link_gb_s == (default.link_gb_s if alone else 300.0)
    heading = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    defaults = heading.partition("not measured: ")[2].rstrip(".").split(", ")
    always = ["host_gb", "peak_tflops", "elementwise_bytes", "compiled_bytes"]
    always.append("network_gb_s")
    assert set(defaults) == {*always, *(["nccl_gb", "link_gb_s"] if alone else [])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h200"], "h200.yaml exists; choose another name, or replace it with --force"),
        (["a/b"], "a/b: a name has letters, digits, - and _"),
        (["mine", "--folder", "/nowhere"], "--folder /nowhere is not a folder"),
    ],
)
def test_a_name_is_free_and_safe(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        measure_hardware.main(arguments)
    assert message in capsys.readouterr().err


def test_a_process_without_a_gpu_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="this process has no GPU"):
        measure_hardware.main(["mine", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())
