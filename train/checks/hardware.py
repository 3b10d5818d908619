"""The checks of ``hardware.*``: its lists must have matching lengths."""

from __future__ import annotations

from train.config import ConfigError, HardwareConfig


def check_hardware(hardware: HardwareConfig) -> None:
    """Raise ``ConfigError`` unless each list of ``hardware`` has a speed for each of its keys."""
    for keys, names in (
        ("head_dims", ("forward_tflops", "backward_tflops")),
        ("widths", ("matmul_tflops",)),
    ):
        given = getattr(hardware, keys)
        for name in names:
            values = getattr(hardware, name)
            if len(values) != len(given):
                raise ConfigError(
                    f"hardware.{name}={values} must have a speed for each of "
                    f"hardware.{keys}={given}"
                )
        if given != sorted(given):
            raise ConfigError(
                f"hardware.{keys}={given} must rise; nearest valid: hardware.{keys}={sorted(given)}"
            )
