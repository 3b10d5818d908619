"""If this fails, short sequences run in the slower kernel. The choice between the two units of a
kind by the scores that their tiles compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringfa3.build.units import UNITS, select_units, short_unit
from ringfa3.kernels import dispatch
from ringfa3.planning.tiling import Plan, plan_local


def plan_of(lengths: list[int], causal: bool = True) -> Plan:
    tokens = np.array(lengths, np.int64)
    return plan_local(tokens, tokens, -1, 0 if causal else -1)


def test_a_short_unit_differs_from_its_kind_in_rows_alone() -> None:
    short = [unit for unit in UNITS if unit.short]
    assert [unit.name for unit in short] == ["forward-d64-bf16-short", "forward-d64-fp16-short"]
    for unit in short:
        (usual,) = select_units([unit.name.removesuffix("-short")])
        assert short_unit(usual) is unit
        assert (usual.tile_m, unit.tile_m) == (192, 128)
    assert short_unit(select_units(["forward-d128-bf16"])[0]) is None


@pytest.mark.parametrize(
    ("lengths", "causal", "blocks", "in_short_tiles"),
    [
        ([512], True, 2 + 3 + 4, 1 + 2 + 3 + 4),  # rows 192, 384, 512 see so many blocks of 128
        ([512], False, 3 * 4, 4 * 4),
        ([100, 200], True, 1 + 2 + 2, 1 + 1 + 2),
    ],
)
def test_scores_count_whole_blocks(
    lengths: list[int], causal: bool, blocks: int, in_short_tiles: int
) -> None:
    plan = plan_of(lengths, causal)
    assert plan.forward_scores(192, 128) == blocks * 192 * 128
    assert plan.forward_scores(128, 128) == in_short_tiles * 128 * 128


@pytest.mark.parametrize(
    ("lengths", "causal", "short"),
    [
        ([512] * 4, True, True),
        ([1024] * 2, True, True),
        ([100] * 30, False, True),
        ([2048], True, False),  # .90 of the scores
        ([512] * 4, False, False),  # .89
        ([192] * 4, True, False),
        ([0, 0], True, False),
        ([100] * 7 + [16384], True, False),
        ([40960, 4], True, False),
    ],
)
def test_the_short_unit_runs_where_it_computes_much_less(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], causal: bool, short: bool
) -> None:
    monkeypatch.setattr(dispatch, "_build_problem", lambda _: None)
    (unit,) = select_units(["forward-d64-bf16"])
    found = dispatch._unit_of_plan(unit, sum(lengths), plan_of(lengths, causal))
    assert found == (short_unit(unit) if short else unit)


def test_a_short_unit_that_cannot_be_built_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so."""
    (unit,) = select_units(["forward-d64-bf16"])
    reason = "the kernel forward-d64-bf16-short cannot be built (no compiler)"
    monkeypatch.setattr(dispatch, "_build_problem", lambda u: reason if u.short else None)
    dispatch.log_once.cache_clear()
    for _ in range(2):
        assert dispatch._unit_of_plan(unit, 512, plan_of([512])) is unit
    (line,) = capsys.readouterr().err.splitlines()
    assert "short sequences use forward-d64-bf16" in line
    assert line.endswith(f"slower for them: {reason}")


def test_no_other_choice_of_a_unit_meets_the_short_ones() -> None:
    for d in (8, 64):
        found = dispatch.narrowest_unit("forward", torch.bfloat16, d)
        assert found is not None
        assert found.name == "forward-d64-bf16"
