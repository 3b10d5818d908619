"""If this fails, the console shows wrong figures. The progress of a run: its figures, in one unit,
and lines without a broken word."""

from __future__ import annotations

import io
import math
import re

import pytest

from train.console import LineConsole, in_lines
from train.log.progress import StepProgress

RECORD = {
    "step": 1200,
    "loss": 2.95,
    "nats_per_byte": 1.0,
    "lr": 3e-4,
    "grad_norm": 0.5234,
    "tokens_per_s": 1234567.0,
    "rank_s": [1.0, 1.25, 0.9, 1.1],
    "slowest_rank": 1,
}
FIGURES = [
    "train 2.950 nats per token",
    "perplexity 19.11",
    "1.443 bits per byte",
    "held out 1.900 at step 1200",
    "lr 3.00e-04",
    "norm 0.523",
    "MFU 38.1%",
    "1,234,567 tokens/s",
    "slowest rank 1: 1.25 s, median 1.05",
]


def test_training_and_held_out_text_have_one_unit(capsys):
    """Nats per token, with perplexity and bits per byte. Training: a mean of the last steps,
    without one that was skipped."""
    with StepProgress(LineConsole(), steps=60) as progress:
        for step in range(1, 31):
            loss = math.nan if step == 25 else 3.0 - step / 20
            progress.update(RECORD | {"step": step, "loss": loss, "nats_per_byte": loss / 2})
        progress.validated(30, 1.9, 0.95, 123_456)
        progress.update(RECORD | {"step": 60, "loss": loss, "nats_per_byte": loss / 2}, mfu=0.381)
    first, validation, last = capsys.readouterr().out.splitlines()
    per_byte = 2.95 / 2 / math.log(2)
    assert first == (
        f"step 1/60  train 2.950 nats per token  perplexity 19.11  {per_byte:.3f} bits per byte  "
        "lr 3.00e-04  norm 0.523  1,234,567 tokens/s  slowest rank 1: 1.25 s, median 1.05"
    )
    assert validation == (
        "step 30/60  held out 1.900 nats per token (perplexity 6.686, 1.371 bits per byte)  "
        "of 123,456 bytes"
    )
    recent = 3.0 - (sum(range(12, 31)) - 25 + 30) / 19 / 20
    assert last.startswith(f"step 60/60  train {recent:.3f} nats per token  perplexity")
    assert "held out 1.900 at step 30  lr 3.00e-04  norm 0.523  MFU 38.1%  1,234,567" in last


@pytest.mark.parametrize("width", [60, 80])
def test_no_figure_and_no_word_is_broken_on_a_terminal(width):
    """The bar, a validation and a long line: what a terminal of that width shows."""
    written = io.StringIO()
    console = LineConsole(file=written, width=width, force_terminal=True)
    with StepProgress(console, steps=1200) as progress:
        progress.validated(1200, 1.9, 0.95, 123_456)
        progress.update(RECORD, mfu=0.381)
        console.print("8 x 131,072 tokens a step; " + "unbreakable " * 20)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    lines = re.split(r"[\r\n]+", text)
    assert max(map(len, lines)) <= width
    for figure in FIGURES:
        assert any(figure in line for line in lines), figure
    words = {"step", "1200/1200", "nats", "perplexity", "unbreakable", "131,072", "0:00:00"}
    assert words <= set(text.split())
    assert not {"unbr", "unbreak", "perple", "toke"} & set(text.split())


def test_a_quiet_console_prints_nothing(capsys):
    with StepProgress(LineConsole(quiet=True), steps=1200) as progress:
        progress.update(RECORD)
        progress.validated(1200, 1.9, 0.95, 1)
    assert capsys.readouterr().out == ""


def test_parts_fill_lines():
    assert in_lines(["aa", "bb", "cccc", "d"], 6) == ["aa  bb", "cccc", "d"]
    assert in_lines(["longer than the width", "b"], 6) == ["longer than the width", "b"]
    assert in_lines([], 6) == []
