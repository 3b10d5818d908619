"""If this fails, masks leave ranks idle, or a wrong mask passes. Plans of masks: balance, exchange,
`with_mask`, and what they refuse."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ringfa3 import (
    ContextPlan,
    Mask,
    RingFA3Attention,
    flash_attn_mask_func,
    plan_context,
    ring_attn_func,
)
from ringfa3.build.units import UNITS
from ringfa3.kernels import reference
from ringfa3.planning.context_plan import PLANS_KEPT
from ringfa3.planning.refinement import LEAST_KEY_TILE
from tests.support.masks import Endless
from tests.support.ranks import Ranks

CHAIN = Mask.tree([700, 900, 300, 650, 500, 700], [-1, 0, 1, 2, 3, 4])
MASKS = {
    "responses": Mask.pack([Mask.tree([1500] + [400] * 8, [-1] + [0] * 8)] * 3),
    "one tree": Mask.tree([900, 500, 400, 300, 800, 256, 1000], [-1, 0, 1, 1, 0, 4, 0]),
    "chain": CHAIN,
    "images": Mask.documents(8192).with_bidirectional([500, 3000], [900, 3600]),
    "window and first": Mask.documents(8192, window_size=(511, 0), first_keys=4),
    "nothing": Mask([], 1000),
}


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", MASKS)
def test_work_and_tokens_are_balanced(name: str, world: int) -> None:
    """The largest work is at most 1.02 of the mean for 2 ranks, 1.03 for 3, 1.06 for 8, of
    which each has few tiles; tokens differ by one at most. Work: pairs of the rank's queries."""
    mask = MASKS[name]
    plan = plan_context(mask, (0, world))
    assert max(plan.tokens_per_rank) - min(plan.tokens_per_rank) <= 1
    assert sum(plan.work_per_rank) == mask.pairs
    assert max(plan.work_per_rank) * world <= {2: 1.02, 3: 1.03, 8: 1.06}[world] * mask.pairs
    found = np.sort(np.concatenate([plan.index_of(rank) for rank in range(world)]))
    np.testing.assert_array_equal(found, np.arange(mask.q_tokens))


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (True, (700, -1)), (False, (-1, -1))]
)
@pytest.mark.parametrize("lengths", [[16384], [5000, 300, 300, 2000, 9000, 784], [2048] * 8])
def test_documents_have_the_tokens_of_their_own_plan(
    lengths: list[int], causal: bool, window: tuple[int, int]
) -> None:
    """Reference: `plan_context` of the documents: zigzag."""
    cu = np.cumsum([0, *lengths]).tolist()
    mask = Mask.documents(cu, causal=causal, window_size=window)
    for world in (2, 4):
        given = plan_context(mask, (1, world))
        expected = plan_context(cu, (1, world), causal=causal, window_size=window)
        assert given.token_index.tolist() == expected.token_index.tolist()
        assert given.positions.tolist() == expected.positions.tolist()


def test_chunks_are_placed_as_documents() -> None:
    """Reference: the plan of documents that end where chunks do."""
    given = plan_context(Mask.documents([0, 5000, 8192], chunk=1024), (1, 4))
    expected = plan_context([*range(0, 5000, 1024), *range(5000, 8192, 1024), 8192], (1, 4))
    assert given.token_index.tolist() == expected.token_index.tolist()


@pytest.mark.parametrize(
    ("lengths", "world"), [([32768], 2), ([32768], 4), ([16384] * 4, 8), ([9000, 3000, 20000], 3)]
)
def test_first_keys_cost_their_own_rows(lengths: list[int], world: int) -> None:
    """A window and 4 first keys send at most 1.02 of the window's K/V rows, from the same ranks."""
    rows, cu = [], np.cumsum([0, *lengths]).tolist()
    for first_keys in (0, 4):
        mask = Mask.documents(cu, window_size=(1023, 0), first_keys=first_keys)
        runs = plan_context(mask, (0, world)).kv_exchange.runs()
        rows.append(int(np.diff(runs[:, 2:]).sum()))
    assert rows[0] < rows[1] <= 1.02 * rows[0]


EQUALLY_MANY = Mask.documents([0, 300, 300, 800], [0, 500, 700, 800], causal=False)


