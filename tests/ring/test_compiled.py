"""If this fails, compiled rings compute other bits than eager ones. `torch.compile(fullgraph=True)`
of rings, against the same calls in eager mode, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ringfa3 import ContextPlan, RingFA3Attention, keep_attention, plan_context, ring_attn_func
from tests.support.ranks import Ranks

Group = dist.ProcessGroup
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., torch.Tensor]  # of q, k, v and a plan
DOCUMENTS = ([0, 30, 31, 96], [0, 96], [0, 40, 60], [0, 5, 9, 41])
# Fixed numbers, then any plan, then any length: a graph each.
MOST_GRAPHS = 3


def no_plan(group: Group) -> Attend:
    """A batch, under another mask and layout, and one sequence."""
    batch = RingFA3Attention(2, 1, 8, group=group, window_size=(3, -1), layout="contiguous")
    layer = RingFA3Attention(2, 1, 8, group=group, causal=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: object) -> torch.Tensor:
        return layer(batch(*(torch.stack((x, x.sin())) for x in (q, k, v))).sum(0), k, v)

    return attend


def windows(group: Group) -> Attend:
    """Layers with windows of their own; a window of a window is one of the first plan."""
    layer = RingFA3Attention(2, 1, 8, group=group)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        narrow = plan.with_window((2, 0))
        for view in (narrow, plan, narrow.with_window((9, 0))):
            q = layer(q, k, v, view)
        return q * narrow.positions[:, None, None]

    return attend


def tables(group: Group) -> Attend:
    """What a plan has for each token, and tensors of all tokens."""
    layer = RingFA3Attention(2, 1, 8, group=group)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        whole = plan.unshard(q * plan.positions[:, None, None], dim=-3)
        rows = torch.arange(plan.total_tokens, dtype=q.dtype)[:, None, None]
        return layer(plan.shard(whole + rows) - plan.token_index[:, None, None], k, v, plan)

    return attend


def checkpointed(group: Group) -> Attend:
    layer = RingFA3Attention(2, 1, 8, group=group)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        return layer(q.sin(), k, v, plan).cos() + layer(q.cos(), k, v)

    return lambda *inputs: checkpoint(
        block, *inputs, use_reentrant=False, context_fn=keep_attention
    )


def differences(
    attend: Attend, compiled: Attend, plan: ContextPlan, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and gradients of both that are not equal."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(plan.local_tokens, h, 8) for h in (2, 1, 1)]
    results = []
    for run in (compiled, attend):  # which finds what the first one has left in the plan
        g.manual_seed(seed)
        inputs = [torch.randn(s, generator=g).double().requires_grad_() for s in shapes]
        out = run(*inputs, plan)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    return [(a, b) for a, b in zip(*results, strict=True) if not torch.equal(a, b)]


def _compiled(
    group: Group, make: Callable[[Group], Attend], loader: bool, dynamic: bool | None
) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attend = make(group)
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for seed, cu in enumerate(DOCUMENTS):
        if make in (no_plan, checkpointed):  # equal lengths on all ranks
            cu = [0, cu[-1] // world * world]
        plan = plan_context(cu, (rank, world) if loader else group)
        assert not differences(attend, compiled, plan, seed)
    return counter.frame_count


@pytest.mark.parametrize(
    ("make", "loader", "dynamic"),
    [
        (no_plan, False, None),
        (windows, True, True),
        (tables, False, None),
        (checkpointed, True, None),
    ],
)
@pytest.mark.parametrize("world", [2])
def test_one_graph_serves_every_plan_and_length(
    ranks: Ranks, world: int, make: Callable[[Group], Attend], loader: bool, dynamic: bool | None
) -> None:
    """Four plans, three lengths, plans of the group and of a data loader: out and gradients."""
    assert max(ranks.run(world, _compiled, make, loader, dynamic)) <= MOST_GRAPHS


def _broken(group: Group) -> None:
    """A plan with a window leaves one graph, serves code outside graphs, and enters another."""
    torch._dynamo.reset()
    layer = RingFA3Attention(2, 1, 8, group=group)
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        view = plan.with_window((2, 0))
        q = layer(q, k, v, view)
        torch._dynamo.graph_break()
        seen.append((view.effective_window, view.digest, view.local_tokens))
        return ring_attn_func(q, k, v, view) + layer(q, k, v, view)

    compiled = torch.compile(attend, backend="eager")
    plan = plan_context([0, 30, 31, 96], group)
    assert not differences(attend, compiled, plan, 0)
    assert seen == seen[:1] * 2, seen


def test_a_plan_made_in_a_graph_outside_of_it(ranks: Ranks) -> None:
    ranks.run(2, _broken)


def test_inductor() -> None:
    """One process; the code that inductor makes reuses memory, but none of a plan."""
    torch._dynamo.reset()
    attend = tables(None)  # type: ignore[arg-type]
    compiled = torch.compile(attend, fullgraph=True)
    for seed in range(3):
        assert not differences(attend, compiled, plan_context([0, 3, 17 + seed]), seed)


def documents(x: torch.Tensor) -> torch.Tensor:
    return ring_attn_func(x, x, x, plan_context([0, 3, len(x)]))


def test_a_plan_is_made_outside_of_graphs() -> None:
    """One line names the remedy; without fullgraph the call runs between two graphs."""
    torch._dynamo.reset()
    x = torch.randn(7, 2, 8)
    said = "plan_context inside a compiled function: call it outside, and give the plan to the func"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        torch.compile(documents, fullgraph=True, backend="eager")(x)
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(documents, backend="eager", dynamic=dynamic)
        assert torch.equal(compiled(x), documents(x))


class Packed(torch.nn.Module):
    def __init__(self, plan: ContextPlan) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ring_attn_func(x, x, x, self.plan)


def test_a_saved_program_holds_no_plan() -> None:
    """Its handle would stand for another plan, or none, in the process that loads it."""
    x, model = torch.randn(7, 2, 8), Packed(plan_context([0, 3, 7]))
    for record in (torch.export.export, torch.jit.trace):
        with pytest.raises(RuntimeError, match=r"cannot record a plan, which .* use torch.compile"):
            record(model, (x,))


def _refused(group: Group) -> None:
    torch._dynamo.reset()
    layer, x = RingFA3Attention(4, 2, 8, group=group), torch.randn(7, 2, 8)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"give \(\[batch,\] tokens, 4, 8\)"):
        torch.compile(layer, fullgraph=True, backend="eager")(x, x, x)


def test_a_refusal_while_tracing_keeps_its_text(ranks: Ranks) -> None:
    """Every rank traces the same call, so each raises without an agreement."""
    ranks.run(2, _refused)
