"""If this fails, models of transformers under a ring compute other results than alone. Models of
transformers under the ring, against each document alone with eager attention."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.hf_cp import (
    CUMULATIVE,
    TINY,
    checkpoint,
    example_ids,
    loss_of,
    main,
    results_of,
    shifted_labels,
    tiny_model,
)
from ringfa3 import keep_attention, plan_context
from tests.support.double import in_double, recomputed_in_double
from tests.support.hf_models import difference
from tests.support.markdown import ROOT
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12  # relative to the largest number of a tensor


def one_process(name: str) -> dict[str, torch.Tensor]:
    """The loss, and the gradients by parameter, of documents that the model sees one by one."""
    model = tiny_model(name, "eager").train()
    ids = example_ids(97)
    losses = []
    for begin, end in itertools.pairwise(CUMULATIVE):
        logits = model(ids[None, begin:end], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], ids[begin + 1 : end], reduction="sum"))
    loss = sum(losses) / (CUMULATIVE[-1] - len(losses))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_alike(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float = BOUND
) -> None:
    assert ours.keys() == theirs.keys()
    errors = {name: difference(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])


def _shared(group: dist.ProcessGroup, name: str, checkpointing: bool) -> dict[str, torch.Tensor]:
    model = tiny_model(name).train()
    if checkpointing:
        with mock.patch("examples.hf_cp.keep_attention", recomputed_in_double(keep_attention)):
            checkpoint(model)
    return results_of(model, example_ids(97), plan_context(CUMULATIVE, group))


@pytest.mark.parametrize(("name", "checkpointing"), [("llama", False), ("gpt-oss", True)])
def test_three_ranks(ranks: Ranks, name: str, checkpointing: bool) -> None:
    """The functions of examples/hf_cp.py: the loss and every summed gradient on each rank."""
    expected = one_process(name)
    for results in ranks.run(3, in_double, _shared, name, checkpointing):
        assert_alike(results, expected)


def test_the_example_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, one process holds all tokens."""
    saved = tmp_path / "results.pt"
    monkeypatch.setattr("sys.argv", ["hf_cp.py", "--tiny", "qwen3", "--save", str(saved)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    main()
    assert_alike(torch.load(saved), one_process("qwen3"))


@pytest.mark.soak
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_the_example_under_torchrun(name: str, checkpointing: bool, tmp_path: Path) -> None:
    """Three processes in float32: the loss and every summed gradient, 5e-6."""
    saved = tmp_path / "results.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3",
               str(ROOT / "examples" / "hf_cp.py"), "--tiny", name, "--save", str(saved),
               *(["--checkpointing"] if checkpointing else [])]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False,
                          timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_alike(torch.load(saved), one_process(name), 5e-6)


def _loss_of_the_model(group: dist.ProcessGroup) -> tuple[int, dict[str, torch.Tensor]]:
    """How many labels this rank has, and its loss and gradients as transformers computes them."""
    plan, ids = plan_context(CUMULATIVE, group), example_ids(97)
    model = tiny_model("llama").train()
    shifted = shifted_labels(ids, plan.lengths.tolist())
    labels = plan.shard(shifted)[None]
    loss = model(
        plan.shard(ids)[None],
        position_ids=plan.positions[None],
        use_cache=False,
        labels=labels,
        shift_labels=labels,
        num_items_in_batch=(shifted != -100).sum(),
        ringfa3_plan=plan,
    ).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return int((labels != -100).sum()), {"loss": loss.detach(), **grads}


def test_the_sum_of_the_models_losses(ranks: Ranks) -> None:
    """Two ranks with unequal numbers of labels: the sums are those of one process."""
    (few, first), (many, second) = ranks.run(2, in_double, _loss_of_the_model)
    assert few != many
    assert_alike({name: first[name] + second[name] for name in first}, one_process("llama"))


def _averaged(group: dist.ProcessGroup, how: str) -> dict[str, torch.Tensor]:
    """The gradients that DDP or FSDP averages over two ranks, of a loss times two."""
    plan = plan_context(CUMULATIVE, group)
    model = tiny_model("llama").train()
    wrapped = DistributedDataParallel(model, process_group=group) if how == "ddp" else model
    if how == "fsdp":
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    loss = loss_of(wrapped, example_ids(97), plan)
    (loss * plan.world).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if how == "fsdp" else g for n, g in grads.items()}
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return {"loss": total, **whole}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_loss_times_the_ranks_under_an_average(ranks: Ranks, how: str) -> None:
    """As the docs say: gradients of DDP and of FSDP2 are those of one process."""
    expected = one_process("llama")
    for results in ranks.run(2, in_double, _averaged, how):
        assert_alike(results, expected)
