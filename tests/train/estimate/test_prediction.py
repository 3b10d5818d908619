"""If this fails, predictions are wrong. They are compared with arithmetic done by hand."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

from tests.train.held_runs import hold_run
from train import compile_choice
from train.checks.config import check
from train.config import (
    Config,
    ConfigError,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    register_schema,
    resolve,
)
from train.estimate.job import COVERED, Job, UnpredictableError
from train.estimate.prediction import Limits, fewer_layers, predict, require_fit, smallest_change
from train.sections.model import RopeConfig
from train.tasks import estimate
from train.tasks.estimate import errors_of

ROOT = Path(__file__).absolute().parents[3]
HOST = Limits(150.7e9, 550e9)


def job(model: str, seq_len: int, engine: str, gpus: int = 4, **memory) -> Job:
    """One document of ``seq_len`` tokens over all GPUs, with a residual stream in bfloat16."""
    values = yaml.safe_load((ROOT / "configs" / "model" / f"{model}.yaml").read_text())
    config = Config(model=ModelConfig(**{**values, "rope": RopeConfig(**values["rope"])}))
    config.data.seq_len, config.parallel.cp, config.train.residual = seq_len, gpus, "bfloat16"
    config.engine = EngineConfig(engine, shard="all" if engine == "fsdp2" else None)
    config.memory = MemoryConfig(**{"recompute": "attention-saving", "mlp_chunk": 16384, **memory})
    config.train.compile = "none"
    return Job(config, gpus, 8, config.model.rows(4096), [0, seq_len], here=False)


# By hand, in GB, 1e15 FLOPs and seconds: for one GPU of four
TABLE = {
    "8b": {
        "state": (8.0, 8.0, 16.1),
        "residual": 34.4,
        "attention": 34.9,
        "shared": 6.4,
        "peak": 132,
        "offloaded": 72,
        "flops": (23.6, 216),
        "step": (111, 0.55),
        "twice": (135, 0.45),
    },
    "1b": {
        "state": (4.9, 4.9, 9.9),
        "residual": 17.2,
        "attention": 17.7,
        "shared": 6.4,
        "peak": 78,
        "offloaded": 52,
        "flops": (7.8, 216),
        "step": (113, 0.50),
        "twice": (143, 0.40),
    },
}
JOBS = {"8b": (524288, "fsdp2"), "1b": (1048576, "ddp")}


@pytest.mark.parametrize("model", TABLE)
def test_two_jobs_agree_with_the_arithmetic_by_hand(model):
    """8b at 512k under fsdp2, 1b at 1M under ddp: parts within 0.5%, peaks within 5%, steps 2%.

    A figure of the table may be half a unit of its last digit off.
    """
    table, shape = TABLE[model], JOBS[model]
    kept = predict(job(model, *shape))
    parts = kept.memory.parts
    exact = dict(zip(("weights", "gradients", "Adam"), table["state"], strict=True))
    exact |= {"residual stream": table["residual"], "attention's (O, LSE)": table["attention"]}
    exact["shared K/V, dK/dV"] = table["shared"]
    for name, expected in exact.items():
        assert parts[name] / 1e9 == pytest.approx(expected, rel=5e-3, abs=0.05), name
    assert kept.memory.device / 1e9 == pytest.approx(table["peak"], rel=0.05)
    offloaded = predict(job(model, *shape, offload="all"))
    assert offloaded.memory.device / 1e9 == pytest.approx(table["offloaded"], rel=0.05)
    flops = kept.time.flops
    assert flops.linear / 1e15 == pytest.approx(table["flops"][0], rel=5e-3)
    assert flops.attention / 1e15 == pytest.approx(table["flops"][1], rel=5e-3)
    for recompute, name in (("attention-saving", "step"), ("full", "twice")):
        time = predict(job(model, *shape, recompute=recompute)).time
        assert time.total == pytest.approx(table[name][0], rel=0.02)
        assert time.utilisation["mfu"] == pytest.approx(table[name][1], abs=0.01)


def test_offloaded_layers_lie_on_the_host():
    """8b at 1M on 4 GPUs: 414 s a step; 31 of 32 layers of 16,512 bytes a token, on one host.

    550 GB then hold no more than six sevenths of it.
    """
    made = predict(job("8b", 1 << 20, "fsdp2", offload="all"))
    assert made.time.total == pytest.approx(414, rel=0.03)
    assert made.memory.host["offloaded activations"] == 31 * (1 << 20) * 16512
    (problem,) = made.problems(HOST)
    assert problem.startswith("the ranks of a host need 633.1 GB")


def test_the_smallest_change_fits_and_no_smaller_one_does():
    """8b at 512k under ddp with nothing saved: no single setting helps, but two together."""
    large = job("8b", 524288, "ddp", recompute="none", mlp_chunk=None)
    config, sharded = large.config, EngineConfig("fsdp2", shard="all")
    changes = ["engine=fsdp2", "memory.recompute=full", "memory.recompute_layers=30"]
    assert smallest_change(large, HOST) == changes
    for recompute in ("attention-saving", "full"):
        memory = dataclasses.replace(config.memory, recompute=recompute)
        changed = dataclasses.replace(config, memory=memory)
        assert predict(dataclasses.replace(large, config=changed)).problems(HOST)
    changed = dataclasses.replace(config, engine=sharded)
    assert predict(dataclasses.replace(large, config=changed)).problems(HOST)
    config.engine = sharded
    for layers, fits in ((29, False), (30, True)):
        config.memory = MemoryConfig("full", recompute_layers=layers)
        assert bool(predict(large).problems(HOST)) != fits
    assert smallest_change(large, HOST) == []


def test_smaller_chunks_are_proposed_where_larger_ones_are_not_enough():
    """8b at 128k on 2 GPUs of 83.6 GB, with everything offloaded."""
    tight = job("8b", 131072, "fsdp2", gpus=2, offload="all")
    changes = smallest_change(tight, Limits(83.6e9, 270e9))
    assert changes == ["memory.loss_chunk=512", "memory.mlp_chunk=4096"]


def test_a_run_is_proposed_nothing_that_it_may_not_change(tmp_path):
    """8b at 512k with a residual stream in float32, for a new run and for one that has stopped."""
    wide = job("8b", 524288, "fsdp2")
    wide.config.train.residual, wide.config.data.path = "float32", None
    wide.config.run.dir = str(tmp_path)
    assert smallest_change(wide, HOST) == ["train.residual=bfloat16"]
    hold_run(wide.config)
    for mode in ("train", "estimate"):
        wide.config.mode = mode
        assert smallest_change(wide, HOST) == ["memory.offload=residual"]
    wide.config.engine = EngineConfig("ddp")
    assert smallest_change(wide, HOST) == ["engine=fsdp2", "memory.offload=residual"]


def test_fsdp2_holds_whole_gradients_between_micro_batches():
    """Of 1.236e9 weights in float32 with engine.reduce=step, else of a quarter; ddp's are whole."""
    cases = [("fsdp2", "step", 1, 1), ("fsdp2", "step", 2, 4), ("fsdp2", "micro", 2, 1)]
    for engine, reduce, samples, expected in (*cases, ("ddp", None, 1, 4)):
        made = job("1b", 65536, engine)
        made.config.engine.reduce, made.config.train.gradient_accumulation_steps = reduce, samples
        gradients = predict(made).memory.parts["gradients"]
        assert gradients == pytest.approx(1.2358e9 * expected, rel=1e-4)


