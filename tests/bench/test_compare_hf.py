"""The comparison with transformers' attention: a whole run, two ranks, wrong gradients."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist

from benchmarks import compare_hf
from benchmarks.compare_hf import Figures, Gradients, Shape, main, measure
from examples import hf_cp
from tests.support.ranks import Ranks

SIZES = {size: number for size, number in hf_cp.SIZES.items() if size != "initializer_range"}
TINY = {
    "llama-1b": Shape(("LlamaConfig", SIZES), "sdpa", packs=True, longest=128),
    "gpt-oss-block": Shape(
        ("GptOssConfig", {**SIZES, **hf_cp.TINY["gpt-oss"][1]}), "eager", packs=False, longest=128
    ),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in TINY.items():
        monkeypatch.setitem(compare_hf.SHAPES, name, shape)


def _measure(group: dist.ProcessGroup | None, name: str) -> Figures:
    return measure(TINY[name], 300, 1, torch.device("cpu"), group)


@pytest.mark.usefixtures("tiny")
def test_a_whole_run_prints_a_line_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of bfloat16: above 0.1%, below 5%; no ratio exceeds 1.1."""
    assert main(["--tokens", "300", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == list(TINY)
    for line, shape in zip(lines, TINY.values(), strict=True):
        found = re.fullmatch(
            rf".*, 300 tokens, 1 x cpu: error ([\d.]+)%, {shape.attention}'s ([\d.]+)%, "
            r"ratio ([\d.]+); [\d,]+ tokens/s",
            line,
        )
        assert found, line
        ours, theirs, ratio = map(float, found.groups())
        assert 0.1 < ours < 5
        assert ours / theirs == pytest.approx(ratio, abs=2e-3)


def test_two_ranks_have_the_error_of_one(ranks: Ranks) -> None:
    """Within 5% of it: sums of bfloat16 gradients in another order."""
    alone = _measure(None, "llama-1b")
    for found in ranks.run(2, _measure, "llama-1b"):
        assert found.theirs == alone.theirs
        assert found.ours == pytest.approx(alone.ours, rel=0.05)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_gradients_that_differ_end_with_code_1(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """RingFA3's of the second shape are 1% too large, or NaN; nothing else is wrong."""
    right, calls = compare_hf.summed_gradients, itertools.count()

    def wrong(*arguments: object) -> Gradients:
        wanted = 1.0 if next(calls) == 0 else factor
        return {name: wanted * x for name, x in right(*arguments).items()}

    monkeypatch.setattr(compare_hf, "summed_gradients", wrong)
    assert main(["--tokens", "300", "--steps", "1"]) == 1


def test_one_token_has_no_label(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens", "1"])
    assert "--tokens 1: it must be at least 2" in capsys.readouterr().err
