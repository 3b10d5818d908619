"""What a sweep's plot shows."""

from __future__ import annotations

from train.log.plots import sweep_lines


def row(result: float | None, **choices: str) -> dict:
    status = "failed" if result is None else "finished"
    return {"status": status, "nats_per_byte": result, "choices": choices}


def test_a_sweep_is_drawn_over_its_number_with_a_line_per_other_choice():
    rows = [
        *(row(3.0 + s, lr="0.003", seed=str(s), model="tiny") for s in range(3)),
        *(row(2.0 + s, lr="1e-3", seed=str(s), model="tiny") for s in range(3)),
        row(None, lr="0.01", seed="0", model="tiny"),
    ]
    across, lines = sweep_lines(rows)
    assert across == "lr"  # although the seeds are more
    assert lines == {f"seed={s} model=tiny": [(0.001, 2.0 + s), (0.003, 3.0 + s)] for s in range(3)}


def test_seeds_are_drawn_where_there_is_nothing_else_and_words_never():
    assert sweep_lines([row(1.0, seed="1"), row(2.0, seed="0")]) == (
        *("seed", {"": [(0.0, 2.0), (1.0, 1.0)]}),
    )
    assert sweep_lines([row(1.0, model="tiny"), row(2.0, model="125m")]) == (None, {})
    assert sweep_lines([row(1.0, lr="1"), row(None, lr="2")]) == (None, {})
    assert sweep_lines([row(1.0, clip="null"), row(2.0, clip="0.5")]) == (None, {})