def test_where_no_setting_helps_more_gpus_share_a_sample():
    names = smallest_change(job("8b", 524288, "fsdp2", gpus=1), HOST)
    assert names[0] == "parallel.cp=2 on 2 GPUs"


@pytest.mark.parametrize(("gpus", "per_host", "cp"), [(3, 3, 1), (6, 6, 2), (6, 8, 3)])
def test_only_groups_that_fill_a_host_are_proposed(gpus, per_host, cp):
    """8b at 512k on 20 GB fits nowhere; twice the cp does not divide the GPUs of a host."""
    large = job("8b", 524288, "fsdp2", gpus=gpus)
    large.config.parallel.cp = cp
    large = dataclasses.replace(large, per_host=per_host)
    with pytest.raises(ConfigError, match="no setting of memory and engine helps"):
        require_fit(large, Limits(20e9, 550e9))


def test_all_changes_of_a_job_share_its_plan():
    """Predictions for jobs whose samples lie on the same ranks, more than 20, take one plan."""
    large = job("8b", 524288, "ddp", recompute="none", mlp_chunk=None)
    with mock.patch("train.estimate.prediction.predict", wraps=predict) as predicted:
        smallest_change(large, HOST)
    plans = [call.args[0].plan for call in predicted.call_args_list]
    assert len(plans) > 20
    assert all(plan is large.plan for plan in plans)


