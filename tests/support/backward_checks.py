"""Checks of the backward kernels, on a GPU or in emulation: against float64, and bit by bit.

Each check takes a unit and a device, makes its own inputs and asserts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from ringfa3.build.units import Unit
from ringfa3.kernels.backward import BackwardPass
from ringfa3.planning.context_plan import plan_context
from ringfa3.planning.tiling import Plan, plan_local
from ringfa3.quantisation.dequantised import FACTOR_COLUMNS
from ringfa3.quantisation.rotation import rotate_back
from tests.support import dense
from tests.support.launches import leave_sms
from tests.support.strategies import key_tokens

WINDOWS = ((-1, -1), (-1, 0), (100, 0), (64, 64), (0, 0), (300, -1))
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 300)

Gradients = list[torch.Tensor]  # dq, dk, dv


@dataclass
class Problem:
    """Packed sequences, their forward's results, the gradients dout and dlse, and references."""

    lengths: list[tuple[int, int]]  # queries and keys of each sequence
    window: tuple[int, int]
    q: torch.Tensor
    k: torch.Tensor  # as `unit` takes it: of dequantised operands with factors
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None  # None: zeros that the kernel does not read
    out: torch.Tensor  # computed in float64, in the dtype of q
    lse: torch.Tensor
    reference: Gradients  # of PyTorch in float64
    plain: Gradients  # of PyTorch in the dtype of q
    mask: torch.Tensor  # (t, n) bool, True where a query attends to a key

    @cached_property
    def plan(self) -> Plan:
        return plan_local(
            *(np.array(n, np.int64) for n in zip(*self.lengths, strict=True)), *self.window
        )

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def problem(
    seed: int,
    unit: Unit,
    device: str,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    window: tuple[int, int],
    with_dlse: bool = True,
    equal_scores: float | None = None,
    head_dims: tuple[int, int] | None = None,
    keys_of_factor: int | None = None,
) -> Problem:
    """A random problem; `heads` is (h, hk). For odd seeds q, k and v are views of one tensor.

    equal_scores: of all pairs, in nats; None: scores are N(0, 1). head_dims: (d, d_v), None: those
    of `unit`. keys_of_factor: keys of a sequence that share a factor of dequantised K; None: those
    of a tile of `unit`.
    """
    torch.manual_seed(seed)
    dtype = getattr(torch, unit.dtype)
    d, d_v = head_dims or (unit.head_dim, unit.v_dim)
    t, n = (sum(x) for x in zip(*lengths, strict=True))
    h, hk = heads
    if t == n and seed % 2:
        q, k, v = torch.randn(t, h + 2 * hk, d, device=device).to(dtype).split((h, hk, hk), dim=1)
    else:
        q, k, v = (
            torch.randn(rows, count, d, device=device).to(dtype)
            for rows, count in ((t, h), (n, hk), (n, hk))
        )
    v = v[..., :d_v]
    if equal_scores is not None:
        # 8 bits of mantissa, also in float16: then tensor cores, which truncate sums, are exact.
        element = torch.tensor((equal_scores * d**-0.5) ** 0.5).bfloat16()
        q.fill_(element), k.fill_(element)
    given_k = k
    if unit.precision == "dequantised":
        given_k, k = _with_factors(k, lengths, keys_of_factor or unit.tile_n)
    dout = torch.randn(t, h, d_v, device=device).to(dtype)
    dlse = torch.randn(h, t, device=device) * with_dlse
    mask = torch.from_numpy(dense.mask(*zip(*lengths, strict=True), *window)).to(device)
    results = []
    for kind in (torch.float64, dtype):
        leaves = [x.detach().to(kind, copy=True).requires_grad_() for x in (q, k, v)]
        outputs = dense.attention(*leaves, mask)
        gradients = dense.gradients(leaves, outputs, dout.to(kind), dlse.to(kind))
        results.append((outputs, gradients))
    (out, lse), reference = results[0]
    plain = results[1][1]
    if unit.precision == "dequantised":  # Q and K count as rotated: the pass rotates dQ and dK back
        for grads in (reference, plain):
            grads[:2] = (rotate_back(x if x.itemsize > 2 else x.float()) for x in grads[:2])
        # The kernel rounds P over the factor: so P of 1 is not exact, as it is in `plain`.
        rounding = 2.0**-9 * reference[2].abs()
        plain[2] = reference[2] + rounding + (plain[2] - reference[2]).abs()
    return Problem(
        list(lengths), window, q, given_k, v, dout, dlse if with_dlse else None,
        out.detach().to(dtype), lse.detach().float(), reference, plain, mask,
    )  # fmt: skip


