"""If this fails, plots of a run show other curves than its metrics. The curves in the plots of a
run and of a sweep."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from train.log.plots import plot_run, plot_sweep, sweep_lines
from train.log.smoothing import mean, smoothed, window_of


@pytest.mark.parametrize("steps", [1, 3, 19, 20, 400, 1000])
def test_smoothed_losses_are_means_of_the_steps_on_both_sides(steps):
    """Against a loop, 1e-12; a skipped step has no loss, or none that is finite."""
    losses = np.random.default_rng(steps).normal(size=steps).tolist()
    losses[steps // 2 :: 7] = [None if n % 2 else math.nan for n in losses[steps // 2 :: 7]]
    half = window_of(steps) // 2
    for place, value in enumerate(smoothed(losses, window_of(steps))):
        expected = mean(losses[max(0, place - half) : place + half + 1])
        assert value == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert window_of(steps) == {1: 1, 3: 3, 19: 19, 20: 20, 400: 20, 1000: 50}[steps]


def test_a_line_stays_a_line():
    """Means of a falling line are not later than it, but for half a window at each end."""
    line = np.linspace(3, 1, 60)
    assert smoothed(line.tolist(), 20)[10:-10] == pytest.approx(line[10:-10])


def test_the_loss_of_a_run_is_drawn_beside_that_of_the_held_out_text(tmp_path, drawn):
    """Nats per token: each step faint, the mean, all validations, also those of an earlier version,
    and the strongest baseline. Below: the learning rate and the gradient norm."""
    losses = [2.0, None, *np.linspace(1.9, 1.2, 58)]
    metrics = [
        {"step": n, "loss": loss, "nats_per_byte": 9, "lr": 1e-3 / n, "grad_norm": 1 / n}
        for n, loss in enumerate(losses, 1)
    ]
    earlier = {"step": 30, "nats_per_byte": 0.5, "bytes": 600, "tokens": 200}
    evaluations = [earlier, {"step": 60, "nats_per_byte": 9, "loss": 1.25}]
    for name, lines in (("metrics", metrics), ("eval", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    plot_run(tmp_path, [1.0], [2.0], {"gzip": 0.7, "bigram": 0.65, "unigram": 0.8}, 2.0)
    axes, rates, norms = drawn[0].axes
    raw, means, held_out, baseline = axes.lines
    assert np.array_equal(raw.get_ydata(), [math.nan if x is None else x for x in losses], True)
    assert raw.get_alpha() < 0.5
    assert means.get_ydata() == pytest.approx(smoothed(losses, 20))
    assert list(zip(*held_out.get_data(), strict=True)) == [(30, 1.5), (60, 1.25)]
    assert list(baseline.get_ydata()) == [1.3, 1.3]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train, mean of 20 steps", "held out", "bigram, held out"]
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_title() == f"Training of {tmp_path.name}"
    (right,) = axes.child_axes
    assert right.get_ylabel() == "bits per byte of the held-out text"
    drawn[0].draw_without_rendering()
    assert right.get_ylim() == pytest.approx(np.array(axes.get_ylim()) / 2 / math.log(2))
    assert rates.get_yscale() == norms.get_yscale() == "log"
    assert rates.lines[0].get_ydata() == pytest.approx([1e-3 / n for n in range(1, 61)])
    assert norms.lines[0].get_ydata() == pytest.approx([1 / n for n in range(1, 61)])
    assert norms.lines[1].get_ydata() == pytest.approx(smoothed([1 / n for n in range(1, 61)], 20))
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("values", "scale"),
    [({"optim.lr": ("1e-3", "3e-3")}, "log"), ({"model.dim": ("64", "128")}, "linear")],
)
def test_a_sweep_is_drawn_in_bits_per_byte_over_a_log_learning_rate(tmp_path, drawn, values, scale):
    ((key, choices),) = values.items()
    rows = [row(2.0, **{key: choices[0]}), row(1.0, **{key: choices[1]})]
    plot_sweep(tmp_path, rows)
    (axes,) = drawn[0].axes
    assert axes.get_xscale() == scale
    assert axes.lines[0].get_ydata() == pytest.approx([2 / math.log(2), 1 / math.log(2)])
    assert axes.get_ylabel() == "loss (bits per byte)"
    assert axes.get_title() == f"Held-out loss of {tmp_path.name}"


def row(result: float | None, **choices: str) -> dict:
    status = "failed" if result is None else "finished"
    return {"status": status, "nats_per_byte": result, "choices": choices}


def test_the_x_axis_is_a_number_and_other_choices_are_lines():
    rows = [
        *(row(3.0 + s, lr="0.003", seed=str(s), model="tiny") for s in range(3)),
        *(row(2.0 + s, lr="1e-3", seed=str(s), model="tiny") for s in range(3)),
        row(None, lr="0.01", seed="0", model="tiny"),
    ]
    across, lines = sweep_lines(rows)
    assert across == "lr"  # although there are more seeds
    assert lines == {f"seed={s} model=tiny": [(0.001, 2.0 + s), (0.003, 3.0 + s)] for s in range(3)}


def test_the_x_axis_is_a_seed_only_without_other_numbers_and_never_text():
    assert sweep_lines([row(1.0, seed="1"), row(2.0, seed="0")]) == (
        *("seed", {"": [(0.0, 2.0), (1.0, 1.0)]}),
    )
    assert sweep_lines([row(1.0, model="tiny"), row(2.0, model="125m")]) == (None, {})
    assert sweep_lines([row(1.0, lr="1"), row(None, lr="2")]) == (None, {})
    assert sweep_lines([row(1.0, clip="null"), row(2.0, clip="0.5")]) == (None, {})
