"""The curves in the plot of a sweep."""

from __future__ import annotations

from train.log.plots import sweep_lines


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
