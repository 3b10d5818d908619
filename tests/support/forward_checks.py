"""Checks of the forward kernels, on a GPU or in emulation: against float64, and bit by bit.

Each check makes its own inputs on a device and asserts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.build.units import Unit
from ringfa3.kernels import forward
from ringfa3.planning.tile_schedule import FIRST, LAST, Tiling
from ringfa3.planning.tiling import Plan, plan_local

WINDOWS = ((-1, -1), (-1, 0), (100, 0), (64, 64), (0, 0), (300, -1))
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 300)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[tuple[int, int]],
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by PyTorch in the inputs' dtype, one sequence at a time with its whole mask."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    a = b = 0
    for n, m in lengths:
        if n and m:
            rows, keys = slice(a, a + n), slice(b, b + m)
            s = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * q.shape[-1] ** -0.5
            diagonal = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None]
            left, right = (m + n if w < 0 else w for w in window)
            hidden = (diagonal - (m - n) < -left) | (diagonal - (m - n) > right)
            s = s.masked_fill(hidden, -torch.inf)
            p = s.softmax(-1).masked_fill(hidden.all(1)[None, :, None], 0)
            out[rows] = torch.einsum("hqk,khd->qhd", p, v[keys])
            lse[:, rows] = s.logsumexp(-1)
        a, b = a + n, b + m
    return out, lse


def inputs(
    rng: random.Random,
    dtype: torch.dtype,
    d: int,
    lengths: Sequence[tuple[int, int]],
    device: str = "cuda",
) -> list[torch.Tensor]:
    """q, k, v with random numbers of heads; in half of the cases views of one tensor."""
    kv_heads = rng.choice((1, 2, 4))
    heads = kv_heads * rng.choice((1, 2, 4, 16 // kv_heads))
    t, tk = (sum(n) for n in zip(*lengths, strict=True))
    if t == tk and rng.random() < 0.5:
        fused = torch.randn(t, heads + 2 * kv_heads, d, device=device).to(dtype)
        return list(fused.split((heads, kv_heads, kv_heads), dim=1))
    shapes = ((t, heads), (tk, kv_heads), (tk, kv_heads))
    return [torch.randn(*shape, d, device=device).to(dtype) for shape in shapes]


def hold_gate(
    got: tuple[torch.Tensor, torch.Tensor],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Sequence[tuple[int, int]],
    window: tuple[int, int],
    what: str,
) -> None:
    """max|x - ref| <= 2 max|x_pt - ref| + 1e-5 for out, ref in float64, x_pt in the inputs' dtype;
    LSE to 1e-3."""
    out, lse = got
    ref, ref_lse = plain(*(x.double() for x in qkv), lengths, window)
    pt, _ = plain(*qkv, lengths, window)
    error = largest(out.double() - ref)
    bound = 2 * largest(pt.double() - ref) + 1e-5
    assert error <= bound, f"{what}: off by {error:.2e}, allowed {bound:.2e}"
    seen = ref_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen), what
    assert largest((lse.double() - ref_lse)[seen]) < 1e-3, what


def largest(x: torch.Tensor) -> float:
    """max|x|, NaN for one with NaN; 0 of no element."""
    return x.abs().max().item() if x.numel() else 0.0


def rising_scores_hold_the_gate(dtype: torch.dtype, d: int, device: str = "cuda") -> None:
    """The gate where the scores of each key block are far above or below the previous block's."""
    lengths = [(300, 700), (70, 500)]
    cu_q, cu_k = (list(accumulate(n, initial=0)) for n in zip(*lengths, strict=True))
    place = torch.cat([torch.linspace(0, 1, n) for _, n in lengths]).to(device)[:, None, None]
    for factor in (1 + 40 * place, 41 - 40 * place, 1 + 40 * (8 * place).sin().abs()):
        q, k, v = (torch.randn(cu[-1], 2, d, device=device) for cu in (cu_q, cu_k, cu_k))
        q, k, v = (x.to(dtype) for x in (q, k * factor, v))
        for window in ((-1, -1), (-1, 0), (100, 0), (64, 64)):
            call = (q, k, v, cu_q, cu_k)
            out, lse = flash_attn_varlen_func(*call, window_size=window, return_lse=True)
            hold_gate((out, lse), (q, k, v), lengths, window, f"window {window}")


