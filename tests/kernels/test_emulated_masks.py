"""If this fails, masks give wrong results in the kernels. Kernels under masks with clipped spans,
emulated on the CPU: `make kernels` runs it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_mask_func, plan_context
from ringfa3.build.units import select_units
from ringfa3.kernels import forward
from ringfa3.kernels.backward import BackwardPass
from ringfa3.planning.tile_schedule import FIRST, LAST, Tiling
from tests.support.dense import gradients
from tests.support.emulation import EAGERNESS, Machine, draws, unit
from tests.support.forward_checks import empty_partial_out
from tests.support.mask_checks import dense_results, dsink_size, given_of, hold_gate
from tests.support.masks import Union, random_union

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]

# CI has one head dim; `-m soak` runs the others.
SHAPES = [(torch.bfloat16, 128)] + [
    pytest.param(dtype, d, marks=pytest.mark.soak)
    for dtype in (torch.bfloat16, torch.float16)
    for d in (64, 128, 256)
    if (dtype, d) != (torch.bfloat16, 128)
]
# A causal document with an image; padding; a document that begins inside a tile, of which some rows
# attend to nine short runs of the first: more spans than a work item holds.
LINKS = Union(
    220,
    220,
    [
        ("|", (0, 90, 0, 90, -220, 0)),
        ("|", (50, 80, 50, 80, -220, 220)),
        ("|", (100, 220, 100, 220, -220, 0)),
        *(("|", (190, 215, a, a + 3, -220, 220)) for a in range(20, 74, 6)),
    ],
)


@pytest.mark.parametrize(("dtype", "d"), SHAPES)
@pytest.mark.parametrize("cases", draws(1, 24), ids=str)
def test_masks_hold_the_gate(emulated: Machine, dtype: torch.dtype, d: int, cases: range) -> None:
    """`hold_gate` of out, LSE and gradients of all inputs: `LINKS`, and random masks. NaN of
    padding reaches nothing.
    """
    clipped = 0
    for case in cases:
        rng = random.Random(1000 * d + case)
        union = random_union(rng, 300, cross=case % 4 == 3) if case else LINKS
        torch.manual_seed(case)
        given = given_of(union, 2, 1, d, dtype, case % 3 == 2, "cpu")
        if not union.q_tokens or not union.k_tokens:
            continue
        mask = union.mask()
        plan = plan_context(mask, (0, 1)).hops.clipped
        clipped += plan.clips
        assert case or plan.forward(128)[0].tiles["num_spans"].max() > 8
        emulated.settings(case, EAGERNESS[case % 4])
        inputs = [x.clone() for x in given[0]]
        for x in inputs[:3] if union is LINKS else ():
            x[90:100] = torch.nan
        leaves = [x.requires_grad_() for x in inputs]
        sink = leaves[3] if len(leaves) > 3 else None
        outputs = flash_attn_mask_func(*leaves[:3], mask, sink=sink, return_lse=True)
        assert isinstance(outputs, tuple)
        got = [*outputs, *gradients(leaves, outputs, *given[1:])]
        plain, exact = (dense_results(union, given, x) for x in (dtype, torch.float64))
        hold_gate(got, plain, exact, dsink_size(exact, given), f"case {case}: {union}")
    assert clipped


# Two tiles of 128 rows: 35 whole spans of 128 keys, more than a warp has lanes, and a masked one;
# a masked span, whole ones after it.
BLOCKS = Union(
    256,
    36 * 128,
    [
        *(("|", (0, 128, 128 * b, 128 * (b + 1), -9000, 9000)) for b in range(35)),
        ("|", (0, 128, 35 * 128, 36 * 128, -9000, 0)),
        *(("|", (128, 256, a, b, -9000, 9000)) for a, b in ((0, 40), (128, 256), (384, 640))),
    ],
)


@pytest.mark.parametrize("d", [128, *(pytest.param(d, marks=pytest.mark.soak) for d in (64, 256))])
def test_whole_spans_hold_the_gate(emulated: Machine, d: int) -> None:
    """`hold_gate` of out, whose consumers take whole spans as one run."""
    emulated.settings(1)
    torch.manual_seed(1)
    given = given_of(BLOCKS, 1, 1, d, torch.bfloat16, False, "cpu")
    outputs = flash_attn_mask_func(*given[0][:3], BLOCKS.mask(), return_lse=True)
    assert isinstance(outputs, tuple)
    plain, exact = (dense_results(BLOCKS, given, x)[:2] for x in (torch.bfloat16, torch.float64))
    hold_gate(outputs, plain, exact, 0.0, "blocks")


# A narrow span of four or 13 keys, then padding, then a window. Some rows of a tile attend to none,
# or not to all, of the keys of the clipped one.
WINDOW = ("|", (0, 300, 24, 300, -164, -24))
FIRST_KEYS = Union(300, 300, [("|", (0, 300, 0, 4, -300, 300)), WINDOW])
SOME_ROWS = Union(300, 300, [("|", (40, 200, 0, 13, -150, 300)), WINDOW])
NARROW_SHAPES = [SHAPES[0], *(x for x in SHAPES[1:] if x.values[1] < 256)]


def narrow_tiles(tiling: Tiling) -> int:
    """Tiles that need 1 to 16 columns of their first span, and other spans."""
    tile, columns = tiling.visit_columns()
    first = columns[np.unique(tile, return_index=True)[1]]
    return int(((first > 0) & (first <= 16) & (np.bincount(tile) > 1)).sum())


@pytest.mark.parametrize("lead", [1, 8], ids=["equal", "leading"])
@pytest.mark.parametrize("union", [FIRST_KEYS, SOME_ROWS], ids=["whole", "clipped"])
@pytest.mark.parametrize(("dtype", "d"), NARROW_SHAPES)
def test_narrow_spans_hold_the_gate(
    emulated: Machine, dtype: torch.dtype, d: int, union: Union, lead: int
) -> None:
    """`hold_gate` of out and LSE, where scores of the narrow span are as others, or lead. NaN of
    padding, which the narrow span's box has, reaches nothing.
    """
    plan = plan_context(union.mask(), (0, 1)).hops.clipped
    assert plan.clips == (union is SOME_ROWS)
    assert narrow_tiles(plan.forward(128)[0]) >= 2
    emulated.settings(lead, EAGERNESS[lead % 4])
    torch.manual_seed(lead)
    given = given_of(union, 2, 1, d, dtype, False, "cpu")
    given[0][1][:13] *= lead
    q, k, v = (x.clone() for x in given[0])
    for x in (k, v):
        x[13 if plan.clips else 4 : 24] = torch.nan
    outputs = flash_attn_mask_func(q, k, v, union.mask(), return_lse=True)
    assert isinstance(outputs, tuple)
    plain, exact = (dense_results(union, given, x)[:2] for x in (dtype, torch.float64))
    hold_gate(outputs, plain, exact, 0.0, f"{union}")


@pytest.mark.parametrize("alone", [False, True], ids=["", "alone"])
@pytest.mark.parametrize(("dtype", "d"), NARROW_SHAPES)
def test_a_narrow_span_merges_with_an_earlier_hop(
    emulated: Machine, dtype: torch.dtype, d: int, alone: bool
) -> None:
    """`hold_gate` of out and LSE: keys from 200 on are the first hop's. Scores of the narrow span
    lead, so most rows rescale the first hop's O. `alone`: the tile's other span has no key.
    """
    union = Union(300, 300, [("|", (0, 300, a, b, -300, 300)) for a, b in ((0, 4), (24, 180))])
    union.steps.append(("|", (0, 300, 200, 300, -300, 300)))
    emulated.settings(3)
    torch.manual_seed(3)
    given = given_of(union, 2, 1, d, dtype, False, "cpu")
    given[0][1][:4] *= 8
    of_shape = unit("forward", given[0][0])
    plan = plan_context(union.mask(), (0, 1)).hops
    whole = plan.forward(of_shape.tile_m)[0]
    assert (whole.tiles["num_spans"] == 3).all()
    out = torch.full_like(given[0][0], torch.nan)
    lse = torch.full((2, 300), torch.nan)
    running = empty_partial_out(of_shape, plan, 2, "cpu")
    if alone:
        whole.spans["k1"][1] = whole.spans["k0"][1]
        del union.steps[1]
    for first, spans, flag in ((2, 1, FIRST), (0, 2, LAST)):
        tiles = whole.tiles.copy()
        tiles["first_span"] += first
        tiles["num_spans"], tiles["flags"] = spans, flag
        hop = Tiling(whole.size, tiles, whole.spans, whole.earlier)
        assert narrow_tiles(hop) == (flag == LAST) * len(tiles)
        forward.attend(of_shape, *given[0][:3], hop, d**-0.5, out, running, lse)
    plain, exact = (dense_results(union, given, x)[:2] for x in (dtype, torch.float64))
    hold_gate((out, lse), plain, exact, 0.0, "hops")


def test_kernels_of_whole_spans_refuse_clipped_ones(emulated: Machine) -> None:
    """And the reverse: the layouts of spans differ."""
    emulated.settings(0)
    hops = plan_context(LINKS.mask(), (0, 1)).hops
    (q, k, v), dout, dlse = given_of(LINKS, 2, 1, 128, torch.bfloat16, False, "cpu")
    for plan, name in ((hops.clipped, "backward-d128-bf16"), (hops, "backward-d128-bf16-clips")):
        (unit,) = select_units([name])
        with pytest.raises(ValueError, match="select the kernel for this plan"):
            BackwardPass(unit, dout, dlse, q, dout, dlse, plan, 1.0, False, 1)
        (unit,) = select_units([name.replace("backward", "forward")])
        tiling = plan.forward(unit.tile_m)[0]
        with pytest.raises(ValueError, match="select the kernel for this plan"):
            forward.attend(unit, q, k, v, tiling, 1.0, dout, dout, dlse)
