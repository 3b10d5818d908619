"""If this fails, two builds of the kernels are compared, and one of them runs on both sides. The
paired timing of two builds: its refusals, and which build it calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import compare_speed
from ringfa3 import host
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


def test_an_8_bit_unit_needs_its_quantiser_in_the_old_cache(tmp_path: Path) -> None:
    for cache in ("old", "new"):
        build(tmp_path / cache, f"forward-d64-bf16-fp8-{'a' * 16}-{'a' * 8}")
    folders = str(tmp_path / "old"), str(tmp_path / "new")
    message = refusal(*folders, "--units", "forward-d64-bf16-fp8")
    assert message.endswith("old has no build of quantise-d64-bf16")


def test_a_machine_without_a_hopper_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls start in Python: a program would go on calling one build."""
    chosen: list[str] = []
    monkeypatch.setattr(host, "select", chosen.append)
    for cache in ("old", "new"):
        build(tmp_path / cache, f"{UNIT.name}-{'a' * 16}-{'a' * 8}")
    message = refusal(str(tmp_path / "old"), str(tmp_path / "new"), "--units", UNIT.name)
    assert message == "compare_speed: the kernels run on Hopper GPUs only, and there is none here"
    assert chosen == ["python"]


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
    switch.timed = UNIT
    for switch.current in ("old", "new", "old"):
        assert switch.entry(UNIT, "forward")() == switch.current
    switch.timed, switch.current = None, "new"
    assert switch.entry(UNIT, "forward")() == "old"


def test_lengths_and_scores_are_those_asked_for() -> None:
    long, short = (next(x for x in UNITS if x.short is kind) for kind in (False, True))
    for case in compare_speed.cases(long, 4096, "sigma 4"):
        assert (case.lengths, case.scores) == ((4096,) * 4, "sigma 4")
    assert compare_speed.cases(short, 4096)[0].lengths == (512,) * 32


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("forward-d64-bf16", ["full", "causal"]),
        ("forward-d64-bf16-short", ["causal"]),
        ("forward-d64-bf16-int8", ["full", "causal"]),
        ("backward-d64-bf16", ["full", "causal"]),
    ],
)
def test_a_unit_is_timed_by_calls_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, name: str, masks: list[str]
) -> None:
    monkeypatch.setattr(compare_speed, "TOKENS", 64)
    monkeypatch.setattr(compare_speed, "SHORT", 32)
    monkeypatch.setattr(compare_speed, "HIDDEN", 64)
    unit = next(x for x in UNITS if x.name == name)
    cases = compare_speed.cases(unit)
    assert [case.mask for case in cases] == masks
    for case in cases:
        result = compare_speed.operation(unit, case, torch.device("cpu"))()
        x = result if isinstance(result, torch.Tensor) else result[0]
        assert x.shape[-2:] == (1, 64)
        assert x.abs().max() > 0