def bits_do_not_depend_on_neighbours(dtype: torch.dtype, d: int, device: str = "cuda") -> None:
    """Queries of NaN, or steep ones, change no bit of other rows, which share their warps.

    Scores of steep rows rise by 60 nats with every block visited, which raises their shifts. In
    bfloat16 values are so large that their P V overflows, so the kernel repeats their tiles.
    """
    cu = [0, 300, 400]
    q, k, v = (torch.randn(400, 1, d, device=device) for _ in range(3))
    q[..., 0] = 0
    nats = 60 / (80 if d == 256 else 128)  # a key
    k[..., 0] = (-nats / (8 * d**-0.5) * torch.arange(400, device=device))[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v if dtype == torch.float16 else 1e15 * v))
    rows = [5, 77, 200, 290, 310]
    others = torch.ones(400, dtype=torch.bool, device=device)
    others[rows] = False
    nan, steep = q.clone(), q.clone()
    nan[rows], steep[rows, :, 0] = torch.nan, 8
    outs = []
    for queries in (q, nan, steep):
        out, lse = flash_attn_varlen_func(queries, k, v, cu, cu, causal=True, return_lse=True)
        outs.append((out[others], lse[:, others]))
    assert outs[0][0].isfinite().all()
    assert out.isfinite().all()
    for spoilt in outs[1:]:
        assert all(map(torch.equal, outs[0], spoilt))


def split_into_hops(whole: Tiling, pieces: Sequence[tuple[int, int]]) -> list[Tiling]:
    """The tiling of one document split into hops over keys [a, b) of `pieces`."""
    reach = whole.tiles["row0"] + whole.tiles["rows"] + whole.spans["hi"]  # (tiles,)
    seen = np.array([reach > a for a, _ in pieces])
    hops = []
    for i, (a, b) in enumerate(pieces):
        spans, tiles = whole.spans.copy(), whole.tiles.copy()
        spans["k0"], spans["k1"] = a, b
        spans["lo"] -= a
        spans["hi"] -= a
        tiles["flags"] = FIRST * ~seen[:i].any(0) + LAST * ~seen[i + 1 :].any(0)
        hops.append(Tiling(whole.size, tiles[seen[i]], spans, whole.earlier))
    return hops


def empty_partial_out(unit: Unit, plan: Plan, heads: int, device: str) -> torch.Tensor:
    """O between hops, NaN."""
    q = torch.empty(0, heads, unit.head_dim, device=device)
    return forward.new_partial_out(unit, q, plan).fill_(torch.nan)


def hops_with_offset_scores_hold_the_gate(
    unit: Unit, device: str = "cuda", combinations: str = "all"
) -> None:
    """The gate for three hops whose scores are offset by up to 100 nats.

    With the causal mask 20 rows attend to no key at any hop, and others to no key at some hops.
    combinations: "all", 32; "pairs", 8 of them that have every pair of two settings; "others".
    """
    t, n, heads, d, dtype = 500, 480, 2, unit.head_dim, getattr(torch, unit.dtype)
    pieces = ((0, 60), (60, 290), (290, n))
    last_block = slice(n - 128, n)  # of keys; the causal rows that reach it visit it first
    shapes = (t, heads, d), (n, heads, d), (n, heads, unit.v_dim)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    q[..., 0] = 8
    for i, offsets in enumerate(((0, 0, 0), (0, -8, -30), (0, -100, 0), (-100, 0, -100))):
        for a, b, c in product((0, 1), repeat=3):
            of_pairs = (b, c) == (a ^ i % 2, a ^ i // 2)
            if combinations != "all" and of_pairs != (combinations == "pairs"):
                continue
            right, tail, order = a - 1, -100 * b, 1 - 2 * c
            nats = torch.cat(
                [torch.full((k1 - k0,), x) for x, (k0, k1) in zip(offsets, pieces, strict=True)]
            )
            nats[last_block] += tail
            k[..., 0] = (nats / (8 * d**-0.5)).to(k)[:, None]
            plan = plan_local(np.array([t]), np.array([n]), -1, right)
            whole = plan.forward(unit.tile_m)[0]
            out = q.new_full((t, heads, unit.v_dim), torch.nan)
            running = empty_partial_out(unit, plan, heads, device)
            lse = torch.full((heads, t), torch.nan, device=device)
            for hop in split_into_hops(whole, pieces[::order]):
                forward.attend(unit, q, k, v, hop, d**-0.5, out, running, lse)
            what = f"{offsets}, last block {tail}, window {right}, order {order}"
            hold_gate((out, lse), (q, k, v), [(t, n)], (-1, right), what)


def few_keys_after_many_are_counted(unit: Unit, device: str = "cuda") -> None:
    """300 keys after 2^20 keys of equal scores: LSE to 1e-5, O to 1e-6.

    On a GPU O to 5e-6: tensor cores truncate sums, which costs 2.7e-6 on an H200.
    """
    t, before, n, d, d_v = 200, 2**20, 300, unit.head_dim, unit.v_dim
    shapes = (t, 1, d), (n, 1, d), (n, 1, d_v)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, unit.dtype)) for shape in shapes)
    v.normal_(1, 1)
    old = torch.rand(t, 1, d_v)
    ref = (before * old.double() + v.double().sum(0)) / (before + n)
    q, k, v = (x.to(device) for x in (q, k, v))
    lse = torch.full((1, t), math.log(before), device=device)
    plan = plan_local(np.array([t]), np.array([n]), -1, -1)
    hop = plan.forward(unit.tile_m)[0]
    hop.tiles["flags"] = 0
    running = empty_partial_out(unit, plan, 1, device)
    at = forward.partial_out_index(hop, 1, d_v).to(device)
    running.view(-1)[at] = old.to(device)
    forward.attend(unit, q, k, v, hop, d**-0.5, q.new_empty(t, 1, d_v), running, lse)
    error = (running.view(-1)[at].cpu().double() - ref).abs().max()
    assert error < (5e-6 if running.is_cuda else 1e-6)
    assert (lse - math.log(before + n)).abs().max().item() < 1e-5


