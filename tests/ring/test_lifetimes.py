"""If this fails, groups that end leave threads, sockets and memory. A ring lives as long as its
process group: what it takes is given back, and plans end with it."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ringfa3 import RingFA3Attention, plan_context, ring_attn_func
from ringfa3.ring.group import RingGroup
from tests.support.ranks import Ranks, group_of, sacrifice

SETTLED_S = 5.0  # the monitor closes a ring within its period of 0.25 s
REGISTRIES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")


def _call(group: dist.ProcessGroup, tokens: int = 22) -> None:
    """A forward and a backward; LSE of ones over equal scores tells whether it is right."""
    plan = plan_context(tokens, group, causal=False)
    x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)
    out, lse = ring_attn_func(x, x, x, plan, return_lse=True)
    out.sum().backward()
    expected = torch.full_like(lse, 8**0.5 + torch.tensor(float(tokens)).log().item())
    torch.testing.assert_close(lse, expected)
    assert plan.unshard(x.detach()).shape[0] == tokens


def _held() -> tuple[int, ...]:
    """Threads, file descriptors, and the entries of PyTorch's tables of groups."""
    tables: list[Any] = [getattr(c10d._world, name) for name in REGISTRIES]
    tables += [[g for groups in c10d._world.tags_to_pg.values() for g in groups], RingGroup._known]
    threads, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    return len(threads), len(files), threading.active_count(), *map(len, tables)


def _settled(bound: tuple[int, ...]) -> tuple[int, ...]:
    """What is held as soon as it is within the bound, or after `SETTLED_S`. Nothing is collected:
    a program may have switched the garbage collector off."""
    end = time.monotonic() + SETTLED_S
    while any(h > b for h, b in zip(_held(), bound, strict=True)) and time.monotonic() < end:
        time.sleep(0.02)
    return _held()


def _rounds(_: dist.ProcessGroup, shape: str, rounds: int) -> list[tuple[int, ...]]:
    """What is held before and after rounds in which new groups make calls and are destroyed."""
    ranks = {"all": [[0, 1, 2]], "pair": [[2, 0]], "overlapping": [[0, 1], [1, 2], [0, 1, 2]]}

    def once() -> None:
        groups = [dist.new_group(members) for members in ranks[shape]]
        mine = [g for g in groups if isinstance(g, dist.ProcessGroup)]
        for group in mine:
            _call(group)
        dist.barrier()
        for group in mine:
            dist.destroy_process_group(group)

    once()  # what the first round makes once
    gc.collect()
    gc.disable()
    time.sleep(0.5)
    before = _held()
    for _ in range(rounds):
        once()
    return [before, _settled(before)]


@pytest.mark.parametrize(("shape", "rounds"), [("all", 31), ("pair", 5), ("overlapping", 5)])
def test_destroyed_groups_leave_nothing(ranks: Ranks, shape: str, rounds: int) -> None:
    """No thread, file descriptor or entry of a table more than before, exactly."""
    for before, after in ranks.run(4, _rounds, shape, rounds):
        assert all(a <= b for a, b in zip(after, before, strict=True)), (before, after)


def _restarts(_: dist.ProcessGroup, port: int) -> list[tuple[int, ...]]:
    """The same where the default group is destroyed and made anew, as elastic jobs do."""
    rank, held = dist.get_rank(), []
    for life in range(5):
        group = dist.group.WORLD
        assert group is not None
        _call(group)
        _call(dist.new_group([1, 0]))
        dist.barrier()
        del group
        dist.destroy_process_group()
        if life == 1:
            gc.collect()
            gc.disable()
            time.sleep(0.5)
        if life >= 1:
            held.append(_settled(held[0]) if held else _held())
        if life < 4:
            store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10))
            part = dist.PrefixStore(f"life {life}", store)
            dist.init_process_group("gloo", store=part, rank=rank, world_size=2)
    return [held[0], held[-1]]


def test_a_default_group_may_be_made_anew() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for before, after in sacrifice(2, 20.0, _restarts, store.port):
        assert all(a <= b for a, b in zip(after, before, strict=True)), (before, after)


def _destroy(group: dist.ProcessGroup, which: str) -> tuple[dist.ProcessGroup, Any, Any, Any]:
    """A group that has made calls and is destroyed: it, its plan, a bound plan and a layer."""
    if which == "subgroup":
        group = group_of(2)
    plan = plan_context(22, group)
    bound = plan_context(24, (plan.rank, 2)).bound_to(group)
    layer = RingFA3Attention(2, 2, 8, group=group)
    x = torch.ones(11, 2, 8)
    layer(x, x, x, plan)
    x = torch.ones(12, 2, 8)
    ring_attn_func(x, x, x, bound)
    dist.barrier()
    dist.destroy_process_group(group if which == "subgroup" else None)
    return group, plan, bound, layer


def _texts(group: dist.ProcessGroup, which: str) -> dict[str, str]:
    """What each use of a destroyed group raises."""
    group, plan, bound, layer = _destroy(group, which)
    x, y = torch.ones(11, 2, 8), torch.ones(12, 2, 8)
    uses: dict[str, Callable[[], object]] = {
        "plan": lambda: ring_attn_func(x, x, x, plan),
        "window": lambda: ring_attn_func(x, x, x, plan.with_window((3, 0))),
        "bound plan": lambda: ring_attn_func(y, y, y, bound),
        "wrong argument": lambda: ring_attn_func(x, x, x[1:], plan),
        "unshard": lambda: plan.unshard(x),
        "new plan": lambda: plan_context(22, group),
        "layer": lambda: layer(x, x, x),
        "layer with plan": lambda: layer(x, x, x, plan),
        "new layer": lambda: RingFA3Attention(2, 2, 8, group=group),
        "pickle": lambda: pickle.dumps(plan),
    }
    texts = {}
    for name, use in uses.items():
        try:
            use()
            texts[name] = "nothing"
        except (ValueError, TypeError) as problem:
            texts[name] = str(problem)
    assert torch.equal(plan.shard(torch.arange(22)), plan.token_index)  # needs no group
    return texts


@pytest.mark.parametrize("which", ["subgroup", "default group"])
def test_a_destroyed_group_is_named(which: str) -> None:
    """Also by plans, bound plans and layers that were made before, and after good calls."""
    for texts in sacrifice(2, 20.0, _texts, which):
        assert "cannot be sent" in texts.pop("pickle")
        for name, text in texts.items():
            assert "group: this process group has been destroyed" in text, name


def _mid_backward(_: dist.ProcessGroup) -> str:
    group = group_of(2)
    plan = plan_context(22, group)
    x = torch.ones(11, 2, 8, requires_grad=True)
    out = ring_attn_func(x, x, x, plan)
    dist.barrier()
    dist.destroy_process_group(group)
    try:
        out.sum().backward()  # type: ignore[union-attr]
    except ValueError as problem:
        return str(problem)
    return "nothing"


def test_a_backward_after_the_end_of_its_group_is_refused() -> None:
    for text in sacrifice(2, 20.0, _mid_backward):
        assert "group: this process group has been destroyed" in text
