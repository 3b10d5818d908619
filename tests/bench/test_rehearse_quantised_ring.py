"""The rehearsal of rings in 8 bits: a whole run on the CPU, and ranks that fail."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from benchmarks import rehearse_quantised_ring as rehearsal
from ringfa3.ring import quantised_forward
from tests.support import dense

TOKENS = 300


def test_a_run_prints_a_line_for_each_precision_world_and_placement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors are near those of one device."""
    given = ["--tokens", "100", "--error-tokens", str(TOKENS), "--pairs", "2", "--worlds", "2", "3"]
    monkeypatch.setattr("sys.argv", ["rehearse", *given, "--precision", "native", "fp8"])
    rehearsal.main()
    lines = capsys.readouterr().out.splitlines()
    line = r"(\w+), (\d) ranks(?: on (\w+) hosts?)?: error ([\d.]+) .* time ([\d.]+) \["
    found = [re.match(line, x) for x in lines]
    assert [m and m.group(1, 2, 3) for m in found] == [
        *(("native", world, None) for world in "23"),
        *(("fp8", world, hosts) for world in "23" for hosts in ("one", "several")),
    ]
    for m in found:
        assert m is not None
        assert float(m[4]) == pytest.approx(1, abs=0.1)
        assert float(m[5]) > 0


def test_the_reference_and_the_order_of_tokens() -> None:
    """Against dense attention in float64: 1e-5 of the largest; `gathered` inverts `shard`."""
    qkv = rehearsal.inputs(TOKENS, torch.device("cpu"), "outliers")
    seen = torch.from_numpy(dense.mask([TOKENS], [TOKENS], -1, 0))
    exact, _ = dense.attention(*(x.double() for x in qkv), seen)
    got = rehearsal.exact_output(qkv)
    assert len(got) == TOKENS
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()
    ring = rehearsal.Ring(3, "one", qkv)
    assert torch.equal(ring.gathered([local[0] for local in ring.local]), qkv[0].float())


def test_a_rank_that_fails_ends_the_run() -> None:
    ring = rehearsal.Ring(2, "one", rehearsal.inputs(64, torch.device("cpu")))
    with (
        mock.patch.object(
            quantised_forward, "run_quantised_forward", side_effect=OSError("no room")
        ),
        mock.patch("threading.excepthook"),
        pytest.raises(RuntimeError, match="a rank has failed"),
    ):
        ring.forward("fp8")
