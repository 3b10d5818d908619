"""If this fails, the rehearsal of 8-bit rings hangs, or measures another ring. The rehearsal of
rings in 8 bits: a whole run on the CPU, and ranks that fail."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from benchmarks import rehearse_quantised_ring as rehearsal
from ringfa3.ring import quantised_forward
from tests.support import dense

TOKENS = 300


def test_a_run_prints_a_line_for_each_precision_and_world(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors are near those of one device."""
    given = ["--tokens", "100", "--error-tokens", str(TOKENS), "--pairs", "2", "--worlds", "2", "3"]
    monkeypatch.setattr("sys.argv", ["rehearse", *given, "--precision", "native", "fp8"])
    rehearsal.main()
    lines = capsys.readouterr().out.splitlines()
    line = r"(\w+), (\d) ranks: error ([\d.]+) .* time ([\d.]+) \["
    found = [re.match(line, x) for x in lines]
    expected = [(precision, world) for precision in ("native", "fp8") for world in "23"]
    assert [m and m.group(1, 2) for m in found] == expected
    for m in found:
        assert m is not None
        assert float(m[3]) == pytest.approx(1, abs=0.1)
        assert float(m[4]) > 0


def test_the_reference_and_the_order_of_tokens() -> None:
    """Against dense attention in float64: 1e-5 of the largest; `gathered` inverts `shard`."""
    qkv = rehearsal.inputs(TOKENS, torch.device("cpu"), "outliers")
    seen = torch.from_numpy(dense.mask([TOKENS], [TOKENS], -1, 0))
    exact, _ = dense.attention(*(x.double() for x in qkv), seen)
    got = rehearsal.exact_output(qkv)
    assert len(got) == TOKENS
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()
    ring = rehearsal.Ring(3, qkv)
    assert torch.equal(ring.gathered([local[0] for local in ring.local]), qkv[0].float())


def test_a_rank_that_fails_ends_the_run() -> None:
    ring = rehearsal.Ring(2, rehearsal.inputs(64, torch.device("cpu")))
    with (
        mock.patch.object(
            quantised_forward, "run_quantised_forward", side_effect=OSError("no room")
        ),
        mock.patch("threading.excepthook"),
        pytest.raises(RuntimeError, match="a rank has failed"),
    ):
        ring.forward("fp8")