def test_what_does_not_fit_is_refused_unless_it_is_forced():
    """Device memory, host memory, and a timeout; the message names a change, which helps."""
    tight = job("8b", 524288, "fsdp2")
    assert require_fit(tight, HOST).memory.device < HOST.device
    small = Limits(100e9, 550e9)
    with pytest.raises(
        ConfigError, match=r"needs 129\.5 GB.*are 100\.0; nearest valid: "
    ) as caught:
        require_fit(tight, small)
    assert "memory.offload=residual (or memory.force=true)" in str(caught.value)
    with pytest.raises(ConfigError, match=r"host need 364\.\d GB of its memory"):
        require_fit(job("8b", 524288, "fsdp2", offload="all"), Limits(150.7e9, 300e9))
    tight.config.parallel.timeout_s = 60.0
    with pytest.raises(ConfigError, match=r"timeout_s=60 is less than the 111 s.*timeout_s=240"):
        require_fit(tight, HOST)
    tight.config.memory.force = True
    assert require_fit(tight, small).problems(small)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("engine.name", "deepspeed", "engine=deepspeed"),
        ("train.attention", "sdpa", "train.attention=sdpa"),
        ("train.deterministic", True, "train.deterministic=true"),
        ("train.precision", "float32", "train.precision=float32"),
        ("model.attention_precision", "fp8", "model.attention_precision=fp8"),
        ("model.windows", [64, "full"], r"model.windows=\[64, 'full'\]"),
        ("data.packing", "best_fit", "data.packing=best_fit"),
        ("parallel.transport", "nccl", "parallel.transport=nccl"),
        ("parallel.device", "cpu", "parallel.device=cpu"),
        ("model.head_dim", 96, "a head dim of 96"),
    ],
)
def test_what_no_arithmetic_covers_is_refused_by_name(key, value, named):
    refused = job("1b", 65536, "ddp")
    section, name = key.split(".")
    setattr(getattr(refused.config, section), name, value)
    with pytest.raises(UnpredictableError, match=f"{named} cannot be predicted"):
        predict(refused)


def test_the_options_that_are_covered_are_listed_apart():
    """At most one setting between two commas."""
    clauses = re.split(", | and ", COVERED)
    assert max(clause.count("=") for clause in clauses) == 1, clauses


def test_a_ring_of_several_hosts_is_refused():
    with pytest.raises(UnpredictableError, match="cp=4 on hosts of 2 GPUs"):
        predict(dataclasses.replace(job("1b", 65536, "ddp"), per_host=2))


