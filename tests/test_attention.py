"""If this fails, models with `RingFA3Attention` compute or train wrongly. `RingFA3Attention`: dense
without a plan, packed with one, and in models that train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringfa3 import (
    ContextPlan,
    RingFA3Attention,
    flash_attn_func,
    flash_attn_varlen_func,
    keep_attention,
    plan_context,
)
from ringfa3.pass_interface import LocalPass
from ringfa3.ring.p2p_pass import P2PRingPass
from tests.support.dense import cumulative, worst
from tests.support.ranks import Ranks

Group = dist.ProcessGroup
EXACT = 1e-12  # float64


def inputs_of(batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)
    shapes = [(batch, tokens, h, 8) for h in (4, 2, 2)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def _dense(group: Group, batch: int, local: int, layout: str, causal: bool) -> float:
    """Error of out and gradients of `batch` sequences without a plan, against one device."""
    world = dist.get_world_size(group)
    attn = RingFA3Attention(
        4, 2, 8, causal=causal, window_size=(30, -1), softmax_scale=0.3, group=group, layout=layout
    )
    one = plan_context(local * world, group, layout)
    whole = [x.requires_grad_() for x in inputs_of(batch, local * world)]
    shards = [one.shard(x.detach(), 1).requires_grad_() for x in whole]
    out = attn(*shards)
    wanted = flash_attn_func(*whole, softmax_scale=0.3, causal=causal, window_size=(30, -1))
    assert out.shape == shards[0].shape
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    got = torch.autograd.grad(out, shards, one.shard(weights, 1))
    ref = torch.autograd.grad(wanted, whole, weights)
    pairs = [(out, one.shard(wanted, 1))]
    pairs += [(g, one.shard(r, 1)) for g, r in zip(got, ref, strict=True)]
    if batch == 1:  # equal without a batch dim
        assert torch.equal(attn(*(x[0] for x in shards)), out[0])
    return worst(pairs)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("batch", "causal"), [(1, True), (3, True), (3, False)])
def test_dense_without_a_plan_equals_one_device(
    ranks: Ranks, world: int, layout: str, batch: int, causal: bool
) -> None:
    """`flash_attn_func` on the unsharded tensors, float64, out and gradients to 1e-12."""
    assert max(ranks.run(world, _dense, batch, 26, layout, causal)) < EXACT


def _packed(group: Group) -> float:
    lengths = [30, 1, 0, 65]
    plan = plan_context(cumulative(lengths), group)
    attn = RingFA3Attention(4, 2, 8, group=group, causal=False)  # the plan has the mask
    whole = [x[0] for x in inputs_of(1, 96)]
    cu = cumulative(lengths)
    wanted = plan.shard(flash_attn_varlen_func(*whole, cu, cu, causal=True))
    shards = [plan.shard(x) for x in whole]
    return worst(
        [(attn(*shards, plan), wanted), (attn(*(x[None] for x in shards), plan)[0], wanted)]
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_packed_with_a_plan_equals_one_device(ranks: Ranks, world: int) -> None:
    """With and without a batch dim of 1, float64, 1e-12."""
    assert max(ranks.run(world, _packed)) < EXACT


def _autocast(group: Group) -> None:
    plan = plan_context(96, group)
    attn = RingFA3Attention(4, 2, 8, group=group)
    leaves = [plan.shard(x[0]).requires_grad_() for x in inputs_of(1, 96, torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(*leaves, plan)
    wanted = attn(*(x.bfloat16() for x in leaves), plan)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted)
    got, ref = (torch.autograd.grad(x.sum(), leaves) for x in (out, wanted))
    assert all(g.dtype == torch.float32 for g in got)
    assert all(torch.equal(a, b) for a, b in zip(got, ref, strict=True))


def test_autocast(ranks: Ranks) -> None:
    """The bits of inputs cast by hand."""
    ranks.run(2, _autocast)


class Block(nn.Module):
    """A transformer layer's attention: projections around `RingFA3Attention`."""

    def __init__(self, group: Group | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, (4 + 2 + 2) * 8, dtype=torch.float64)
        self.out = nn.Linear(32, 16, dtype=torch.float64)
        self.attn = RingFA3Attention(4, 2, 8, group=group)

    def forward(self, x: torch.Tensor, plan: ContextPlan | None) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 8, 8).split([4, 2, 2], dim=1)
        return x + self.out(self.attn(q, k, v, plan).flatten(1))


class Model(nn.Module):
    """Two layers, checkpointed according to `mode`."""

    def __init__(self, group: Group | None, mode: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.mode = mode

    def forward(self, x: torch.Tensor, plan: ContextPlan | None) -> torch.Tensor:
        for block in self.blocks:
            if self.mode == "plain":
                x = block(x, plan)
            elif self.mode == "recompute":
                x = checkpoint(block, x, plan, use_reentrant=False)
            else:
                x = checkpoint(block, x, plan, use_reentrant=False, context_fn=keep_attention)
        return x


@contextmanager
def counting_rings() -> Iterator[list[str]]:
    """Collects the direction of every ring pass that runs."""
    ran: list[str] = []
    with ExitStack() as patches:
        for kind in (LocalPass, P2PRingPass):

            def noted(ring_pass: Any, *given: Any, start: Any = kind.start) -> None:
                ran.append(ring_pass._pass_type)
                start(ring_pass, *given)

            patches.enter_context(mock.patch.object(kind, "start", noted))
        yield ran


def tokens_of(plan: ContextPlan) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    return plan.shard(torch.randn(plan.total_tokens, 16, generator=g, dtype=torch.float64))


def gradients_of(model: nn.Module, plan: ContextPlan | None, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x, plan).sin().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _checkpoint(group: Group, mode: str) -> tuple[list[str], bool]:
    plan = plan_context([0, 30, 31, 96], group)
    x = tokens_of(plan)
    plain = gradients_of(Model(group), plan, x)
    with counting_rings() as ran:
        got = gradients_of(Model(group, mode), plan, x)
    return ran, all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("mode", "forwards"), [("plain", 2), ("selective", 2), ("recompute", 4)])
