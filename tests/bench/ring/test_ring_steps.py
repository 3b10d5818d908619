"""If this fails, a whole step with a wrong result gets a speed in the tables. Rows of whole steps
are timed only where their results are right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.timing import WallClock
from ringfa3.bench.ring import checkpoint, fresh
from ringfa3.bench.ring.cases import RING_SETS
from ringfa3.bench.ring.implementations import Ring
from ringfa3.planning.context_plan import ContextPlan


def _other_weights(block: Callable[..., torch.Tensor], *inputs: torch.Tensor, **_: object) -> Any:
    *rest, wo = inputs
    return block(*rest, wo * 1.01)


@pytest.mark.parametrize(
    ("name", "stand_in", "message"),
    [
        ("keep_attention", lambda: create_selective_checkpoint_contexts([]), "kept ran the ring 2"),
        ("checkpoint", _other_weights, "kept and stored differ in the gradient of x, norm, wq, "),
    ],
)
def test_a_block_that_recomputes_or_has_other_gradients_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, name: str, stand_in: Callable[..., object], message: str
) -> None:
    monkeypatch.setattr(checkpoint, name, stand_in)
    monkeypatch.setattr(checkpoint, "paired", None)
    (case, *_), device = RING_SETS["checkpoint"](1, 1024), torch.device("cpu")
    row = checkpoint.measure_checkpointed(
        case, Ring(Communicator()), torch.bfloat16, device, 10, WallClock()
    )
    assert row.stopped is not None
    assert row.stopped.startswith(f"wrong: {message}")


def test_each_step_of_fresh_has_a_packing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one was prepared. None is timed if the output of a plan changes."""
    plans: list[ContextPlan] = []
    step = fresh.Step.run

    def run(self: fresh.Step, plan: ContextPlan) -> tuple[torch.Tensor, list[float]]:
        plans.append(plan)
        out, seconds = step(self, plan)
        return out + (len(plans) > 30) * (len(plans) % 3), seconds

    monkeypatch.setattr(fresh.Step, "run", run)
    case, device = next(iter(RING_SETS["fresh"](1, 64))), torch.device("cpu")
    row = fresh.measure_fresh(case, Ring(Communicator()), torch.bfloat16, device, 10, WallClock())
    assert row.stopped == "wrong: step 5: a fresh plan and the same plan again differ in out"
    assert [id(plan) for plan in plans[::3]] == [id(plan) for plan in plans[2::3]]
    assert len({plan.digest for plan in plans}) == 24
    assert [bool(plan.prepared) for plan in plans[::3]] == [False, True] * 12


def test_a_prepared_plan_whose_calls_build_schedules_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fresh, "schedules_built", itertools.count().__next__)
    case, device = next(iter(RING_SETS["fresh"](1, 64))), torch.device("cpu")
    row = fresh.measure_fresh(case, Ring(Communicator()), torch.bfloat16, device, 1, WallClock())
    assert row.stopped == "wrong: step 0: calls on a prepared plan built 1 schedules"
