"""If this fails, the published gain of folding compares layers that do different work."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.masks import fold_layer

CPU = torch.device("cpu")


def test_folded_and_unfolded_differ_in_tokens_alone() -> None:
    """Gradients of the weights: those of both, for gradients of y that add up to the same ones, to
    2% of their norm in bfloat16."""
    folded, unfolded = fold_layer.layers((16, 14, 16), fold_layer.SMALL, CPU)
    assert (len(folded.x_TD), len(unfolded.x_TD)) == (15 + 15 * 16, 30 * 16)
    # Row i of a response is row i of its sequence; the prompt's rows have no gradient.
    folded.dy_TD[:15] = 0
    unfolded.dy_TD.view(16, 30, -1)[:, :15] = 0
    unfolded.dy_TD.view(16, 30, -1)[:, 15:] = folded.dy_TD[15:].view(16, 15, -1)
    (_, *ours), (_, *theirs) = folded.step(), unfolded.step()
    for x, y in zip(ours, theirs, strict=True):
        assert y.norm() > 0
        assert (x - y).norm() <= 0.02 * y.norm()


def test_another_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = fold_layer.Mask.documents
    monkeypatch.setattr(fold_layer.Mask, "documents", lambda cu: documents(cu, causal=False))
    with pytest.raises(RuntimeError, match="the folded outputs differ by"):
        fold_layer.layers((16, 14, 4), fold_layer.SMALL, CPU)


def test_a_run_prints_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    fold_layer.main(["--prompt", "16", "--response", "14", "--pairs", "2"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "255 tokens folded, 480 unfolded"
    assert re.fullmatch(r"unfolded .* ms, folded .* ms: \d+\.\d{3} \[.*\]", second)
