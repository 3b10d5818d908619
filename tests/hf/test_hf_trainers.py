"""If this fails, `Trainer` and `SFTTrainer` under a ring train another model than on one process.
Trainers under a ring, against the stock trainer on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate import ParallelismConfig

import ringfa3.hf
from ringfa3.hf.batch import READING
from ringfa3.hf.trainer import ContextParallel, _refuse
from tests.support.hf_models import model_of
from tests.support.hf_trainers import Case, Outcome, run
from tests.support.markdown import ROOT

BOUND = 5e-6  # of a gradient, relative to its largest element; of a figure in the logs
FLOOR = 1e-6  # of the largest gradient: smaller ones are rounding
# The balance of experts in the loss: of all tokens of a batch, as large as the rest.
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
CASES = {
    "llama": Case("llama"),
    "qwen3 padded": Case("qwen3", collator="right"),
    "gemma3 padded": Case("gemma3", collator="left"),
    "gpt-oss": Case("gpt-oss", "ringfa3"),  # its own attention joins packed documents
    "qwen3-moe": Case("qwen3-moe", config=BALANCED),
    "loop": Case("gemma3", collator="loop"),
    "SFT": Case("llama", collator="packing", options={"max_grad_norm": 0.1}),
    "SFT LoRA": Case(
        "llama", collator="packing", lora=True, options={"max_grad_norm": 0.1}, worlds=(1, 2)
    ),
    "SFT padding-free": Case("gpt-oss", "ringfa3", "padding_free", {"router_aux_loss_coef": 1.0}),
}
REFUSED = {
    "world_size=1": Case("llama", options={"use_cpu": False}),
    "label_smoothing_factor=0.1": Case("llama", options={"label_smoothing_factor": 0.1}),
    "torch_compile=True": Case("llama", options={"torch_compile": True}),
    "auto_find_batch_size=True": Case("llama", options={"auto_find_batch_size": True}),
    "loss_type='dft'": Case("llama", collator="packing", options={"loss_type": "dft"}),
    "input_ids differs between the ranks": Case("llama", collator="unequal"),
    "dispatch_batches=None": Case("llama", stream=True),
    "context_parallel(DPOTrainer): DPOTrainer.compute_loss": Case("llama", refused="DPOTrainer"),
    "context_parallel(RewardTrainer): RewardTrainer.compute_loss": Case(
        "llama", refused="RewardTrainer"
    ),
}
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
RESUMED = {
    "SFT resume": Case("llama", collator="packing", resume=True, options=SAVING, worlds=(2,)),
}
MORE = {
    "two groups": Case("qwen3", dp=2, worlds=(2, 4)),
    "two groups, experts": Case("qwen3-moe", config=BALANCED, dp=2, worlds=(2, 4)),
    "experts, no average": Case(
        "qwen3-moe",
        config=BALANCED,
        options={"average_tokens_across_devices": False},
        dp=2,
        worlds=(2, 4),
    ),
    "two groups, SFT": Case("gemma3", collator="packing", dp=2, worlds=(2, 4)),
    "two groups, FSDP2": Case("qwen3", dp=2, worlds=(2, 4), fsdp=True),
    "two groups, FSDP2, SFT": Case("llama", "eager", "packing", dp=2, worlds=(2, 4), fsdp=True),
    "two groups, LoRA": Case("llama", lora=True, dp=2, worlds=(2, 4)),
    "checkpointing": Case("llama", options={"gradient_checkpointing": True}, worlds=(1, 2, 4)),
    "LoRA": Case("qwen3", lora=True, worlds=(1, 2)),
    "stream": Case(
        "llama",
        stream=True,
        options={"accelerator_config": {"dispatch_batches": False}},
        worlds=(1, 2),
    ),
    "resume": Case("gemma3", collator="left", resume=True, options=SAVING, worlds=(2,)),
}
# By itself version 4 reads no optimiser state in several CPU processes, and the SFTTrainer of
# TRL 1.16 fails with it.
if transformers.__version__ < "5":
    RESUMED = {}
    CASES, REFUSED, MORE = (
        {name: case for name, case in cases.items() if not (case.trl or case.resume)}
        for cases in (CASES, REFUSED, MORE)
    )


def outcome(folder: Path, name: str, world: int) -> Outcome:
    found: Outcome = torch.load(folder / f"{name}-{world}.pt", weights_only=False)
    return found


def assert_alike(folder: Path, name: str, world: int, dp: int = 1) -> None:
    """Gradients of all steps, and all figures of training and evaluation except times."""
    ring, stock = outcome(folder, name, world), outcome(folder, name, dp)
    assert "error" not in ring, ring["error"]
    steps = 3 if name == "loop" else 2
    assert len(ring["grads"]) == len(stock["grads"]) == steps
    for ours, theirs in zip(ring["grads"], stock["grads"], strict=True):
        floor = FLOOR * max(float(g.abs().max()) for g in theirs.values())
        for parameter, right in theirs.items():
            difference = float((ours[parameter] - right).abs().max())
            assert difference <= BOUND * max(float(right.abs().max()), floor), (name, parameter)
    lines = 0 if name == "loop" else 5  # two steps, two evaluations, the end
    assert len(ring["logs"]) == len(stock["logs"]) == lines
    for found, expected in zip(ring["logs"], stock["logs"], strict=True):
        timeless = [k for k in expected if not k.endswith(("runtime", "_second"))]
        assert {k: found[k] for k in timeless} == pytest.approx(
            {k: expected[k] for k in timeless}, rel=BOUND
        ), name


def assert_resumes(folder: Path, name: str) -> None:
    """Bit for bit as the run without a stop: gradients of each later step, and last weights."""
    found = outcome(folder, name, 2)
    assert "error" not in found, found["error"]
    assert len(found["resumed"]) == 2
    for ours, theirs in zip(found["resumed"], found["grads"][2:], strict=True):
        assert all(torch.equal(ours[parameter], theirs[parameter]) for parameter in theirs), name
    whole, resumed = found["weights"]
    assert all(torch.equal(resumed[parameter], whole[parameter]) for parameter in whole), name


def test_steps_and_logs_are_those_of_one_process(tmp_path: Path) -> None:
    """Losses, norms, token accuracy, entropy and counters too; the last batch is ragged.

    Refused settings, and batches that differ in a group, raise on every rank: none waits.
    """
    refused = {name: replace(case, worlds=(2,)) for name, case in REFUSED.items()}
    run(CASES | refused | RESUMED, tmp_path, 400)
    for name in RESUMED:
        assert_resumes(tmp_path, name)
    for name, case in CASES.items():
        for world in case.worlds[1:]:
            assert_alike(tmp_path, name, world)
    for setting, case in REFUSED.items():
        problem = outcome(tmp_path, setting, 2)["error"]
        assert problem.startswith("TypeError: " if case.refused else "ValueError: ")
        assert setting in problem


@pytest.mark.soak
def test_groups_are_data_parallel(tmp_path: Path) -> None:
    """And further settings: LoRA, streams, a padded run that goes on, recomputed layers."""
    run(MORE, tmp_path, 500)
    for name, case in MORE.items():
        if case.resume:
            assert_resumes(tmp_path, name)
        for world in case.worlds[1:]:
            assert_alike(tmp_path, name, world, case.dp)
            assert outcome(tmp_path, name, world)["sharded"] == case.fsdp


def test_trainers_with_a_loss_of_their_own_are_refused() -> None:
    class Pairs(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: object, **keywords: object) -> None: ...

    with pytest.raises(TypeError, match=r"Pairs\.compute_loss is not known to be a sum over tok"):
        ringfa3.hf.context_parallel(Pairs)
    with pytest.raises(TypeError, match="no compute_loss"):
        ringfa3.hf.context_parallel(dict)

    class Logged(transformers.Trainer):  # type: ignore[misc]
        def log(self, *arguments: object, **keywords: object) -> None: ...

    made = ringfa3.hf.context_parallel(Logged)
    assert issubclass(made, Logged)
    assert made.__name__ == "ContextParallelLogged"


def _trainer(**changes: Any) -> SimpleNamespace:
    """What `_refuse` reads of a trainer that is right, with changes: `args_x` changes `args.x`."""
    args = SimpleNamespace(
        world_size=2, label_smoothing_factor=0.0, torch_compile=False, use_liger_kernel=False,
        liger_kernel_config=None, auto_find_batch_size=False, deepspeed=None, n_gpu=1,
        loss_type="nll",
        accelerator_config=SimpleNamespace(dispatch_batches=None),
    )  # fmt: skip
    model = model_of("llama", "ringfa3")
    trainer = SimpleNamespace(
        args=args, model=model, accelerator=SimpleNamespace(parallelism_config=ContextParallel(2)),
        model_accepts_loss_kwargs=True, train_dataset=[], eval_dataset=None,
        compute_loss_func=None, compute_metrics=None, get_cp_size=lambda: 2,
    )  # fmt: skip
    for name, value in changes.items():
        owner = args if name.startswith("args_") else trainer
        setattr(owner, name.removeprefix("args_"), value)
    return trainer


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([])


LIGER = {
    "args_use_liger_kernel": True,
    "args_liger_kernel_config": {"fused_linear_cross_entropy": False},
}
LIGER_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": True}
DISPATCH = SimpleNamespace(dispatch_batches=False)
PROMPT = SimpleNamespace(
    config=model_of("llama", "ringfa3").config,
    active_peft_config=SimpleNamespace(is_prompt_learning=True, peft_type="PREFIX_TUNING"),
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"eval_dataset": {"a": [], "b": []}}, None),
        ({"train_dataset": _Stream(), "args_accelerator_config": DISPATCH}, None),
        ({"train_dataset": _Stream()}, "dispatch_batches=None under a ring: .* pass accelerator_"),
        ({"eval_dataset": _Stream()}, "dispatch_batches=None"),
        ({"eval_dataset": {"a": [], "b": _Stream()}}, "dispatch_batches=None"),
        ({"model": model_of("llama", "sdpa")}, "attn_implementation='sdpa' under a ring: load the"),
        ({"model": PROMPT}, "peft_type=PREFIX_TUNING"),
        ({"model_accepts_loss_kwargs": False}, "LlamaForCausalLM under a ring: its forward takes"),
        (
            {"accelerator": SimpleNamespace(parallelism_config=ParallelismConfig())},
            r"pass ringfa3\.hf\.ContextParallel\(n\)",
        ),
        ({"args_world_size": 1}, "world_size=1 under a ring: the trainer is not distributed"),
        ({"args_loss_type": "dft"}, "loss_type='dft'"),
        ({"args_label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"compute_loss_func": print}, "compute_loss_func under a ring: .* logits alone"),
        ({"compute_metrics": print}, "compute_metrics under a ring: .* logits alone"),
        ({"args_torch_compile": True}, "torch_compile=True"),
        ({"args_use_liger_kernel": True}, "use_liger_kernel=True under a ring: Liger's losses"),
        ({**LIGER, "args_liger_kernel_config": {}}, "use_liger_kernel=True under a ring"),
        (
            {
                **LIGER,
                "args_liger_kernel_config": {
                    "fused_linear_cross_entropy": False,
                    "cross_entropy": True,
                },
            },
            "use_liger_kernel=True",
        ),
        (LIGER, None),
        ({"args_auto_find_batch_size": True}, "auto_find_batch_size=True"),
        (
            {"args_deepspeed": "zero3.json"},
            "deepspeed=zero3.json under a ring: .* use DDP or FSDP2",
        ),
        (
            {"args_include_num_input_tokens_seen": "all"},  # no method counts, as in transformers 4
            "include_num_input_tokens_seen='all' under a ring: transformers 4 counts",
        ),
        ({"args_n_gpu": 2}, "n_gpu=2 under a ring: start one process for each GPU"),
    ],
)
def test_settings_that_are_not_right_are_named(
    changes: dict[str, Any], problem: str | None
) -> None:
    if problem is None:
        _refuse(_trainer(**changes))
        return
    with pytest.raises(ValueError, match=problem):
        _refuse(_trainer(**changes))


class _Passed(transformers.Trainer):  # type: ignore[misc]
    """It could change a batch after the collator has made it."""

    def training_step(self, *arguments: Any, **keywords: Any) -> Any: ...


@pytest.mark.parametrize(("cls", "ahead"), [(transformers.Trainer, True), (_Passed, False)])
def test_a_loader_reads_batches_that_no_subclass_changes(cls: type, ahead: bool) -> None:
    made = ringfa3.hf.context_parallel(cls)
    trainer = object.__new__(type("Mine", (made,), {}))
    collator = trainer.data_collator = transformers.DataCollatorWithFlattening()
    for cp in (1, 2):
        trainer.get_cp_size = lambda cp=cp: cp
        with trainer._reading_ahead():
            batch = trainer.data_collator([{"input_ids": [1, 2]}, {"input_ids": [3]}])
        assert trainer.data_collator is collator
        assert (READING in batch) == (ahead and cp > 1)
    assert not ahead or batch[READING].cumulative == [0, 2, 3]


@pytest.mark.skipif(transformers.__version__ < "5", reason="version 4 builds them elsewhere")
def test_buckets_of_ddp_are_the_gradients_of_a_group(tmp_path: Path) -> None:
    trainer = object.__new__(ringfa3.hf.context_parallel(transformers.Trainer))
    trainer.model = None
    for config in (None, ContextParallel(2)):
        trainer.args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
        trainer.args.parallelism_config = config
        (handler,) = trainer._build_accelerator_args()["kwargs_handlers"]
        assert handler.gradient_as_bucket_view == (config is not None)


def test_plans_of_a_trainer_have_the_budget() -> None:
    """Without it a trainer holds as many rows as without a budget."""
    trainer = object.__new__(ringfa3.hf.context_parallel(transformers.Trainer))
    trainer._cp_group = None  # a group of this process
    trainer.args = SimpleNamespace(average_tokens_across_devices=True)
    inputs = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    for budget in (7, None):
        config = ContextParallel(2, kv_budget=budget)
        trainer.accelerator = SimpleNamespace(
            parallelism_config=config, num_processes=2, gather=None
        )
        with mock.patch.object(transformers.Trainer, "compute_loss") as compute:
            trainer.compute_loss(None, inputs)
        assert compute.call_args.args[1]["ringfa3_plan"].kv_budget == budget
    with pytest.raises(ValueError, match="kv_budget=0: give 1 row or more"):
        ContextParallel(2, kv_budget=0)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_the_size_of_a_group_is_a_positive_int(size: object) -> None:
    with pytest.raises(ValueError, match=r"ContextParallel\(.*\): the ranks of a group are 1 or m"):
        ContextParallel(size)  # type: ignore[arg-type]


def test_a_size_that_does_not_divide_the_processes_is_named() -> None:
    config = ContextParallel(3)
    with pytest.raises(ValueError, match="the number of processes, 1, must be a multiple of 3"):
        config.build_device_mesh("cpu")


@pytest.mark.soak
def test_the_example_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(str(ROOT / "examples" / "hf_trainer.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "'train_loss'" in done.stdout
