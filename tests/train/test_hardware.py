"""If this fails, predictions are those of another GPU. The default of ``hardware``: the file of the
GPUs that a driver lists."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from hydra import compose, initialize_config_dir

from train import config, hardware
from train.hardware import hardware_here

CONFIGS = Path(__file__).absolute().parents[2] / "configs"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GH200 480GB", "h200"),  # no file has its figures
        ("NVIDIA A100-SXM4-80GB", "h200"),
        ("", "h200"),
    ],
)
def test_a_gpu_is_found_by_its_name(tmp_path, model, name):
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\nGPU UUID: 1\n")
    assert hardware_here(tmp_path) == name
    assert (CONFIGS / "hardware" / f"{name}.yaml").is_file()


def test_a_file_of_another_gpu_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "b200.yaml").touch()
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: NVIDIA B200\n")
    assert hardware_here(tmp_path) == "h200"
    monkeypatch.setattr(hardware, "FILES", tmp_path / "gpus")
    assert hardware_here(tmp_path) == "b200"


def test_a_machine_without_a_driver_has_the_usual_name(tmp_path):
    assert hardware_here(tmp_path) == "h200"


@pytest.mark.parametrize(("overrides", "name"), [([], "h100"), (["hardware=h200"], "h200")])
def test_a_name_on_the_command_line_goes_before_that_of_the_gpu(overrides, name):
    with mock.patch.object(config, "hardware_here", return_value="h100"):
        config.register_schema()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("config", ["experiment=8b_512k", *overrides])
    finally:
        config.register_schema()
    assert composed.hardware.name == name
