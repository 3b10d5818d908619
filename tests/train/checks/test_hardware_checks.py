"""If this fails, wrong speeds in a hardware file pass, and predictions are wrong. Speeds of
``hardware``: lists that do not fit each other, and the files of the group."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from train.checks.config import check
from train.checks.machine import check_hardware
from train.config import ConfigError, HardwareConfig, register_schema


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_tflops": [600.0]}, r"hardware\.forward_tflops=\[600\.0\] must have a speed"),
        ({"backward_tflops": [0.0, 1.0]}, r"backward_tflops=\[0\.0, 1\.0\]: 0\.0 must be above 0"),
        ({"head_dims": [], "forward_tflops": [], "backward_tflops": []}, r"head_dims=\[\]"),
        ({"matmul_tflops": [1.0, 2.0]}, r"hardware\.widths=\[768, 2048, 4096\]"),
        ({"widths": [768, 4096, 2048]}, r"must rise; nearest valid: .*=\[768, 2048, 4096\]"),
    ],
)
def test_lists_must_fit_each_other(config, changes, message):
    check(config, world=1)
    config.hardware = HardwareConfig(**changes)
    with pytest.raises(ConfigError, match=message):
        check(config, world=1)


CONFIGS = Path(__file__).absolute().parents[3] / "configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "hardware").iterdir()))
def test_every_file_of_hardware_fits_and_bears_its_name(name):
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        made = OmegaConf.to_object(compose("config", [f"hardware={name}"]).hardware)
    assert made.name == name
    check_hardware(made)
