"""The paired timing of two builds: its refusals, and which build it calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare_speed
from ringfa3.build.units import UNITS

UNIT = UNITS[0]


def build(cache: Path, name: str) -> None:
    (cache / name).mkdir(parents=True)
    (cache / name / "kernel.so").write_text("")


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        compare_speed.main(arguments)
    return str(ended.value.code)


def test_a_missing_build_is_named_before_anything_is_timed(tmp_path: Path) -> None:
    """A variant of the ablation is no build of its unit."""
    build(tmp_path / "old", f"{UNIT.name}-{'a' * 16}-{'a' * 8}")
    build(tmp_path / "new", f"{UNIT.name}-without-overlap-{'a' * 16}-{'a' * 8}")
    folders = str(tmp_path / "old"), str(tmp_path / "new")
    assert refusal(*folders, "--units", UNIT.name).endswith(f"new has no build of {UNIT.name}")


def test_a_machine_without_a_hopper_gpu_is_refused(tmp_path: Path) -> None:
    for cache in ("old", "new"):
        build(tmp_path / cache, f"{UNIT.name}-{'a' * 16}-{'a' * 8}")
    message = refusal(str(tmp_path / "old"), str(tmp_path / "new"), "--units", UNIT.name)
    assert message == "compare_speed: the kernels run on Hopper GPUs only, and there is none here"


def test_the_build_that_is_switched_to_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache in ("old", "new"):
        build(tmp_path / cache, f"{UNIT.name}-{'a' * 16}-{'a' * 8}")

    class Library:
        def __init__(self, path: str) -> None:
            self.ringfa3_forward = lambda: Path(path).parent.parent.name

    monkeypatch.setattr(compare_speed.ctypes, "CDLL", Library)
    switch = compare_speed.Switch(tmp_path / "old", tmp_path / "new")
    for switch.current in ("old", "new", "old"):
        assert switch.entry(UNIT, "forward")() == switch.current