def test_selective_checkpointing_runs_the_ring_once_a_layer(
    ranks: Ranks, world: int, mode: str, forwards: int
) -> None:
    """Two layers; plain checkpointing runs the ring twice. Gradients have the same bits."""
    for ran, equal in ranks.run(world, _checkpoint, mode):
        assert ran.count("forward") == forwards
        assert ran.count("backward") == 2
        assert equal


def _ddp(group: Group, mode: str) -> float:
    """Error of DDP's gradients, averages over ranks, against one device."""
    cu = [0, 30, 31, 96]
    plan = plan_context(cu, group)
    model = DistributedDataParallel(Model(group, mode), process_group=group)
    got = gradients_of(model, plan, tokens_of(plan))
    alone = plan_context(cu, (0, 1))
    ref = gradients_of(Model((0, 1)), alone, tokens_of(alone))
    world = dist.get_world_size(group)
    return worst([(a * world, b) for a, b in zip(got, ref, strict=True)])


@pytest.mark.parametrize("mode", ["plain", "selective"])
@pytest.mark.parametrize("world", [2, 3])
def test_ddp_around_a_model(ranks: Ranks, world: int, mode: str) -> None:
    """Float64, 1e-11: gradients of weights sum over tokens."""
    assert max(ranks.run(world, _ddp, mode)) < 1e-11


def _compiled(group: Group, mode: str) -> float:
    """Error of a compiled model's gradients against eager, over three plans."""
    torch._dynamo.reset()
    model = Model(group, mode)
    compiled = torch.compile(Model(group, mode), backend="aot_eager", fullgraph=True)
    error = 0.0
    for cu in ([0, 30, 31, 96], [0, 96], [0, 40, 60]):
        plan = plan_context(cu, group)
        x = tokens_of(plan)
        pairs = zip(gradients_of(compiled, plan, x), gradients_of(model, plan, x), strict=True)
        error = max(error, worst(list(pairs)))
    return error


@pytest.mark.parametrize(("world", "mode"), [(1, "selective"), (2, "plain"), (2, "selective")])
def test_compiled_model(ranks: Ranks, world: int, mode: str) -> None:
    """aot_eager, one graph, a new plan each step: gradients as eager to 1e-12."""
    assert max(ranks.run(world, _compiled, mode)) < EXACT


X = torch.zeros(2, 6, 4, 8)
REFUSED: list[tuple[str, type[Exception], Callable[[], object]]] = [
    ("num_heads=4 .* num_kv_heads=3", ValueError, lambda: RingFA3Attention(4, 3, 8)),
    ("num_kv_heads=0", ValueError, lambda: RingFA3Attention(4, 0, 8)),
    ("layout='ring'", ValueError, lambda: RingFA3Attention(4, 2, 8, layout="ring")),
    ("transport='mpi'", ValueError, lambda: RingFA3Attention(4, 2, 8, transport="mpi")),
    ("precision='int4'", ValueError, lambda: RingFA3Attention(4, 2, 8, precision="int4")),
    ("window_size", ValueError, lambda: RingFA3Attention(4, 2, 8, window_size=(-2, 0))),
    ("num_heads=4.0", TypeError, lambda: RingFA3Attention(4.0, 2, 8)),  # type: ignore[arg-type]
    ("head_dim='8'", TypeError, lambda: RingFA3Attention(4, 2, "8")),  # type: ignore[arg-type]
    ("softmax_scale=-1", ValueError, lambda: RingFA3Attention(4, 2, 8, softmax_scale=-1)),
    ("deterministic=1", TypeError, lambda: RingFA3Attention(4, 2, 8, deterministic=1)),  # type: ignore[arg-type]
    ("q has shape", ValueError, lambda: RingFA3Attention(2, 2, 8)(X, X, X)),
    ("k has shape", ValueError, lambda: RingFA3Attention(4, 2, 8)(X, X, X)),
    ("plan must come", TypeError, lambda: RingFA3Attention(4, 4, 8)(X, X, X, [0, 12])),
    ("q has 12 tokens", ValueError, lambda: RingFA3Attention(4, 4, 8)(X, X, X, plan_context(11))),
]


@pytest.mark.parametrize(("said", "kind", "wrong"), REFUSED, ids=[r[0] for r in REFUSED])
def test_errors_name_the_argument_and_its_value(
    said: str, kind: type[Exception], wrong: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=said):
        wrong()


def test_the_layer_has_no_parameters_and_prints_its_arguments() -> None:
    attn = RingFA3Attention(4, 2, 8, window_size=(5, 0))
    assert not list(attn.parameters())
    assert not attn.state_dict()
    assert "window_size=(5, 0)" in repr(attn)


def test_a_deep_copy_shares_the_group_and_nothing_else() -> None:
    layer = RingFA3Attention(2, 1, 8, group=(0, 1))
    twin = copy.deepcopy(layer)
    fired = []
    twin.register_forward_hook(lambda *_: fired.append(1))
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8)
    assert torch.equal(layer(q, k, k), twin(q, k, k))
    assert len(fired) == 1
    assert twin.group is layer.group


def _deep_copy_of_a_plan(group: Group) -> None:
    plan = plan_context(10, group)
    assert copy.deepcopy({"plan": plan})["plan"] is plan


def test_a_deep_copy_shares_plans(ranks: Ranks) -> None:
    """Of a module that holds a plan, whose group cannot be copied."""
    ranks.run(1, _deep_copy_of_a_plan)