def merged_hops_are_as_exact_as_one_launch(unit: Unit, device: str = "cuda") -> None:
    """rms error of two hops <= 1.1 of one launch over all keys, or of the dtype's own rounding
    where that is larger; LSE to 1e-4.

    The second hop's scores lie up to 120 nats above or below those of the first, and the values of
    either hop are up to 1e30 (6e4 in float16), so that P V overflows unless P is small.
    """
    t, n, d, dtype = 200, 400, unit.head_dim, getattr(torch, unit.dtype)
    large = 6e4 if dtype == torch.float16 else 1e30
    plan = plan_local(np.array([t]), np.array([n]), -1, -1)
    whole = plan.forward(unit.tile_m)[0]
    hops = split_into_hops(whole, ((0, n // 2), (n // 2, n)))
    shapes = (t, 1, d), (n, 1, d), (n, 1, unit.v_dim)
    q, k, noise = (torch.randn(shape, device=device) for shape in shapes)
    q[..., 0] = 8
    for nats, (first, second) in product(
        (0, 40, -40, 60, -60, 120, -120), ((1, 1), (large, 1), (1, large), (large, large))
    ):
        k[..., 0] = 0
        k[n // 2 :, :, 0] = nats / (8 * d**-0.5)
        v = noise.clone()
        v[: n // 2] *= first
        v[n // 2 :] *= second
        inputs = tuple(x.clamp(-large, large).to(dtype) for x in (q, k, v))
        ref, ref_lse = plain(*(x.double() for x in inputs), [(t, n)], (-1, -1))
        errors = []
        for tilings in ([whole], hops):
            out = torch.full_like(inputs[2][:t], torch.nan)
            running = empty_partial_out(unit, plan, 1, device)
            lse = torch.full((1, t), torch.nan, device=device)
            for tiling in tilings:
                forward.attend(unit, *inputs, tiling, d**-0.5, out, running, lse)
            errors.append((out.double() - ref).square().mean().sqrt().item())
            assert (lse - ref_lse).abs().max().item() < 1e-4, f"{nats} nats"
        rounding = (ref.to(dtype).double() - ref).square().mean().sqrt().item()
        what = f"{nats} nats, values {first:g} and {second:g}"
        assert errors[1] <= 1.1 * max(errors[0], rounding), f"{what}: {errors}, {rounding:.2e}"


OF_HOPS = (
    hops_with_offset_scores_hold_the_gate,
    few_keys_after_many_are_counted,
    merged_hops_are_as_exact_as_one_launch,
)


def large_values_hold_the_gate(dtype: torch.dtype, d: int, device: str = "cuda") -> None:
    """The gate for values near the largest of the dtype, and for tiny ones, with rising scores.

    P of later blocks is far above 1, so P V overflows in bfloat16 and rows are computed again. The
    gate is that of values divided by their size; LSE to 1e-3.
    """
    lengths = [(150, 400), (70, 300)]
    cu_q, cu_k = (list(accumulate(n, initial=0)) for n in zip(*lengths, strict=True))
    q, k, noise = (torch.randn(cu[-1], 2, d, device=device) for cu in (cu_q, cu_k, cu_k))
    q[..., 0] = 8
    place = torch.cat([torch.arange(n) for _, n in lengths]).to(device)
    k[..., 0] = (-0.2 * place / (8 * d**-0.5))[:, None]  # nats: the last keys are visited first
    sizes = (3e4, 1e-3) if dtype == torch.float16 else (2.0**118, 1e30, 1e-30)
    for size, window in product(sizes, ((-1, -1), (-1, 0), (100, 0))):
        inputs = tuple(x.to(dtype) for x in (q, k, (noise * size).clamp(-2 * size, 2 * size)))
        out, lse = flash_attn_varlen_func(*inputs, cu_q, cu_k, window_size=window, return_lse=True)
        assert out.isfinite().all(), f"values of {size:g}, window {window}"
        scaled = (*inputs[:2], inputs[2].double() / size)
        ref, ref_lse = plain(*(x.double() for x in scaled), lengths, window)
        pt, _ = plain(*inputs[:2], (inputs[2] / size).to(dtype), lengths, window)
        error = (out.double() / size - ref).abs().max().item()
        bound = 2 * (pt.double() - ref).abs().max().item() + 1e-5
        assert error <= bound, f"values of {size:g}, window {window}: {error:.2e}, {bound:.2e}"
        seen = ref_lse > -torch.inf
        assert (lse.double() - ref_lse)[seen].abs().max().item() < 1e-3