@pytest.mark.parametrize(
    "mask",
    [
        EQUALLY_MANY,
        EQUALLY_MANY & Mask([[0, 800, 0, 790, -800, 800]], 800, 800),
        Mask.pack([EQUALLY_MANY, EQUALLY_MANY]),
    ],
    ids=["documents", "intersection", "packed"],
)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_as_many_keys_as_queries_may_be_other_tokens(world: int, layout: str, mask: Mask) -> None:
    """Ranks hold equal numbers of keys, in order, with their positions. Work is at most 1.02 of the
    mean. No tokens become bidirectional."""
    plans = [plan_context(mask, (rank, world), layout) for rank in range(world)]
    assert mask.cross
    keys = torch.arange(mask.k_tokens)
    held = [plan.shard_keys(keys) for plan in plans]
    assert torch.equal(torch.cat(held), keys)
    assert max(map(len, held)) - min(map(len, held)) <= 1
    positions = torch.cat([plan.key_positions for plan in plans])
    assert positions.tolist() == mask.key_positions.tolist()
    if layout == "zigzag":
        assert max(plans[0].work_per_rank) * world <= 1.02 * mask.pairs
    with pytest.raises(ValueError, match="need self-attention"):
        mask.with_bidirectional([0], [2])


def test_plans_of_equal_masks_are_one_object() -> None:
    mask, other = Mask.documents(64, chunk=16), Mask.documents(64, window_size=(3, 0))
    plan = plan_context(mask, (0, 2))
    assert plan_context(copy.copy(mask), (0, 2)) is plan
    assert plan.mask == mask
    local = plan.with_mask(other)
    assert local is plan.with_mask(pickle.loads(pickle.dumps(other))) is not plan
    assert local.with_mask(mask) is plan
    assert local.token_index.tolist() == plan.token_index.tolist()
    assert local.digest != plan.digest
    again = pickle.loads(pickle.dumps(local))
    assert (again.digest, again.mask) == (local.digest, other)


def test_a_plan_of_documents_takes_a_mask() -> None:
    """The tokens stay where they are; positions are those of the mask."""
    plan = plan_context([0, 100, 164], (1, 2))
    mask = Mask.documents([0, 100, 164]).with_bidirectional([10], [20])
    masked = plan.with_mask(mask)
    assert masked.token_index.tolist() == plan.token_index.tolist()
    assert masked.positions.tolist() == plan.positions.tolist()
    assert sum(masked.work_per_rank) == mask.pairs
    tree = plan.with_mask(Mask.tree([100, 64], [-1, 0]))
    assert tree.positions.tolist() == plan.token_index.tolist()


def other_masks(plan: ContextPlan, count: int) -> list[int]:
    """Handles of the plans of so many masks of one pair, none of which is held."""
    tokens = plan.total_tokens
    pairs = (divmod(n, tokens) for n in range(count))
    handles = [plan.with_mask(Mask.blocks([r], [c], 1, tokens)).handle for r, c in pairs]
    gc.collect()
    return handles


def test_a_plan_holds_a_bounded_number_of_masks() -> None:
    """The last 64 of 80 masks. An equal mask gives the same plan until then, and later one of the
    same digest."""
    plan = plan_context([0, 100, 164], (1, 2))
    first = plan.with_mask(Mask([], 164))
    handles = other_masks(plan, PLANS_KEPT - 1)
    assert plan.with_mask(Mask([], 164)) is first
    handles = other_masks(plan, 80)
    alive = 0
    for handle in handles:
        with contextlib.suppress(RuntimeError):
            alive += ContextPlan.from_handle(handle) is not None
    assert alive == PLANS_KEPT
    again = plan.with_mask(Mask([], 164))
    assert again is not first
    assert again.digest == first.digest


