"""If this fails, the published cost of planning masks is that of other masks. The benchmark of
plans of masks: what its masks are, and what it prints."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import plan_costs


def test_masks_have_so_many_nodes_and_tokens() -> None:
    """Exactly; a chain and documents of nodes have the pairs of their causal documents."""
    made = {name: make() for name, make in plan_costs.masks(20, 4096).items()}
    assert {mask.q_tokens for mask in made.values()} == {4096}
    lengths = np.diff(plan_costs.documents(20, 4096))
    assert made["documents"].pairs == (lengths * (lengths + 1) // 2).sum()
    assert made["chain"].pairs == 4096 * 4097 // 2
    images = lengths // 6
    for name, plain in (("documents, an image each", "documents"), (list(made)[-1], "chain")):
        assert made[name].pairs - made[plain].pairs == (images * (images - 1) // 2).sum()


def test_a_run_prints_each_mask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["plans", "--nodes", "8", "--tokens", "1024", "--ranks", "2"])
    plan_costs.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 1 + len(plan_costs.masks(8, 1024))
    assert all(float(x) > 0 for line in lines[1:] for x in line.split()[-3:])
