"""If this fails, the published memory and speed of the trainer's memory settings are wrong. The
paired timing of `memory`: a whole run, what its settings do, and settings that disagree."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import compare_memory
from benchmarks.compare_memory import ALL, FULL, RESIDUAL, SAVING, SETTINGS, Trial
from tests.train.model.test_offload import CountRings
from train.model import transformer
from train.model.offload import HostTensor, Offload

LAYERS = 3
ARGUMENTS = [
    *("--model", "tiny", "--layers", str(LAYERS), "--tokens", "130", "--mlp-chunk", "64"),
    *("--loss-chunk", "100", "model.dim=32", "model.ffn_dim=48", "data.vocab_size=300"),
    *("parallel.device=cpu", "parallel.threads=1"),
]


@pytest.fixture(scope="module")
def trial() -> Trial:
    asked = argparse.Namespace(
        model="tiny",
        layers=LAYERS,
        tokens=130,
        mlp_chunk=64,
        loss_chunk=100,
        overrides=ARGUMENTS[-5:],
    )
    return Trial(compare_memory.read_config(asked), torch.device("cpu"))


def test_a_whole_run_prints_a_line_for_each_setting_and_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two pairs of both comparisons; the setting that runs first alternates."""
    ran: list[str] = []
    step = Trial.step

    def follow(trial: Trial) -> None:
        at = trial.transformer.recompute, trial.transformer.offload
        ran.append(next(x for x in SETTINGS if at == trial.setting(x)))
        step(trial)

    monkeypatch.setattr(Trial, "step", follow)
    compare_memory.main([*ARGUMENTS, "--pairs", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "CPU: 3 layers, 130 tokens, mlp_chunk 64, loss_chunk 100"
    assert [line.partition(":")[0] for line in lines[1:5]] == list(SETTINGS)
    assert ran == [FULL, SAVING, SAVING, FULL, SAVING, ALL, ALL, SAVING]
    change = r"[+-][\d.]+%"
    for line, (first, second), bar in zip(lines[5:], compare_memory.BARS, (-14, 2), strict=True):
        assert re.fullmatch(
            rf"{second} over {first}: {change} \({change} to {change}\) of a step, [\d.]+ s after "
            rf"[\d.]+ s; bar {re.escape(f'{bar:+}')}%: (reached|missed)",
            line,
        )


def test_settings_do_what_their_names_say(trial: Trial) -> None:
    """Rings of a step, and tensors that wait on the host: of each layer but the last."""
    counted = {}
    for setting in SETTINGS:
        trial.select(setting)
        with CountRings() as rings:
            trial.gradients()
        offload = trial.offloads[setting]
        counted[setting] = rings.calls, 0 if offload is None else len(offload.pool.buffers)
    hosted = LAYERS - 1
    assert counted == {
        FULL: (2 * LAYERS, 0),
        SAVING: (LAYERS, 0),
        RESIDUAL: (LAYERS, hosted),
        ALL: (LAYERS, 3 * hosted),
    }
    assert not torch.are_deterministic_algorithms_enabled()


def scaled(call: Callable[..., Tensor], when: Callable[..., bool]) -> Callable[..., Tensor]:
    return lambda *a, **k: call(*a, **k) * 1.01 if when(**k) else call(*a, **k)


def with_another_bit(get: Callable[[HostTensor], Tensor]) -> Callable[[HostTensor], Tensor]:
    """What returns from the host has another lowest bit in its first number."""

    def wrong(stored: HostTensor) -> Tensor:
        tensor = get(stored)
        kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(kind).flatten()[0] ^= 1
        return tensor

    return wrong


WRONG: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    "another loss where offloaded": (
        *(Offload, "checkpoint", lambda call: scaled(call, lambda **_: True), RESIDUAL),
    ),
    "another bit from the host": (HostTensor, "get", with_another_bit, RESIDUAL),
    "another loss where all is recomputed": (
        *(transformer, "checkpoint"),
        *(lambda call: scaled(call, lambda **k: "context_fn" not in k), FULL),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_setting_that_computes_another_step_ends_the_run(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Exit code 1, and the first such setting by name, before anything is timed."""
    place, name, wrong, setting = WRONG[case]
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(SystemExit) as ended:
        compare_memory.compare_gradients(trial, lambda _: None)
    message = str(ended.value.code)  # a text as the code is exit code 1
    assert message.startswith(f"compare_memory: {setting} computes another step than {SAVING}")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1"], "compare_memory: memory.offload=all with"),
        (["memory.offload=none"], "compare_memory: memory.offload=none: this comparison has "),
        (["model.dimm=3"], "compare_memory: model.dimm: no such key; the nearest valid one is "),
    ],
)
def test_a_wrong_configuration_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        compare_memory.main([*ARGUMENTS, *arguments])
    assert str(ended.value.code).startswith(message)


@pytest.mark.parametrize("arguments", [["--pairs", "1"], ["--compare", "full:ful"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare_memory.main([*ARGUMENTS, *arguments])
    assert ended.value.code == 2


def test_a_comparison_is_the_median_of_paired_changes() -> None:
    """Steps of 2 s with the first setting; 1.6, 1.7, 1.8 s and then 2.04, 2.06, 2.1 s after it."""

    class Steps:
        def __init__(self, after: list[float]) -> None:
            self.after, self.selected = iter(after), ""

        def select(self, name: str) -> None:
            self.selected = name

        def step(self) -> None:
            """Not run."""

        def seconds(self, call: object) -> float:
            return 2.0 if self.selected == pair[0] else next(self.after)

    lines = []
    for pair, after in (((FULL, SAVING), [1.6, 1.7, 1.8]), ((SAVING, ALL), [2.04, 2.06, 2.1])):
        steps: Any = Steps(after)
        measured = compare_memory.times(steps, pair, 3, lambda: None)
        assert measured == ([2.0] * 3, after)
        lines.append(compare_memory.line(pair, measured))
    assert lines == [
        "attention-saving over full: -15.0% (-20.0% to -10.0%) of a step, 1.70 s after 2.00 s; "
        "bar -14%: reached",
        "offload-all over attention-saving: +3.0% (+2.0% to +5.0%) of a step, 2.06 s after "
        "2.00 s; bar +2%: missed",
    ]
    assert "bar" not in compare_memory.line((FULL, ALL), measured)
