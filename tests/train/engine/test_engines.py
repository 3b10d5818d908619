"""If this fails, a model trains differently under another engine. Engines against each other: the
same steps, the same evaluation, the same checkpoints.

The reference is ``ddp``: in float32 the loss and the gradient norm of every step must agree within
1e-5. AdamW hides a wrong scale of the gradients from the loss; the clipped norm shows it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.ranks import sacrifice
from tests.train.host_reads import HostReads
from tests.train.jobs import steps
from train.config import CheckpointConfig, Config, EngineConfig, MemoryConfig
from train.data.batches import Batch, make_batch
from train.data.mixture import training_samples
from train.data.samples import IGNORED
from train.data.shards import open_corpus
from train.data.tokenizer import vocabulary_size
from train.engine import deepspeed
from train.engine.make_engine import make_engine
from train.engine.parallel import ParallelLayout
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.sections.model import RopeConfig
from train.tasks.trainer import Trainer

LIMIT_S = 60.0  # for one run, on a busy machine
TIMEOUT_S = 77.0  # of the groups that an engine makes
STEPS = 12
SPOILED = 4  # this step is skipped
DDP = EngineConfig()
FSDP2 = EngineConfig("fsdp2", shard="all", reduce="micro")
ZERO = {f"zero-{n}": EngineConfig("deepspeed", stage=n, offload="none") for n in (1, 2, 3)}
OFFLOADED = {
    f"zero-{n} {what}": EngineConfig("deepspeed", stage=n, offload=what)
    for n, what in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all"))
}
ENGINES = {"ddp": DDP, "fsdp2": FSDP2}
needs_deepspeed = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
soak = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture
def config(config: Config) -> Config:
    """Two samples a rank and step, of slices with one label less than tokens; clipping is active.

    The layers start different from zero, so that each of them has a gradient from the first step.
    """
    config.model.dim, config.model.ffn_dim, config.model.n_layers = 32, 64, 2
    config.model.zero_init = False
    config.data.seq_len, config.data.max_doc_len = 203, 60
    config.optim.warmup_steps, config.optim.clip = 2, 0.05
    config.optim.embedding_lr_scale = 3
    config.train.steps, config.train.global_batch_size, config.train.precision = STEPS, 4, "float32"
    config.train.eval_every, config.checkpoint.every = 0, 0
    config.parallel.timeout_s = TIMEOUT_S
    open_corpus(config.data)  # tokenised once, not by every rank
    return config


def layout(cp: int) -> ParallelLayout:
    """The layout with all ranks of the default group; call it on all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(n, n + cp))) for n in range(0, world, cp)]
    host, save = (dist.new_group(backend="gloo") for _ in range(2))
    return ParallelLayout(rank, world, cp, torch.device("cpu"), groups[rank // cp], host, save)


def _releasing(settings: Any) -> Any:
    """Settings of ZeRO-3 with which small weights are released after each use, as large ones."""

    def with_thresholds(*args: Any) -> dict[str, Any]:
        made = settings(*args)
        made["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
        return made

    return with_thresholds


def train(config: Config, parallel: ParallelLayout, spoiled: int = -1) -> Trainer:
    """A finished run on this rank. The losses of step ``spoiled`` are not finite on rank 0.

    ``reads`` of the trainer are those of the last step.
    """
    report = FailureReport(parallel.rank, sys.stderr)
    with mock.patch.object(deepspeed, "_settings", _releasing(deepspeed._settings)):
        trainer = Trainer(config, open_corpus(config.data), parallel, RunFolder(config), report)
    whole = trainer.model.forward

    def forward(batch: Batch) -> torch.Tensor:
        wrong = trainer.state.step + 1 == spoiled and parallel.rank == 0
        return whole(batch) * (math.nan if wrong else 1.0)

    if spoiled > 0:
        trainer.model.forward = forward
    take = trainer.step

    def step(*arguments: Any) -> dict[str, Any]:
        if trainer.state.step < config.train.steps - 1:
            return take(*arguments)
        with HostReads() as trainer.reads:
            return take(*arguments)

    trainer.step = step
    trainer.train()
    trainer.close()
    return trainer


def timeout_s(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective of a gloo group fails."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _run_all(_: dist.ProcessGroup, configs: list[Config]) -> list[dict[str, Any]]:
    """The results of several runs on this rank, one after the other."""
    seen = []
    for config in configs:
        parallel = layout(config.parallel.cp)
        trainer = train(config, parallel, SPOILED)
        batches = trainer._batches(0)
        weights = [p.detach() for p in trainer.engine.parameters.values()]
        seen.append(
            {
                "steps": steps(Path(config.run.dir)),
                "tokens": [tuple(batch.tokens.tolist()) for batch in batches],
                "labels": [int((batch.labels != IGNORED).sum()) for batch in batches],
                "evaluation": trainer._evaluate(1500),
                "weights": sum(w.double().sum() for w in weights if not isinstance(w, DTensor)),
                "timeouts": [timeout_s(group) for group in trainer.engine.groups],
                "reads": trainer.reads.count,
                "held": sum(shard.n_bytes for shard in trainer.state.shards().values()),
            }
        )
    return seen


def variant(config: Config, name: str, engine: EngineConfig, **parts: Any) -> Config:
    """``config`` with another engine, in a run folder of its own."""
    run = dataclasses.replace(config.run, dir=f"{config.run.dir}-{name}")
    return dataclasses.replace(config, run=run, engine=engine, **parts)


def check_same_steps(expected: list[tuple], steps_of: list[tuple]) -> None:
    """The same steps are skipped; loss and norm of the others agree within 1e-5."""
    found, wanted = ([s for s in run if s[1] is not None] for run in (steps_of, expected))
    assert [step for step, _, _ in found] == [step for step, _, _ in wanted]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=0)


def check_alike(
    config: Config, world: int, engines: dict[str, EngineConfig], cps: list[int]
) -> None:
    """Runs under all ``engines`` take the steps of ddp and evaluate to its totals.

    In a step under ddp and fsdp2 the host reads once from its device.
    """
    parts = {cp: dataclasses.replace(config.parallel, cp=cp) for cp in cps}
    configs = [
        variant(config, f"{name}-{cp}", engine, parallel=parts[cp])
        for cp in cps
        for name, engine in engines.items()
    ]
    by_rank = sacrifice(world, 60, _run_all, configs, limit=LIMIT_S * len(configs))
    assert {t for rank in by_rank for run in rank for t in run["timeouts"]} <= {TIMEOUT_S}
    for runs in zip(*by_rank, strict=True):  # the weights that a rank holds whole, to the last bit
        assert len({float(run["weights"]) for run in runs}) == 1
    for runs in by_rank:
        pairs = zip(configs, runs, strict=True)  # DeepSpeed itself reads more
        assert {run["reads"] for c, run in pairs if c.engine.name != "deepspeed"} == {1}
    micro_batches = [tokens for rank in by_rank for tokens in rank[0]["tokens"]]
    assert len(set(micro_batches)) == len(micro_batches)  # no two ranks read the same
    assert len({tuple(rank[0]["labels"]) for rank in by_rank}) == world  # uneven
    for first in range(0, len(configs), len(engines)):
        ddp, *others = by_rank[0][first : first + len(engines)]
        assert [loss is None for _, loss, _ in ddp["steps"]].index(True) == SPOILED - 1
        assert min(norm for _, _, norm in ddp["steps"] if norm is not None) > config.optim.clip
        for other in others:
            check_same_steps(ddp["steps"], other["steps"])
            assert other["evaluation"].bucket_tokens == ddp["evaluation"].bucket_tokens
            assert other["evaluation"].nats_per_byte == pytest.approx(
                ddp["evaluation"].nats_per_byte, rel=1e-5
            )


SAME_STEPS = [
    pytest.param(ENGINES, id="fsdp2"),
    pytest.param({"ddp": DDP, "zero-3": ZERO["zero-3"]}, marks=needs_deepspeed, id="zero-3"),
    pytest.param({"ddp": DDP, **ZERO, **OFFLOADED}, marks=[*needs_deepspeed, *soak], id="zero"),
]


@pytest.mark.parametrize("engines", SAME_STEPS)
def test_engines_take_the_same_steps(config, engines):
    """Two ranks, cp 1 and 2, two micro-batches: 1e-5. An odd number of samples is evaluated.

    One step is not finite on one rank: all skip it, and no gradient of it is left anywhere.
    """
    check_alike(config, 2, engines, [1, 2])


@pytest.mark.parametrize("engines", SAME_STEPS)
def test_a_tied_embedding_is_trained_by_both_of_its_uses(config, engines):
    config.model.tied_embeddings, config.train.steps = True, 6
    check_alike(config, 2, engines, [2])


def test_a_rank_may_hold_no_row_of_a_parameter(config):
    """Four ranks, and gains of two rows."""
    config.model.head_dim, config.model.qk_norm, config.train.steps = 2, True, 5
    config.train.seed = 2  # of four ranks with as many counts of labels
    check_alike(config, 4, ENGINES, [2])


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param(ENGINES, id="fsdp2"),
        pytest.param({"ddp": DDP, **ZERO}, marks=needs_deepspeed, id="zero"),
    ],
)
def test_engines_take_the_same_steps_with_less_memory(config, engines):
    """Recomputation, the MLP in chunks, offload: steps are those of ddp with the same."""
    config.memory = MemoryConfig("attention-saving", mlp_chunk=64, loss_chunk=50, offload="all")
    config.train.steps = 5
    check_alike(config, 2, engines, [2])


def _norms(_: dist.ProcessGroup, configs: list[Config]) -> list[list[float]]:
    """For each engine its norm of the gradients of a step, and that of the gradients in float64."""
    norms = []
    for config in configs:
        parallel, corpus = layout(1), open_corpus(config.data)
        engine = make_engine(config, vocabulary_size(corpus.tokenizer), parallel)
        sample = training_samples(corpus.train, config.data, 0)[parallel.rank]
        batch = make_batch(sample, parallel.cp_group, config.parallel.layout)
        engine.backward(batch, torch.ones(()), last=True)
        norm = float(engine.grad_norm(math.inf))
        exact = sum(share.double().square().sum() for _, share in engine.gradients())
        dist.all_reduce(exact)
        norms.append([norm, float(exact.sqrt())])
    return norms


@pytest.mark.deepspeed
def test_the_norm_of_large_gradients_is_exact_under_zero(config):
    """Within 1e-6, for matrices of 524,288 elements; ``test_grad_norm`` has the other engines."""
    config.model.dim, config.model.ffn_dim, config.model.n_layers = 512, 1024, 1
    configs = [variant(config, name, engine) for name, engine in (ZERO | OFFLOADED).items()]
    for norms in sacrifice(2, 60, _norms, configs, limit=LIMIT_S * len(configs)):
        for norm, exact in norms:
            assert norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.deepspeed
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_engines_take_the_same_steps_on_four_ranks(config, cp):
    """Seed 8 gives the four ranks as many different counts of labels."""
    config.train.global_batch_size, config.train.seed = 8, 8
    check_alike(config, 4, {**ENGINES, **ZERO}, [cp])


def _run_on_two_hosts(group: dist.ProcessGroup, configs: list[Config]) -> list[dict[str, Any]]:
    os.environ["LOCAL_WORLD_SIZE"] = str(group.size() // 2)
    return _run_all(group, configs)


@pytest.mark.parametrize(("cp", "tokens"), [(2, None), pytest.param(4, 203, marks=soak)])
def test_hosts_hold_replicas_of_each_other(config, cp, tokens):
    """HSDP, 2 x 2 ranks: the steps of ddp within 1e-5; a rank holds half of all, not a quarter.

    Also with one CP group, whose ranks share all samples of a step in one micro-batch.

    A checkpoint that only one of the hosts writes is whole: ddp continues from it.
    """
    config.train.steps, config.optim.schedule_steps = 5, 7
    config.data.tokens_per_rank = tokens
    host = EngineConfig("fsdp2", shard="hsdp")
    parts = {"parallel": dataclasses.replace(config.parallel, cp=cp)}
    engines = {"ddp": DDP, "all": FSDP2, "host": host}
    configs = [variant(config, name, engine, **parts) for name, engine in engines.items()]
    longer = dataclasses.replace(config.train, steps=7)
    configs += [dataclasses.replace(c, engine=DDP, train=longer) for c in (configs[0], configs[2])]
    by_rank = sacrifice(4, 60, _run_on_two_hosts, configs, limit=LIMIT_S * len(configs))
    ddp, all_, host_, undisturbed, continued = by_rank[0]
    for other in (all_, host_):
        check_same_steps(ddp["steps"], other["steps"])
    check_same_steps(undisturbed["steps"], continued["steps"])
    assert host_["timeouts"] == [TIMEOUT_S] * 2
    assert host_["held"] == pytest.approx(ddp["held"] / 2, rel=0.05)
    assert all_["held"] == pytest.approx(ddp["held"] / 4, rel=0.1)


def _resume_all(_: dist.ProcessGroup, configs: list[Config]) -> list[list[tuple]]:
    for config in configs:
        train(config, layout(config.parallel.cp))
    return [steps(Path(config.run.dir)) for config in configs]


def check_resumes(config: Config, world: int, engines: dict[str, EngineConfig]) -> None:
    """Runs saved under each engine on two ranks continue under each on ``world``, as ddp does."""
    config.train.steps, config.optim.schedule_steps = 5, 5 + STEPS
    saved = {name: variant(config, name, engine) for name, engine in engines.items()}
    sacrifice(2, 60, _resume_all, list(saved.values()), limit=LIMIT_S * len(saved))
    longer = dataclasses.replace(config.train, steps=5 + STEPS)
    configs = []
    for before, old in saved.items():
        for after, engine in engines.items():
            new = variant(config, f"{before}-{after}-{world}", engine, train=longer)
            shutil.copytree(old.run.dir, new.run.dir)
            configs.append(new)
    ddp, *others = sacrifice(world, 60, _resume_all, configs, limit=LIMIT_S * len(configs))[0]
    assert len(ddp) == 5 + STEPS
    for other in others:
        check_same_steps(ddp[5:], other[5:])


def test_a_second_stage_takes_the_same_steps_under_each_engine(config):
    """Weights and moments of ddp on 2 ranks; then another length and RoPE, under ddp and fsdp2.

    Without the moments the first gradient is the same, and the steps after it are not.
    """
    config.train.steps = 3
    first = variant(config, "first", DDP)
    parts = {
        "data": dataclasses.replace(config.data, seq_len=160, max_doc_len=80),
        "model": dataclasses.replace(config.model, rope=RopeConfig(theta=50000.0)),
        "checkpoint": CheckpointConfig(every=0, resume=first.run.dir, reset_data=True),
    }
    parts["data"].tokenizer = f"{first.run.dir}/tokenizer.json"
    configs = [first, *(variant(config, name, engine, **parts) for name, engine in ENGINES.items())]
    parts["checkpoint"] = CheckpointConfig(every=0, init_from=first.run.dir)
    configs.append(variant(config, "weights", DDP, **parts))
    by_rank = sacrifice(2, 60, _resume_all, configs, limit=LIMIT_S * len(configs))
    _, ddp, fsdp2, weights_alone = by_rank[0]
    check_same_steps(ddp, fsdp2)
    check_same_steps(ddp[:1], weights_alone[:1])
    assert ddp[-1][1] != pytest.approx(weights_alone[-1][1], rel=1e-5)


RESUMES = [
    pytest.param(ENGINES, 1, id="1"),
    pytest.param(ENGINES, 2, marks=soak, id="2"),
    pytest.param(ENGINES, 4, marks=soak, id="4"),
    pytest.param(
        {"ddp": DDP, "zero-1": ZERO["zero-1"], "zero-3": ZERO["zero-3"]},
        1,
        marks=needs_deepspeed,
        id="zero 1",
    ),
    *(
        pytest.param(ENGINES | ZERO, n, marks=[*needs_deepspeed, *soak], id=f"all {n}")
        for n in (1, 2, 4)
    ),
    pytest.param({"ddp": DDP, **OFFLOADED}, 2, marks=[*needs_deepspeed, *soak], id="offloaded 2"),
]


@pytest.mark.parametrize(("engines", "world"), RESUMES)
def test_any_engine_continues_what_any_other_has_saved(config, engines, world):
    """Saved on 2 ranks, continued on ``world``: 12 steps within 1e-5, with the same batches.

    The reference is ddp that continues a run of ddp.
    """
    check_resumes(config, world, engines)
