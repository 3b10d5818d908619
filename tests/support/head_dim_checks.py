"""Checks of head dims below a kernel's own, on a GPU or in emulation: against float64.

Letters: d head dim of q and k, d_v of v and out. The gate is that of `forward_checks` and
`backward_checks`: max|x - ref| <= 2 max|x_pt - ref| + 1e-5, ref in float64, x_pt by PyTorch in the
dtype of q.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ringfa3 import flash_attn_varlen_func
from ringfa3.build.units import Unit
from ringfa3.kernels import forward
from ringfa3.kernels.backward import BackwardPass
from ringfa3.planning.tile_schedule import FIRST, LAST
from ringfa3.planning.tiling import plan_local
from tests.support import backward_checks, dense, forward_checks

MARK = 1024.0  # of columns that kernels must not write; exact in 16 bits


def beside(x: torch.Tensor, filling: float) -> torch.Tensor:
    """The numbers of x in a view: behind each row lie eight columns of `filling`."""
    return F.pad(x, (0, 8), value=filling)[..., : x.shape[-1]]


def columns_behind(x: torch.Tensor) -> torch.Tensor:
    """The eight columns behind each row of what `beside` has returned."""
    shape = (*x.shape[:-1], x.shape[-1] + 8)
    return x.as_strided(shape, x.stride(), x.storage_offset())[..., x.shape[-1] :]


def function_holds_the_gate(unit: Unit, head_dims: tuple[int, int], case: int, device: str) -> None:
    """out, LSE to 1e-3, dq, dk, dv of `flash_attn_varlen_func` with packed sequences."""
    p = backward_checks.random_problem(case, unit, device, head_dims=head_dims)
    if p is None:
        return
    leaves = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
    cu = [dense.cumulative(n) for n in zip(*p.lengths, strict=True)]
    out, lse = flash_attn_varlen_func(*leaves, *cu, window_size=p.window, return_lse=True)
    assert out.shape == p.dout.shape
    what = f"case {case}, d {head_dims}: {p.lengths}, window {p.window}"
    qkv = p.q, p.k, p.v
    forward_checks.hold_gate((out.detach(), lse.detach()), qkv, p.lengths, p.window, what)
    dlse = torch.zeros_like(lse) if p.dlse is None else p.dlse
    got = torch.autograd.grad((out, lse), leaves, (p.dout, dlse))
    backward_checks.hold_gate(list(got), p, what)


def forward_keeps_to_its_columns(unit: Unit, head_dims: tuple[int, int], device: str) -> None:
    """NaN beside q, k and v is not read; columns beside out are not written. The gate.

    The second tile is partial: rows of it leave without TMA. Rows behind it see nothing.
    """
    d, d_v = head_dims
    dtype, t, n, blind = getattr(torch, unit.dtype), unit.tile_m + 37, 200, 70
    torch.manual_seed(0)
    q, k = (torch.randn(rows, 2, d, device=device).to(dtype) for rows in (t + blind, n))
    v = torch.randn(n, 2, d_v, device=device).to(dtype)
    wide = [beside(x, torch.nan) for x in (q, k, v)]
    out = beside(torch.full((t + blind, 2, d_v), torch.nan, device=device, dtype=dtype), MARK)
    lse = torch.empty(2, t + blind, device=device)
    tiling = plan_local(np.array([t, blind]), np.array([n, 0]), -1, -1).forward(unit.tile_m)[0]
    forward.attend(unit, *wide, tiling, d**-0.5, out, lse[:0], lse)
    assert (columns_behind(out) == MARK).all()
    lengths = [(t, n), (blind, 0)]
    forward_checks.hold_gate((out, lse), (q, k, v), lengths, (-1, -1), f"d {head_dims}")


def forward_hops_hold_the_gate(unit: Unit, head_dims: tuple[int, int], device: str) -> None:
    """Three hops, whose float32 O between them has the unit's head dim of V. V has d columns, as in
    a ring: zeros beyond d_v."""
    d, d_v = head_dims
    dtype, t, n = getattr(torch, unit.dtype), unit.tile_m + 37, 300
    torch.manual_seed(1)
    q, k = (torch.randn(rows, 2, d, device=device).to(dtype) for rows in (t, n))
    v = torch.randn(n, 2, d_v, device=device).to(dtype)
    plan = plan_local(np.array([t]), np.array([n]), -1, -1)
    whole = plan.forward(unit.tile_m)[0]
    out = torch.full((t, 2, d_v), torch.nan, device=device, dtype=dtype)
    lse = torch.full((2, t), torch.nan, device=device)
    running = forward.new_partial_out(unit, q, plan).fill_(torch.nan)
    assert running.shape[2] == unit.v_dim
    hops = forward_checks.split_into_hops(whole, ((0, 60), (60, 200), (200, n)))
    for hop, flags in zip(hops, (FIRST, 0, LAST), strict=True):
        hop.tiles["flags"] = flags
        forward.attend(unit, q, k, F.pad(v, (0, d - d_v)), hop, d**-0.5, out, running, lse)
        if not flags & LAST:
            assert forward.read_partial_out(d_v, running, whole).isfinite().all()
    forward_checks.hold_gate((out, lse), (q, k, v), [(t, n)], (-1, -1), f"d {head_dims}, hops")


def backward_keeps_to_its_columns(
    unit: Unit, head_dims: tuple[int, int], device: str, kind: torch.dtype, splits: bool
) -> None:
    """NaN beside q, k, v, out and dout is not read; columns beside dk and dv are not written.

    kind: dtype of dk and dv, float32 as in a ring. splits: several units add to a tile of keys; in
    16 bits they add elsewhere first.
    """
    lengths = [(700, unit.tile_n)] if splits else [(90, 200), (1, 3)]
    p = backward_checks.problem(2, unit, device, lengths, (2, 1), (-1, -1), head_dims=head_dims)
    q, k, v, out, dout = (beside(x, torch.nan) for x in (p.q, p.k, p.v, p.out, p.dout))
    dk, dv = (beside(torch.full_like(x, torch.nan, dtype=kind), MARK) for x in (p.k, p.v))
    run = BackwardPass(unit, dout, p.dlse, q, out, p.lse, p.plan, p.scale, False, k.shape[1])
    run.hop(k, v, p.plan.backward(unit.tile_n, unit.tile_m)[0], dk, dv)
    assert (columns_behind(dk) == MARK).all()
    assert (columns_behind(dv) == MARK).all()
    got = [run.dq(), *(x.to(p.k.dtype) for x in (dk, dv))]
    backward_checks.hold_gate(got, p, f"d {head_dims}, {kind}, splits {splits}")