def _after_the_plan_was_dropped(group: dist.ProcessGroup) -> None:
    """Backward passes after 80 further masks: of an eager call, of one in a checkpoint, and of a
    compiled function that takes a window of its own."""
    del group
    mask, tokens = Mask.tree([8, 5, 6], [-1, 0, 0]), 19
    torch._dynamo.reset()

    def masked(x: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        return ring_attn_func(x, x, x, plan.with_mask(mask))  # type: ignore[return-value]

    def recomputed(x: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        return checkpoint(masked, x, plan, use_reentrant=False)  # type: ignore[no-any-return]

    def windowed(x: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        return ring_attn_func(x, x, x, plan.with_window((2, 0)))  # type: ignore[return-value]

    compiled = torch.compile(windowed, backend="aot_eager", fullgraph=True)
    for call, plain in ((masked, masked), (recomputed, masked), (compiled, windowed)):
        plan = plan_context([0, 11, tokens], (0, 1))
        leaf = torch.randn(tokens, 2, 8, requires_grad=True)
        (expected,) = torch.autograd.grad(plain(leaf, plan).square().sum(), leaf)
        out = call(leaf, plan)
        variants = [p.handle for p in plan._variants.values()]
        other_masks(plan, 80)
        assert not set(variants) & {p.handle for p in plan._variants.values()}
        assert torch.equal(torch.autograd.grad(out.square().sum(), leaf)[0], expected)


def test_a_dropped_plan_breaks_no_call(ranks: Ranks) -> None:
    """Reference: the same gradient before, exactly."""
    ranks.run(1, _after_the_plan_was_dropped)


def test_no_backward_has_smaller_tiles_than_refinement_assumes() -> None:
    """Two bands of one pair of segments need keys of one tile."""
    tiles = [unit.tile_n for unit in UNITS if unit.direction == "backward"]
    assert min(*tiles, reference.TILE_N) >= LEAST_KEY_TILE


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: plan_context(m, (0, 2), causal=False), "causal=False, .* with a Mask"),
        (
            lambda m: plan_context(m, (0, 2), window_size=(3, 0)),
            r"window_size=\(3, 0\) with a Mask",
        ),
        (lambda m: plan_context(m, (0, 2), "striped"), "layout='striped'"),
        (lambda m: plan_context(m, (0, 2)).with_window((3, 0)), "use plan.with_mask"),
        (lambda m: plan_context(m, (0, 2)).with_mask(Mask([], 9)), "mask has 9 queries"),
        (lambda m: plan_context(m, (0, 2)).with_mask([0, 8]), "must be a ringfa3.Mask, got list"),
        (lambda m: plan_context(lambda q, k: q >= k, (0, 2)), "or a ringfa3.Mask of .* no spans"),
        (lambda m: plan_context(Endless(), (0, 2)), "or a ringfa3.Mask of spans"),
        (lambda m: flash_attn_mask_func(*[torch.ones(8, 1, 8)] * 3, [0, 8]), "no spans"),
        (lambda m: flash_attn_mask_func(*[torch.ones(9, 1, 8)] * 3, m), r"q has shape \(9, 1, 8\)"),
        (
            lambda m: flash_attn_mask_func(*[torch.ones(8, 1, 8)] * 3, m, precision="fp8"),
            "no kernel for head_dim 8",
        ),
        (
            lambda m: flash_attn_mask_func(torch.ones(8, 1, 8), *[torch.ones(3, 1, 8)] * 2, m),
            "k has",
        ),
        (lambda m: plan_context(m, (0, 2)).shard_keys(torch.ones(5)), "x has 5 tokens"),
    ],
)
def test_what_is_wrong_is_named(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(Mask.documents(8))  # type: ignore[operator]


def _refused(group: dist.ProcessGroup) -> list[str]:
    """Errors of calls of which only rank 0 is wrong."""
    mask = Mask.documents([0, 40, 64], [0, 10, 21], causal=False)
    plan = plan_context(mask, group)
    q, k = torch.ones(plan.local_tokens, 1, 64), torch.ones(plan.local_keys, 1, 64)
    wrong = q if dist.get_rank(group) == 0 else k
    other = plan_context(Mask([], 64, 21) if dist.get_rank(group) else mask, group)
    errors = []
    for given in ((q, wrong, wrong, plan), (q, k, k, other)):
        try:
            ring_attn_func(*given)
            errors.append("none")
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_errors_are_raised_on_every_rank(ranks: Ranks) -> None:
    """Keys that are not those of `shard_keys`, masks that differ."""
    for keys, masks in ranks.run(2, _refused):
        assert "pass the tokens of plan.shard_keys" in keys
        assert "Mask(64 x 21 tokens, 0 spans" in masks


def _compiled(group: dist.ProcessGroup) -> None:
    del group
    mask = Mask.tree([8, 5, 6], [-1, 0, 0])
    plan, layer = plan_context(mask, (0, 1)), RingFA3Attention(2, 1, 8, group=(0, 1))
    q, k, v = (torch.randn(19, heads, 8) for heads in (2, 1, 1))
    expected = flash_attn_mask_func(q, k, v, mask)
    assert torch.equal(layer(q, k, v, plan), expected)

    def attend(q: torch.Tensor, p: object) -> torch.Tensor:
        return layer(q, k, v, p) + p.positions[:, None, None]  # type: ignore[attr-defined]

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, plan), attend(q, plan), rtol=0, atol=0)

    documents = plan_context(19, (0, 1))
    for refused, message in (
        (lambda p: flash_attn_mask_func(q, k, v, mask), "plan to ring_attn_func inside"),
        (lambda p: layer(q, k, v, p.with_mask(mask)), "plan.with_mask inside a compiled function"),
        (lambda p: layer(q, k, v, p.with_window((3, 0)).with_mask(mask)), "plan.with_mask inside"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(refused, backend="eager", fullgraph=True)(documents)


def test_a_layer_and_a_compiled_function_take_a_plan_with_a_mask(ranks: Ranks) -> None:
    """Reference: `flash_attn_mask_func`, exactly. An error says that plans are made outside. On a
    rank of the pool, which has imported the compiler."""
    ranks.run(1, _compiled)