def test_a_time_needs_long_documents_and_measured_speeds():
    """Memory is predicted all the same; without a time no timeout is too short."""
    short = dataclasses.replace(job("1b", 65536, "ddp"), cu_seqlens=[*range(0, 65537, 1024)])
    wide = job("1b", 65536, "ddp")
    wide.config.model.head_dim = 256
    for made, why in ((short, "documents below 8192 tokens"), (wide, "head dim 256")):
        made.config.parallel.timeout_s = 1e-3
        prediction = predict(made)
        assert prediction.time is None
        assert why in prediction.no_time
        assert prediction.problems(HOST) == []


def test_products_are_not_predicted_below_the_measured_widths_and_no_faster_above():
    """720 TFLOP/s from a width of 4096 on."""
    narrow, wide = job("8b", 65536, "fsdp2"), job("8b", 65536, "fsdp2")
    narrow.config.model.dim, wide.config.model.dim = 767, 8192
    prediction = predict(narrow)
    assert prediction.time is None
    assert prediction.no_time == (
        "the time of matrix products with model.dim=767 cannot be predicted: hardware=h200 has "
        "widths 768, 2048, 4096"
    )
    flops = (time := predict(wide).time).flops
    expected = (flops.linear + flops.repeated_linear) / 4 / 720e12
    assert time.seconds["matrix products"] == pytest.approx(expected)


def test_a_slow_link_to_the_host_exposes_the_offload():
    """By hand: 31 layers of 16,512 bytes a token, out and back for two samples, less what hides
    it: a quarter and half of the work beside."""
    slow = job("8b", 524288, "fsdp2", offload="all")
    slow.config.hardware.host_link_gb_s, slow.config.train.gradient_accumulation_steps = 1.0, 2
    seconds = predict(slow).time.seconds
    busy = sum(seconds[name] for name in ("attention", "matrix products", "elementwise"))
    moved = 2 * 2 * 31 * 131072 * 16512 / 1e9
    assert seconds["exposed offload"] == pytest.approx(moved - 3 / 4 * busy)


def test_the_errors_of_a_prediction_are_relative_to_it():
    made = predict(job("8b", 524288, "fsdp2", offload="all"))
    rank = made.memory.host["offloaded activations"] // 4
    line = errors_of(made, 1.1 * made.time.total, round(0.95 * made.memory.device), rank)
    assert "device memory 65.5 GB, predicted 68.9 (-5.0%)" in line
    assert "step 121.8 s, predicted 110.7 (+10.0%)" in line
    assert line.endswith("offloaded activations of a rank 67.1 GB, predicted 67.1 (+0.0%)")


