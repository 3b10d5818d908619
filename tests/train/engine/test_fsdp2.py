"""If this fails, FSDP2 trains with wrong gradients. ``engine=fsdp2`` in bfloat16, and the gradients
of several micro-batches.

The reference of every gradient is ddp in float32, with the same weights and the same documents.
"""

from __future__ import annotations

import dataclasses
import gc
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import sacrifice
from tests.train.model.test_transformer import packed_sample
from train.config import Config, EngineConfig, MemoryConfig, ModelConfig
from train.data.batches import Batch, make_batch
from train.engine.ddp import DDPEngine
from train.engine.engine import Engine
from train.engine.fsdp2 import FSDP2Engine
from train.engine.parallel import ParallelLayout

ROWS = 300
MODELS = ({}, {"tied_embeddings": True, "qkv_bias": True})
LENGTHS = ([37, 91], [5, 60, 63], [128])  # of three micro-batches; a rank cuts each elsewhere
MODEL = ModelConfig(n_layers=2, n_heads=4, n_kv_heads=2, dim=64, ffn_dim=160, zero_init=False)


def make(kind: type[Engine], precision: str, reduce: str = "micro", **model: Any) -> Engine:
    """An engine on this rank of the default group."""
    config = Config(model=dataclasses.replace(MODEL, **model))
    config.memory = MemoryConfig("attention-saving", mlp_chunk=50, loss_chunk=50)
    config.engine = EngineConfig("fsdp2", shard="all", reduce=reduce)
    config.data.seq_len, config.train.precision = 128, precision
    return kind(config, ROWS, data_parallel())


@cache
def data_parallel() -> ParallelLayout:
    """The layout of ranks that share no sample."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([n]) for n in range(world)]
    return ParallelLayout(rank, world, 1, torch.device("cpu"), alone[rank])


def batch(lengths: list[int], rank: int) -> Batch:
    rotated = lengths[rank:] + lengths[:rank]
    return make_batch(packed_sample(rotated, ROWS), data_parallel().cp_group, "zigzag")


def backward(engine: Engine) -> None:
    """All micro-batches of a step."""
    one = torch.ones(())
    for number, lengths in enumerate(LENGTHS, start=1):
        engine.backward(batch(lengths, dist.get_rank()), one, last=number == len(LENGTHS))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(engine: Engine) -> dict[str, Tensor]:
    """Whole gradients of a step, float32."""
    backward(engine)
    return {name: whole(parameter.grad) for name, parameter in engine.parameters.items()}


def _errors(model: dict[str, Any]) -> list[dict[str, float]]:
    """Relative errors of the gradients of ddp and fsdp2 in bfloat16, of one micro-batch or more."""
    exact = gradients(make(DDPEngine, "float32", **model))

    def errors(engine: Engine) -> dict[str, float]:
        found = gradients(engine)
        for gradient in found.values():  # the sum over ranks is not rounded to bfloat16
            assert gradient.dtype == torch.float32
            assert not torch.equal(gradient, gradient.bfloat16().float())
        return {n: float((g - exact[n]).norm() / exact[n].norm()) for n, g in found.items()}

    engines = [make(DDPEngine, "bfloat16", **model)]
    engines += [make(FSDP2Engine, "bfloat16", reduce, **model) for reduce in ("micro", "step")]
    return [errors(engine) for engine in engines]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks measures."""
    return sacrifice(2, 120, _measure, limit=240.0)


def _measure(_: dist.ProcessGroup) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # the objects of imports, which `_storages` would visit
    errors = [_errors(model) for model in MODELS]
    return {"errors": errors, "gathered": _gathered(), "held": _held(), "sums": _sums()}


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_gathers_in_bfloat16_cost_no_more_than_its_products(ranks, number):
    """Errors of gradients against float32: at most 1.1 times those of ddp in bfloat16, plus 5e-4.

    ddp rounds weights in the products, too; fsdp2 also rounds gains, and a rank's gradients once
    for each micro-batch.
    """
    ddp, *sharded = ranks[0]["errors"][number]
    assert 1e-3 < max(ddp.values()) < 5e-2
    for errors in sharded:
        for name, error in errors.items():
            assert error <= 1.1 * ddp[name] + 5e-4, name


def _gathered() -> dict[str, Any]:
    """The dtypes of the weights in a forward, and what a step leaves."""
    engine = make(FSDP2Engine, "bfloat16")
    seen: dict[str, Any] = {"streams": set()}
    transformer = engine.model.transformer
    modules = {"block": transformer.blocks[0], "head": transformer.output}
    modules |= {"embedding": transformer.embedding, "norm": transformer.norm}
    for name, module in modules.items():

        def hook(module: Any, inputs: tuple[Any, ...], name: str = name) -> None:
            seen[name] = {p.dtype for p in module.parameters()}
            if name != "embedding":
                seen["streams"].add(inputs[0].dtype)

        module.register_forward_pre_hook(hook)
    before = {name: whole(p) for name, p in engine.parameters.items()}
    backward(engine)
    engine.grad_norm(1.0)
    engine.step(1e-5)
    moved = [whole(p) - before[name] for name, p in engine.parameters.items()]
    seen["steps"] = sorted({round(float(m.abs().max()) * 1e6) for m in moved})
    seen["state"] = {b.values.dtype for s in engine.shards().values() for b in s.boxes}
    return seen


def test_products_have_bfloat16_weights_and_the_optimiser_float32_ones(ranks):
    """The embedding, the last norm and the residual stream are float32.

    A step of 1e-5, too small for a weight in bfloat16, moves every parameter by about that much.
    """
    for seen in (rank["gathered"] for rank in ranks):
        assert seen["block"] == seen["head"] == {torch.bfloat16}
        assert seen["embedding"] == seen["norm"] == seen["state"] == {torch.float32}
        assert seen["streams"] == {torch.float32}
        assert {9, 10, 11}.issuperset(seen["steps"])


def _held() -> list[tuple[int, int]]:
    """Elements of the model, and bytes that one micro-batch, not the last, leaves on this rank."""
    found = []
    for reduce in ("micro", "step"):
        engine = make(FSDP2Engine, "bfloat16", reduce)
        backward(engine)  # buffers that later steps use again
        engine.discard()
        before = _storages()
        engine.backward(batch(LENGTHS[0], dist.get_rank()), torch.ones(()), last=False)
        found.append((sum(p.numel() for p in engine.parameters.values()), _storages() - before))
        del engine
    return found


def _storages() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, DTensor, torch.nn.Parameter)]
    grads = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in (*tensors, *grads)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def test_a_micro_batch_leaves_shards_of_its_gradients_or_whole_ones(ranks):
    """4 bytes for each weight of this rank's half of the model, or for each of all weights.

    5% are allowed for padding and small buffers.
    """
    for micro, step in (rank["held"] for rank in ranks):
        assert micro[1] == pytest.approx(4 * micro[0] / 2, rel=0.05)
        assert step[1] == pytest.approx(4 * step[0], rel=0.05)


def _sums() -> list[dict[str, Tensor]]:
    engines = [make(DDPEngine, "float32")]
    engines += [make(FSDP2Engine, "float32", reduce) for reduce in ("micro", "step")]
    return [gradients(engine) for engine in engines]


def test_in_float32_both_reductions_give_the_gradients_of_ddp(ranks):
    """1e-5 of the largest element; three micro-batches."""
    ddp, *sharded = ranks[1]["sums"]
    for found in sharded:
        for name, expected in ddp.items():
            assert float((found[name] - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
