"""If this fails, the comparison of RoPE settings is wrong. RoPE settings without training: each is
that of a model built with it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from tests.train.model.test_transformer import build, packed_sample
from train.config import Config
from train.data.batches import make_batch
from train.log.plots import plot_losses
from train.probes.rope_sweep import set_rope, settings_of
from train.sections.model import RopeConfig


def test_a_changed_model_is_one_that_was_built_so():
    """The losses of every token, bit by bit, there and back again."""
    batch = make_batch(packed_sample([90, 41]), None, "zigzag")
    model = build()
    plain = model(batch)
    for rope in (RopeConfig("yarn", factor=4.0, original_len=32), RopeConfig(theta=500.0)):
        set_rope(model.transformer, rope)
        changed = model(batch)
        assert torch.equal(changed, build(rope=rope)(batch))
        assert not torch.equal(changed, plain)
    set_rope(model.transformer, RopeConfig())
    assert torch.equal(model(batch), plain)


def test_the_settings_are_every_type_with_every_factor():
    """Original length: that of the trained run, not that of the command line."""
    asked, trained = Config(), Config()
    asked.model.rope, asked.data.seq_len = RopeConfig(theta=7e4), 4096
    trained.data.seq_len, trained.data.max_doc_len = 2048, 1024
    asked.rope.types, asked.rope.factors, asked.rope.thetas = ["linear", "yarn"], [2.0, 4.5], [1e6]
    found = settings_of(asked, trained)
    assert list(found) == [
        *("as it is", "linear 2", "linear 4.5", "yarn 2", "yarn 4.5", "theta 1e+06"),
    ]
    assert found["yarn 4.5"] == RopeConfig("yarn", 7e4, 4.5, original_len=1024)
    assert found["theta 1e+06"] == RopeConfig(theta=1e6)


def test_one_plot_has_a_curve_a_setting(tmp_path, drawn):
    """The curves' labels and values; positions without tokens leave a gap."""
    plot_losses(tmp_path / "rope.png", "RoPE", {"a": [1.0, math.nan, 2.0], "b": [3.0, 2.0, 1.0]})
    ((axes,),) = (figure.axes for figure in drawn)
    curves = {line.get_label(): str(line.get_ydata()) for line in axes.get_lines()}
    assert curves == {"a": "[ 1. nan  2.]", "b": "[3. 2. 1.]"}
    assert (tmp_path / "rope.png").exists()


@pytest.mark.soak
def test_a_job_gives_the_loss_of_mode_eval_for_the_runs_own_setting(pretrain, trained_run):
    """Nats per byte to 1e-9; a row a setting."""
    for arguments in (["mode=eval"], ["mode=rope", "rope.factors=[2]", "rope.thetas=[5e5]"]):
        done = pretrain(*arguments, f"run.dir={trained_run}")
        assert done.returncode == 0, done.stderr
    rows = json.loads((trained_run / "rope.json").read_text())
    own = json.loads((trained_run / "eval-held-out.json").read_text())
    assert [row["label"] for row in rows] == ["as it is", "linear 2", "yarn 2", "theta 500000"]
    assert rows[0]["nats_per_byte"] == pytest.approx(own["nats_per_byte"], rel=1e-9)
    assert rows[0]["rope"] == dataclasses.asdict(RopeConfig())
    assert len({row["nats_per_byte"] for row in rows}) == 4