def _with_factors(
    k: torch.Tensor, lengths: Sequence[tuple[int, int]], shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K (n, hk, d) times factors, with the factor after its columns; and K that the kernel computes
    from it, in float64. A head's factor holds for `shared` keys of a sequence."""
    rows = torch.tensor(
        [min(shared, n - i) for _, n in lengths for i in range(0, n, shared)], device=k.device
    )
    factor = torch.empty(len(rows), k.shape[1], device=k.device).uniform_(0.6, 90)
    factor = factor.to(k.dtype).repeat_interleave(rows, 0).unsqueeze(-1)  # (n, hk, 1)
    times = (k.float() * factor.float()).to(k.dtype)
    columns = factor.expand(-1, -1, FACTOR_COLUMNS)
    return torch.cat((times, columns), -1), times.double() / factor.double()


def differentiate(
    unit: Unit, p: Problem, deterministic: bool = False, free_sms: int = 0
) -> Gradients:
    """[dq, dk, dv] of the kernels; all memory holds NaN before. `free_sms` as for `leave_sms`."""
    tiling = p.plan.backward(unit.tile_n, unit.tile_m, deterministic)[0]
    dk, dv = (
        torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in (p.k, p.v)
    )
    with leave_sms(free_sms), _new_memory_holds_nan():
        rows = p.dout, p.dlse, p.q, p.out, p.lse
        run = BackwardPass(unit, *rows, p.plan, p.scale, deterministic, p.k.shape[1])
        run.hop(p.k, p.v, tiling, dk, dv)
        return [run.dq(), dk[..., : p.q.shape[2]], dv]


@contextmanager
def _new_memory_holds_nan() -> Iterator[None]:
    """`Tensor.new_empty` fills what it makes: kernels must not rely on zeros in their workspace."""
    new_empty = torch.Tensor.new_empty

    def filled(*of: Any, **options: Any) -> torch.Tensor:
        return new_empty(*of, **options).fill_(torch.nan)

    with patch.object(torch.Tensor, "new_empty", filled):
        yield


def hold_gate(got: Gradients, p: Problem, what: str) -> None:
    """max|x - ref| <= 2 max|x_pt - ref| + 1e-5 for dq, dk, dv; masked rows have gradient 0.

    ref is computed in float64, x_pt by PyTorch in the dtype of q.
    """
    for name, x, ref, pt in zip(("dq", "dk", "dv"), got, p.reference, p.plain, strict=True):
        if not x.numel():
            continue
        error = (x.double() - ref).abs().max().item()
        bound = 2 * (pt.double() - ref).abs().max().item() + 1e-5
        assert error <= bound, f"{what}: {name} is off by {error:.2e}, allowed {bound:.2e}"
    no_keys, no_queries = ~p.mask.any(1), ~p.mask.any(0)
    masked = (no_keys, no_queries, no_queries)
    for name, x, rows in zip(("dq", "dk", "dv"), got, masked, strict=True):
        assert (x[rows] == 0).all(), f"{what}: {name} of a masked row is not 0"


def random_problem(
    case: int,
    unit: Unit,
    device: str,
    longest: int = 0,
    head_dims: tuple[int, int] | None = None,
) -> Problem | None:
    """A problem for each `case`: lengths from LENGTHS and random ones up to `longest`.

    head_dims as for `problem`. None if the case has no query or no key.
    """
    rng = random.Random(1000 * unit.head_dim + case)

    def length() -> int:
        return rng.choice((*LENGTHS, rng.randint(1, longest)) if longest else LENGTHS)

    lengths = [
        (n, n if case % 2 else length()) for n in (length() for _ in range(rng.randint(1, 4)))
    ]
    if not all(map(sum, zip(*lengths, strict=True))):
        return None
    hk = rng.choice((1, 2))
    heads = (hk * rng.choice((1, 2, 4)), hk)
    window = rng.choice(WINDOWS)
    return problem(case, unit, device, lengths, heads, window, case % 3 > 0, head_dims=head_dims)


def large_lse_is_exact(unit: Unit, device: str) -> None:
    """Equal scores of 16,000 nats: dv is off by at most 1% in the norm of each sequence.

    P is 1 / keys, which bf16 rounds by 0.4%. LSE with 16 instead of 24 bits is 2% off or more.
    """
    keys = [2, 5, 17, 40, 57, 90, 131]
    p = problem(0, unit, device, [(20, n) for n in keys], (1, 1), (-1, -1), equal_scores=16000.0)
    dv = differentiate(unit, p)[2].double()
    for n, x, ref in zip(keys, dv.split(keys), p.reference[2].split(keys), strict=True):
        error = ((x - ref).norm() / ref.norm()).item()
        assert error <= 0.01, f"{n} keys: dv is off by {error:.2%}"


def nan_and_inf_stay_in_their_document(unit: Unit, device: str) -> None:
    """NaN and inf in a document do not reach others, which share its tiles: within 2e-2."""
    lengths = [40, 7, 128, 30, 1, 90]
    clean = problem(0, unit, device, [(n, n) for n in lengths], (2, 1), (-1, 0))
    expected = differentiate(unit, clean)
    cu = dense.cumulative(lengths)
    for bad in (1, 3):
        here = slice(cu[bad], cu[bad + 1])
        clean.q[here], clean.k[here] = torch.nan, torch.inf
        clean.v[here], clean.dout[here] = torch.nan, torch.inf
        clean.out[here], clean.dlse[:, here], clean.lse[:, here] = torch.nan, torch.inf, torch.nan
    got = differentiate(unit, clean)
    for i in (0, 2, 4, 5):
        here = slice(cu[i], cu[i + 1])
        for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
            assert torch.isfinite(y[here]).all()
            assert (x[here] - y[here]).abs().max() < 2e-2, f"{name} of document {i}"


def hops_hold_the_gate(
    unit: Unit, device: str, deterministic: bool, head_dims: tuple[int, int] | None = None
) -> None:
    """Three ranks of a ring, run one after another on one device; head_dims as for `problem`.

    V has columns of zeros up to the head dim of K, dV up to `unit.v_dim`. dQ is summed
    over all hops. Each hop stores dK and dV in buffers of NaN, from the first to the last key that
    the rank sees. The local keys' first KV head runs first, the second last.
    """
    lengths, world, heads = [300, 1, 140, 64], 3, (4, 2)
    p = problem(
        5, unit, device, [(n, n) for n in lengths], heads, (-1, 0), head_dims=head_dims,
        keys_of_factor=max(lengths),  # ranks cut sequences into tiles in their own ways
    )  # fmt: skip
    (d, d_v), dims = (p.q.shape[2], p.v.shape[2]), p.k.shape[1:]
    values = F.pad(p.v, (0, d - d_v))
    plans = [plan_context(dense.cumulative(lengths), (r, world)) for r in range(world)]
    here = [plan.token_index.to(device) for plan in plans]
    runs = [
        BackwardPass(
            unit, p.dout[at], p.dlse[:, at], p.q[at], p.out[at], p.lse[:, at], plan.hops, p.scale,
            deterministic, 2, 1,
        )
        for plan, at in zip(plans, here, strict=True)
    ]  # fmt: skip
    gradients = torch.zeros(2, *p.k.shape, device=device)
    one, other, both = slice(0, 1), slice(1, 2), slice(0, 2)
    for hop, kv in ((0, one), *((t, both) for t in range(1, world)), (0, other)):
        for rank, plan in enumerate(plans):
            keys = torch.from_numpy(key_tokens(plans, rank, hop)).to(device)
            owner = (rank - hop) % world
            tiling = plan.hops.backward(unit.tile_n, unit.tile_m, deterministic)[hop]
            begin, end = plan.kv_exchange.visible[owner, hop] if hop else (0, len(keys))
            stored = torch.full((2, end, *dims), torch.nan, device=device)
            k, v, dk, dv = (x[:, kv] for x in (p.k[keys], values[keys], *stored))
            runs[rank].hop(k, v, tiling, dk, dv, 2 * kv.start, 2 * k.shape[1])
            gradients[:, keys[begin:end], kv] += stored[:, begin:, kv]
    dq = torch.empty_like(p.q)
    for run, at in zip(runs, here, strict=True):
        dq[at] = run.dq()
    dk, dv = gradients.to(dq.dtype)
    assert (dv[..., d_v : min(d, unit.v_dim)] == 0).all()
    hold_gate([dq, dk[..., :d], dv[..., :d_v]], p, f"{world} ranks")


def same_bits(unit: Unit, device: str, repeats: int, reseed: Callable[[int], object]) -> None:
    """Deterministic gradients have the same bits in each run. `reseed(n)` is called before run n.

    Up to eight tiles add to a row of dQ; or two units add to a key of dK and dV, on any GPU with
    two CTAs.
    """
    for lengths, heads in (([(200, 900), (65, 200)], (2, 1)), ([(200, unit.tile_n)], (4, 1))):
        p = problem(7, unit, device, lengths, heads, (-1, 0))
        first = None
        for n in range(repeats):
            reseed(n)
            got = differentiate(unit, p, deterministic=True)
            first = first or got
            for name, x, y in zip(("dq", "dk", "dv"), got, first, strict=True):
                assert torch.equal(x, y), f"{name} of run {n} differs"
        hold_gate(got, p, "deterministic")
