"""If this fails, a run learns from broken steps, or skips good ones. Which steps are skipped."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from train.config import GuardConfig
from train.engine.spike_filter import SpikeFilter


def taught(sigma: float | None = 3.0) -> SpikeFilter:
    """A filter over four steps: losses with mean 2 and deviation 1, gradient norms all 1."""
    spikes = SpikeFilter(GuardConfig(sigma=sigma, window=4, patience=2))
    for loss in (1.0, 3.0, 1.0, 3.0):
        assert spikes.skip_reason(loss, 1.0) is None
        spikes.accept(loss, 1.0)
    return spikes


@pytest.mark.parametrize("figures", [(math.nan, 1.0), (1.0, math.inf), (-math.inf, 1.0)])
def test_a_step_that_is_not_finite_is_never_accepted(figures):
    assert "is" in SpikeFilter(GuardConfig()).skip_reason(*figures)


def test_a_spike_lies_above_the_mean_not_below():
    spikes = taught()
    assert spikes.skip_reason(4.99, 1.0) is None
    assert "loss 5.01 is a spike" in spikes.skip_reason(5.01, 1.0)
    assert "gradient norm 1.01 is a spike" in spikes.skip_reason(2.0, 1.01)
    assert spikes.skip_reason(-50.0, 0.0) is None


@pytest.mark.parametrize("lessons", [0, 4])
def test_on_a_device_it_objects_to_the_same_steps(lessons):
    """Before and after its window is full; also where one of both figures is wrong."""
    spikes = taught() if lessons else SpikeFilter(GuardConfig(sigma=3.0, window=4))
    values = (-50.0, 1.0, 1.01, 4.99, 5.01, 1e9, math.inf, -math.inf, math.nan)
    for figures in itertools.product(values, values):
        skip_reason = spikes.skip_reason(*figures)
        found = spikes.should_skip(torch.tensor(figures, dtype=torch.float64))
        assert (found.shape, found.dtype) == ((), torch.int64)
        assert found == (skip_reason is not None), figures


def test_no_spike_without_sigma_or_before_the_window_is_full():
    assert taught(sigma=None).skip_reason(1e9, 1.0) is None
    spikes = SpikeFilter(GuardConfig(sigma=1.0, window=2))
    spikes.accept(1.0, 1.0)
    assert spikes.skip_reason(1e9, 1.0) is None
    spikes.accept(1.0, 1.0)
    assert spikes.skip_reason(1e9, 1.0) is not None


def test_skips_in_a_row_exhaust_it():
    spikes = taught()
    spikes.skip()
    spikes.accept(2.0, 1.0)
    spikes.skip()
    assert not spikes.out_of_patience
    spikes.skip()
    assert spikes.out_of_patience
    assert spikes.skipped == 3


def test_its_state_survives_json_exactly():
    spikes = SpikeFilter(GuardConfig(sigma=1.0, window=3))
    for i in range(5):
        spikes.accept(1 / (i + 3), math.pi**i)
    spikes.skip()
    other = SpikeFilter(GuardConfig(sigma=1.0, window=3))
    other.restore(json.loads(json.dumps(spikes.state())))
    assert other.state() == spikes.state()
    assert len(other.state()["taken"]) == 3