def test_the_mode_prints_a_table_and_writes_a_file(tmp_path):
    """For text that is not there yet. A timeout that a step exceeds is named, with what helps, and
    the exit code is 1."""
    command = [sys.executable, "train/pretrain.py", "mode=estimate", f"run.dir={tmp_path}"]
    command += ["experiment=8b_512k", "data=text", "parallel.timeout_s=100"]
    done = subprocess.run(
        [*command, "hardware.host_gb=550"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    for line in ("device, at the peak", "MFU 56%", "timeout_s=100 is less than the 108 s"):
        assert line in done.stdout
    assert "The smallest change that fits: parallel.timeout_s=240\n" in done.stdout
    written = json.loads((tmp_path / "estimate.json").read_text())
    assert written["device_memory"]["total"] == predict(job("8b", 524288, "fsdp2")).memory.device
    assert written["mfu"] == pytest.approx(0.560, abs=1e-3)
    assert written["smallest_change"] == ["parallel.timeout_s=240"]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    config = Config(mode="estimate")
    config.data.path, config.data.tokenizer = None, str(tmp_path / "words.txt")
    (tmp_path / "words.txt").write_text("words")
    with pytest.raises(ConfigError, match=r"words\.txt is not a tokenizer\.json"):
        estimate.run(config, 1)


@pytest.mark.parametrize(("name", "shape"), [("8b_512k", JOBS["8b"]), ("1b_1m", JOBS["1b"])])
def test_the_experiments_are_these_jobs_and_fit(name, shape, tmp_path, capsys):
    """Composed by Hydra: the prediction of four GPUs is that of the job above, in every part."""
    register_schema()
    overrides = [f"experiment={name}", "mode=estimate", f"run.dir={tmp_path}"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = resolve(compose("config", [*overrides, "hardware.host_gb=550"]))
    check(config, 4)
    assert estimate.run(config, 4)
    assert "It fits, also with memory.recompute_layers=" in capsys.readouterr().out
    written = json.loads((tmp_path / "estimate.json").read_text())
    same = job(name.partition("_")[0], *shape)
    same.config.train.compile = "auto"
    expected = predict(same)
    assert written["device_memory"]["parts"] == expected.memory.parts
    assert written["step_seconds"]["total"] == pytest.approx(expected.time.total)


def test_fewer_layers_recompute_where_they_fit():
    """8b at 256k on 4 GPUs: one layer less does not fit. Each further one takes time.

    A layer that keeps its activations is cheaper than its recomputation. Offload needs all.
    """
    made = job("8b", 262144, "fsdp2")
    (name,) = fewer_layers(made, HOST)
    layers = int(name.removeprefix("memory.recompute_layers="))
    assert 1 < layers < 32
    times = []
    for number in (layers - 1, layers, layers + 1, None):
        memory = dataclasses.replace(made.config.memory, recompute_layers=number)
        config = dataclasses.replace(made.config, memory=memory)
        times.append(predict(dataclasses.replace(made, config=config)))
    assert [bool(time.problems(HOST)) for time in times] == [True, False, False, False]
    assert times[1].time.total < times[2].time.total < times[3].time.total
    tight = Limits(times[1].memory.device, times[1].memory.on_host)  # no offload fits
    made.config.memory.recompute_layers = layers - 1
    assert smallest_change(made, tight) == [name]
    made.config.memory = MemoryConfig("attention-saving", 16384, offload="all")
    assert fewer_layers(made, HOST) == []


def test_the_machine_limits_a_job_that_runs_on_it_alone(tmp_path, capsys):
    """Without hardware.host_gb. The result of a job that does not fit is False: exit code 1."""
    made = job("8b", 65536, "fsdp2", offload="all")
    config, found = made.config, []
    config.data.path, config.run.dir, config.mode = None, str(tmp_path), "estimate"
    for gpus in (0, 4):
        with (
            mock.patch.object(torch.cuda, "device_count", return_value=gpus),
            mock.patch("train.estimate.prediction.host_memory", return_value=1e9),
        ):
            found.append(estimate.run(config, 4))
        written = json.loads((tmp_path / "estimate.json").read_text())
        found.append(written["host_memory"]["available"])
    assert found == [True, None, False, 1e9]
    assert "host, available (give hardware.host_gb)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "earlier", "n_bytes"),
    [(0, None, 300), (4, None, 780), (0, "none", 780), (0, "auto", 300)],
)
def test_the_mode_predicts_blocks_as_the_next_start_compiles_them(
    tmp_path, monkeypatch, gpus, earlier, n_bytes
):
    """train.compile=auto without Triton here, for a job elsewhere, here, and of a stopped run.

    ``n_bytes`` are those of an element in ``hardware``: compiled_bytes or elementwise_bytes.
    """
    monkeypatch.setattr(compile_choice, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = job("8b", 65536, "fsdp2").config
    config.data.path, config.run.dir = None, str(tmp_path)
    if earlier is not None:
        config.train.compile = earlier
        hold_run(config)
    config.mode, config.train.compile, config.hardware.host_gb = "estimate", "auto", 550.0
    assert estimate.run(config, 4)
    written = json.loads((tmp_path / "estimate.json").read_text())
    elements = 65536 // 4 * config.model.dim * config.model.n_layers
    expected = (1 + 1 / 3) * elements * n_bytes / (config.hardware.memory_gb_s * 1e9)
    assert written["step_seconds"]["elementwise"] == pytest.approx(expected)
