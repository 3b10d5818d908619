"""Checks of rows in which one key leads and many keys lie far below it, or below earlier hops.

Each check makes its own inputs on a device and asserts. Scores are exact in both dtypes, so
PyTorch in the inputs' dtype rounds P and the output alone, and the gate is tight:
max|x - ref| <= 2 max|x_pt - ref| + 1e-5, ref in float64. Where many P are equal, all have one
rounding error, which may happen to be 0 in PyTorch. For drawn rows max|x_pt - ref| therefore counts
as at least u max|ref|, u the unit roundoff: what the rounding of one output may cost.

Letters in shapes: t queries, n keys; h heads, hk KV heads; d head dim.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.build.units import Unit
from ringfa3.kernels import forward
from ringfa3.planning.tiling import plan_local
from tests.support import dense
from tests.support.forward_checks import empty_partial_out, largest, split_into_hops

WINDOWS = ((-1, -1), (-1, -1), (-1, 0), (700, 0), (300, 300))


@dataclass
class Rows:
    """Packed sequences whose score at (query, key) is the key's channel 0, in nats."""

    lengths: list[tuple[int, int]]  # queries and keys of each sequence
    window: tuple[int, int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None  # (h,) float32
    what: str

    def attention(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """out (t, h, d) and LSE (h, t) by PyTorch in `dtype`."""
        hidden = ~torch.from_numpy(dense.mask(*zip(*self.lengths, strict=True), *self.window))
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (self.k, self.v))
        s = torch.einsum("thd,nhd->htn", self.q.to(dtype), k)
        s = s.masked_fill(hidden.to(s.device), -torch.inf)
        if self.sink is not None:
            column = self.sink.to(dtype)[:, None, None].expand(*s.shape[:2], 1)
            s = torch.cat((s, column), -1)
        p = s.softmax(-1)[..., : len(v)]
        return torch.einsum("htn,nhd->thd", p, v), s.double().logsumexp(-1)

    def hold_gate(self, out: torch.Tensor, lse: torch.Tensor, drawn: bool = True) -> None:
        """Every head holds the gate of the module; LSE to 1e-4."""
        ref, ref_lse = self.attention(torch.float64)
        plain, _ = self.attention(self.q.dtype)
        for head in range(out.shape[1]):
            error = largest((out.double() - ref)[:, head])
            least = drawn * torch.finfo(out.dtype).eps / 2 * largest(ref[:, head])
            bound = 2 * max(largest((plain.double() - ref)[:, head]), least) + 1e-5
            what = f"{self.what}, head {head}"
            assert error <= bound, f"{what}: off by {error:.2e}, allowed {bound:.2e}"
        assert largest(lse.double() - ref_lse) < 1e-4, f"{self.what}: LSE"


def rows(
    rng: random.Random,
    dtype: torch.dtype,
    d: int,
    device: str,
    lengths: Sequence[tuple[int, int]],
    window: tuple[int, int] = (-1, -1),
    sinks: bool = True,
) -> Rows:
    """Draws depths, leaders, noise, heads and, for half of the draws with `sinks`, sinks.

    In each KV head one to three keys lead by 4 to 20 nats. Leaders have the value 0, other keys
    about 1, so the output is the weight of the keys below. The leader's score lies within 12 nats
    of 0. In a sequence's last key every row of the causal mask sees at least one key.
    """
    hk = rng.choice((1, 2))
    h = hk * rng.choice((1, 2))
    t, n = (sum(x) for x in zip(*lengths, strict=True))
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    k = torch.zeros(n, hk, d)
    v = 1 + 0.1 * torch.randn(n, hk, d, generator=generator)
    notes = []
    for head in range(hk):
        top, depth, noise = rng.uniform(-12, 12), rng.uniform(4, 20), rng.choice((0, 0, 0.05, 1))
        k[:, head, 0] = top - depth + noise * torch.randn(n, generator=generator)
        begin = 0
        for _, keys in lengths:
            for at in {rng.choice((0, keys - 1, rng.randrange(keys))) for _ in range(3)}:
                k[begin + at, head, 0], v[begin + at, head] = top, 0
            begin += keys
        notes.append(f"top {top:.3f}, depth {depth:.3f}, noise {noise}")
    q = torch.randn(t, h, d, generator=generator)
    q[..., 0] = 1
    k = k.to(dtype)
    sink = None
    if sinks and rng.random() < 0.5:
        sink = torch.tensor([rng.uniform(-15, 15) for _ in range(h)]).to(dtype).float().to(device)
    what = f"d {d}, {lengths}, window {window}, {h} heads, sink {sink}, {notes}"
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    return Rows(list(lengths), window, q, k, v, sink, what)


def one_launch_holds_the_gate(
    dtype: torch.dtype, d: int, case: int, device: str = "cuda", most: int = 4096
) -> None:
    """Packed sequences of up to `most` keys, masks, GQA and sinks."""
    rng = random.Random(1000 * d + case)
    keys = [rng.randint(1, most) for _ in range(rng.choice((1, 1, 2, 3)))]
    lengths = [(min(m, rng.randint(1, 40)), m) for m in keys]
    x = rows(rng, dtype, d, device, lengths, rng.choice(WINDOWS))
    cu = [dense.cumulative(n) for n in zip(*lengths, strict=True)]
    out, lse = flash_attn_varlen_func(
        x.q, x.k, x.v, *cu, softmax_scale=1.0, window_size=x.window, sink=x.sink, return_lse=True
    )
    x.hold_gate(out, lse)


def a_last_key_leads(dtype: torch.dtype, d: int, device: str = "cuda") -> None:
    """The last key scores -4.156, 1,024 or 4,096 others -13.836.

    The gate is strict in float16. In bfloat16 all equal P share a rounding of up to 2^-9.
    """
    for n in (1024, 4096):
        q, k, v = torch.zeros(1, 1, d), torch.zeros(n + 1, 1, d), torch.ones(n + 1, 1, d)
        q[..., 0] = 1
        k[..., 0], k[n, 0, 0], v[n] = -13.836, -4.156, 0
        q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
        x = Rows([(1, n + 1)], (-1, -1), q, k, v, None, f"d {d}, {n} keys")
        out, lse = flash_attn_varlen_func(
            q, k, v, [0, 1], [0, n + 1], softmax_scale=1.0, return_lse=True
        )
        x.hold_gate(out, lse, drawn=dtype != torch.float16)


def hops_hold_the_gate(unit: Unit, case: int, device: str = "cuda", most: int = 4096) -> None:
    """A sequence in two to four hops, in any order."""
    rng = random.Random(case)
    n, t, d = rng.randint(64, most), rng.randint(1, 40), unit.head_dim
    x = rows(rng, getattr(torch, unit.dtype), d, device, [(t, n)], sinks=False)
    x.v = x.v[..., : unit.v_dim]
    cuts = sorted(rng.sample(range(1, n), rng.randint(1, 3)))
    pieces = list(zip([0, *cuts], [*cuts, n], strict=True))
    rng.shuffle(pieces)
    x.what += f", hops {pieces}"
    x.hold_gate(*in_hops(unit, x, pieces))


def in_hops(
    unit: Unit, x: Rows, pieces: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of one sequence, of hops over keys [a, b) of `pieces`."""
    (t, n), heads = x.lengths[0], x.q.shape[1]
    plan = plan_local(np.array([t]), np.array([n]), *x.window)
    out = x.q.new_full((*x.q.shape[:2], x.v.shape[-1]), torch.nan)
    lse = torch.full((heads, t), torch.nan, device=x.q.device)
    running = empty_partial_out(unit, plan, heads, str(x.q.device))
    for hop in split_into_hops(plan.forward(unit.tile_m)[0], pieces):
        forward.attend(unit, x.q, x.k, x.v, hop, 1.0, out, running, lse)
    return out, lse


def later_keys_keep_their_weight(unit: Unit, device: str = "cuda") -> None:
    """300 keys follow millions of equal scores with values 0: float32 O, relative to itself, to the
    rounding of P in the dtype and 2^-16 of sums in float32."""
    t, n, d, dtype = 100, 300, unit.head_dim, getattr(torch, unit.dtype)
    plan = plan_local(np.array([t]), np.array([n]), -1, -1)
    hop = plan.forward(unit.tile_m)[0]
    hop.tiles["flags"] = 0
    for before in (1.37 * 2**10, 1.4 * 2**20, 1.37 * 2**23):
        q, k = (torch.zeros(m, 1, d, dtype=dtype, device=device) for m in (t, n))
        v = torch.rand(n, 1, unit.v_dim, device=device).to(dtype)
        running = empty_partial_out(unit, plan, 1, device).zero_()
        lse = torch.full((1, t), math.log(before), device=device)
        forward.attend(unit, q, k, v, hop, 1.0, q.new_empty(t, 1, unit.v_dim), running, lse)
        got = running.view(-1)[forward.partial_out_index(hop, 1, unit.v_dim).to(device)].double()
        ref = v.double().sum(0) / (before + n)
        error = largest(got / ref - 1)
        bound = torch.finfo(dtype).eps / 2 + 2**-16
        assert error <= bound, f"after {before:.3g}: off by {error:.2e}, allowed {bound:.2e}"
        assert largest(lse - math.log(before + n)) < 1e-5
