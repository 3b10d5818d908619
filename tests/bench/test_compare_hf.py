"""The comparison with transformers' attention: a whole run, two ranks, wrong gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from benchmarks import compare_hf
from benchmarks.compare_hf import Figures, Gradients, Shape, main, measure
from tests.support.ranks import Ranks

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MIXED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
TINY = {
    "llama-1b": Shape(("LlamaConfig", SIZES), "sdpa", packs=True, longest=128),
    "gpt-oss-block": Shape(
        ("GptOssConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}),
        "eager",
        packs=False,
        longest=128,
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
def test_gradients_that_differ_end_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """RingFA3's are 1% too large; transformers' are not."""
    right = compare_hf.results_of

    def wrong(*arguments: object) -> Gradients:
        return {name: 1.01 * x for name, x in right(*arguments).items()}

    monkeypatch.setattr(compare_hf, "results_of", wrong)
    assert main(["--shape", "llama-1b", "--tokens", "300", "--steps", "1"]) == 1
