"""Checks of the forward kernels with 8-bit operands, on a GPU or in emulation.

The reference is `quantised_reference.attend` on the same operands: it rounds P where the kernel
does. Each check takes a unit and a device, makes its own inputs and asserts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ringfa3.bench.attention.quantised import e4m3_rows
from ringfa3.build.units import IN_KERNEL_TRANSPOSE, Unit
from ringfa3.kernels import quantised, quantised_reference
from ringfa3.kernels.quantise import TiledKV
from ringfa3.kernels.reference import TILE_M
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.planning.tiling import Plan, plan_local
from ringfa3.quantisation.channels import KVCentres
from ringfa3.quantisation.formats import FORMATS, Formats
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.operands import QuantisedKV, QuantisedQ, quantise
from tests.support.forward_checks import (
    LENGTHS,
    WINDOWS,
    empty_partial_out,
    inputs,
    split_into_hops,
)
from tests.support.quantise_checks import value_order

Operands = tuple[QuantisedQ, QuantisedKV, TiledKV]


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """(t, h) whose memory is (h, t), as the kernels lay it out."""
    return x.t().contiguous().t()


def operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, formats: Formats
) -> Operands:
    """8-bit operands by their definition, K and V in rows and in the kernel's layout."""
    quantised_q, kv = quantise(q, k, v, plan.keys, formats)
    quantised_q = QuantisedQ(
        quantised_q.values, heads_first(quantised_q.scale), heads_first(quantised_q.k_offset)
    )
    centres = KVCentres(*(x.contiguous() for x in kv.centres))
    tiles = KeyTiles(plan.keys)
    rows = torch.from_numpy(tiles.table["row0"].astype(np.int64)).to(k.device)
    scale = kv.k_scale[rows].t().contiguous()
    values = kv.v
    if formats.v is not None:
        order = value_order().to(k.device)
        count = torch.from_numpy(tiles.table["rows"].astype(np.int64)).to(k.device)
        at = (rows[:, None] + order).clamp(max=len(k) - 1)
        values = kv.v.view(torch.uint8)[at]  # (tiles, 128, hk, d)
        values = values.masked_fill((order >= count[:, None])[..., None, None], 0)
        values = values.permute(0, 2, 3, 1).contiguous().view(kv.v.dtype)
    tiled = TiledKV(kv.k.contiguous(), scale, values, centres, tiles)
    return quantised_q, kv, tiled


def attend(
    unit: Unit,
    given: Operands,
    tilings: Sequence[Tiling],
    out_like: torch.Tensor,
    plan: Plan,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the kernel over the hops of `tilings`, which are of `plan`."""
    q, _, kv = given
    (t, h, d), device = q.values.shape, q.values.device
    out = torch.full_like(out_like, torch.nan)
    lse = torch.full((h, t), torch.nan, device=device)
    running = empty_partial_out(unit, plan, h, str(device))
    for tiling in tilings:
        quantised.attend(unit, q, kv, tiling, scale or d**-0.5, out, running, lse)
    return out, lse


def expected(
    given: Operands,
    formats: Formats,
    plan: Plan,
    dtype: torch.dtype,
    scale: float | None = None,
    tile_m: int = TILE_M,
    block: int = KEY_TILE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the reference in one hop: tiles of `tile_m` rows, blocks of `block` keys."""
    q, kv, _ = given
    out = torch.full(q.values.shape, torch.nan, dtype=dtype, device=q.values.device)
    lse = torch.full(q.scale.t().shape, torch.nan, device=out.device)
    scale = scale or out.shape[-1] ** -0.5
    tiling = plan.forward(tile_m)[0]
    results = out, out.float(), lse
    quantised_reference.attend(q, kv, tiling, scale, *results, p_format=formats.v, block=block)
    return out, lse


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def hold(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    most: tuple[float, ...],
    what: str,
) -> None:
    """out within most[0] of the reference's rms, and most[1] of its largest magnitude; LSE within
    most[2] nats; rows that see nothing have 0 and -inf."""
    (out, lse), (ref, ref_lse) = got, want
    seen = ref_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen), f"{what}: other rows see something"
    assert not out.transpose(0, 1)[~seen].any(), f"{what}: rows that see nothing are not 0"
    error = out.float() - ref.float()
    if not seen.any():
        return
    relative = rms(error) / rms(ref.float())
    assert relative <= most[0], f"{what}: rms {relative:.2e}"
    largest = error.abs().max().item() / ref.abs().max().item()
    assert largest <= most[1], f"{what}: off by {largest:.2e}"
    off = (lse - ref_lse)[seen].abs().max().item()
    assert off <= most[2], f"{what}: LSE off by {off:.2e}"


# Of `hold`, by precision. fp8: where float32 sums in another order move a P to the other side of a
# tie, O moves by up to 1/16 of it. int8: the kernel's shift need not be a row's maximum, so its P
# are rounded to the inputs' dtype elsewhere.
TOLERANCE = {"fp8": (2e-3, 4e-2, 1e-4), "int8": (6e-3, 4e-2, 1e-4)}
# On a GPU. Tensor cores cut sums of e4m3 products to 13 fraction bits: scores of 100 nats are off
# by .02. Sums of integers are exact.
GPU_TOLERANCE = {"fp8": (2e-2, 1e-1, 4e-2), "int8": (6e-3, 4e-2, 2e-4)}


def tolerance(unit: Unit, device: str) -> tuple[float, float, float]:
    return (TOLERANCE if device == "cpu" else GPU_TOLERANCE)[unit.precision]


def random_sequences(unit: Unit, device: str, case: int) -> None:
    """Packed documents with awkward lengths, windows, GQA and channel means.

    A variant that transposes V gets it in row order.
    """
    rng = random.Random(1000 * unit.head_dim + case)
    torch.manual_seed(case)
    dtype, formats = getattr(torch, unit.dtype), FORMATS[unit.precision]
    lengths = [
        (n, n if case % 2 else rng.choice(LENGTHS))
        for n in (rng.choice(LENGTHS) for _ in range(rng.randint(1, 4)))
    ]
    if not all(map(sum, zip(*lengths, strict=True))):
        return
    window = rng.choice(WINDOWS)
    q, k, v = inputs(rng, dtype, unit.head_dim, lengths, device)
    q, k, v = q * rng.choice((1, 4)), k + 1, v + 2
    plan = plan_local(*(np.array(n) for n in zip(*lengths, strict=True)), *window)
    given = operands(q, k, v, plan, formats)
    if unit.variant == IN_KERNEL_TRANSPOSE:
        given = (*given[:2], replace(given[2], v=e4m3_rows(v, given[2].centres)))
    tiling = plan.forward(unit.tile_m)
    got = attend(unit, given, tiling, q, plan)
    what = f"case {case}: {lengths}, window {window}, heads {q.shape[1]}:{k.shape[1]}"
    hold(
        got, expected(given, formats, plan, dtype, block=unit.tile_n), tolerance(unit, device), what
    )


def rising_scores(unit: Unit, device: str) -> None:
    """Every block visited has scores far above, or below, those of the block before.

    `tolerance`. On a GPU with e4m3 each of d / 32 products cuts a score so far by up to the 2^-13th
    part: all of them the largest score by (d / 32 + 1) / 2 times that part. LSE may be off by so
    many nats, O by this part in its rms, and by four times that in an element.
    """
    lengths = [(150, 700), (70, 500)]
    dtype, d, formats = getattr(torch, unit.dtype), unit.head_dim, FORMATS[unit.precision]
    t, n = (sum(x) for x in zip(*lengths, strict=True))
    torch.manual_seed(0)
    place = torch.cat([torch.arange(m) for _, m in lengths]).to(device)
    noise = [torch.randn(m, 2, d, device=device) for m in (t, n, n)]
    for nats in (-0.05, -0.5, 0.05):  # a key; the last ones are visited first
        fp8 = (unit.precision, device) == ("fp8", "cuda")
        cut = 700 * abs(nats) * (d / 32 + 1) / 2 * 2**-13 if fp8 else 0
        least = (cut, 4 * cut, cut)
        most = tuple(map(max, tolerance(unit, device), least))
        q, k, v = (x.clone() for x in noise)
        q[..., 0] = 8
        k[..., 0] = (nats * place / (8 * d**-0.5))[:, None]
        q, k, v = (x.to(dtype) for x in (q, k, v))
        for window in ((-1, -1), (-1, 0), (100, 0)):
            plan = plan_local(*(np.array(x) for x in zip(*lengths, strict=True)), *window)
            given = operands(q, k, v, plan, formats)
            tiling = plan.forward(unit.tile_m)
            got = attend(unit, given, tiling, q, plan)
            what = f"{nats} nats a key, window {window}"
            hold(got, expected(given, formats, plan, dtype, block=unit.tile_n), most, what)


def merged_hops(unit: Unit, device: str) -> None:
    """Three hops, whose scores are offset by up to 40 nats: rms error against float64 attention of
    the dequantised operands <= 1.1 of the reference's in one hop, or of the dtype's rounding; LSE
    as `tolerance`. Rows see no key at some hops, or at any."""
    t, n, heads, d = 300, 480, 2, unit.head_dim
    dtype, formats = getattr(torch, unit.dtype), FORMATS[unit.precision]
    pieces = ((0, 128), (128, 384), (384, n))
    torch.manual_seed(0)
    noise = [torch.randn(m, heads, d, device=device) for m in (t, n, n)]
    for offsets in ((0, 0, 0), (0, -8, 30), (40, 0, -40)):
        q, k, v = (x.clone() for x in noise)
        q[..., 0] = 8
        nats = torch.cat(
            [torch.full((b - a,), float(x)) for x, (a, b) in zip(offsets, pieces, strict=True)]
        ).to(device)
        k[..., 0] = (nats / (8 * d**-0.5))[:, None]
        q, k, v = (x.to(dtype) for x in (q, k, v + 3))
        for right, order in ((-1, 1), (-1, -1), (0, 1), (0, -1), (-200, 1)):
            plan = plan_local(np.array([t]), np.array([n]), -1, right)
            given = operands(q, k, v, plan, formats)
            whole = plan.forward(unit.tile_m)[0]
            hops = split_into_hops(whole, pieces[::order])
            out, lse = attend(unit, given, hops, q, plan)
            once, once_lse = expected(given, formats, plan, dtype, block=unit.tile_n)
            ref = _dequantised_attention(given, n - t, right)
            what = f"{offsets}, window {right}, order {order}"
            seen = once_lse > -torch.inf
            assert torch.equal(lse > -torch.inf, seen), what
            if seen.any():
                assert (lse - once_lse)[seen].abs().max() <= tolerance(unit, device)[2], what
            assert not out.transpose(0, 1)[~seen].any(), what
            rounding = rms(ref.to(dtype).double() - ref)
            least = max(rms(once.double() - ref), rounding)
            error = rms(out.double() - ref)
            assert error <= 1.1 * least, f"{what}: {error / least:.2f}"


def _dequantised_attention(given: Operands, shift: int, right: int) -> torch.Tensor:
    """O (t, h, d) in float64 of a sequence whose diagonal is `shift` keys to the right."""
    q, kv, _ = given
    (t, h, d), (n, hk, _) = q.values.shape, kv.k.shape
    queries = q.values.double() * q.scale.double().unsqueeze(-1)
    keys = kv.k.double() * kv.k_scale.double().unsqueeze(-1)
    values = kv.v.double() * kv.centres.v_scale.double() + kv.centres.v_mean.double()
    keys, values = (x.repeat_interleave(h // hk, 1) for x in (keys, values))
    s = torch.einsum("thd,nhd->htn", queries, keys) * d**-0.5
    if right != -1:
        at = torch.arange(n, device=s.device) - torch.arange(t, device=s.device)[:, None]
        s = s.masked_fill(at - shift > right, -torch.inf)
    p = s.softmax(-1).nan_to_num(0)
    return torch.einsum("htn,nhd->thd", p, values)


def what_is_not_finite_stays_in_its_document(unit: Unit, device: str) -> None:
    """NaN in Q, an infinity in K and NaN in V: the same elements of O are NaN as with the reference
    over tiles of the kernel. The rest of the document and other documents keep their bits. Causal,
    and in a window. NaN in V lies in the last 64 keys of a tile: with head dim 256 int8 the kernel
    visits half a tile."""
    dtype, d, formats = getattr(torch, unit.dtype), unit.head_dim, FORMATS[unit.precision]
    lengths = [40, 200, 7, 128, 300]
    torch.manual_seed(0)
    clean = [torch.randn(sum(lengths), 2, d, device=device).to(dtype) for _ in range(3)]
    spoilt = [x.clone() for x in clean]
    spoilt[0][90, 0, 3], spoilt[1][53, 0, 5], spoilt[2][140, 1, 7] = torch.nan, torch.inf, torch.nan
    for x, y in zip(clean, spoilt, strict=True):  # so that means and scales stay
        x[~y.isfinite()] = 0
    for left, right in ((-1, 0), (64, 0)):
        plan = plan_local(np.array(lengths), np.array(lengths), left, right)
        tiling = plan.forward(unit.tile_m)
        outs = []
        for x in (clean, spoilt):
            given = operands(*x, plan, formats)
            outs.append(attend(unit, given, tiling, x[0], plan))
        out, lse = outs[1]
        ref, ref_lse = expected(given, formats, plan, dtype, tile_m=unit.tile_m, block=unit.tile_n)
        lost = out.isnan()
        assert lost.any()
        assert torch.equal(lost, ref.isnan()), (left, right)
        assert torch.equal(lse.isnan(), ref_lse.isnan()), (left, right)
        same = ~lost.any(-1)
        assert torch.equal(out[same], outs[0][0][same])
        assert not lost[:40].any()
        assert not lost[240:].any()


def sums_of_p_overflow(unit: Unit, device: str) -> None:
    """The first keys score 85 nats above the last ones, which are visited first: P of one key is
    finite in float32 and a sum of them is not. `tolerance`, but LSE of e4m3 on a GPU within .15:
    all products of a score are equal, and so are the errors of their sums."""
    dtype, d, formats = getattr(torch, unit.dtype), unit.head_dim, FORMATS[unit.precision]
    torch.manual_seed(0)
    q, k, v = (torch.randn(256, 2, d, device=device) for _ in range(3))
    q[..., 0], k[..., 0] = 8, 0
    k[:128, :, 0] = 85 / (8 * d**-0.5)
    q[..., 1:], k[..., 1:] = 0, 0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    plan = plan_local(np.array([256]), np.array([256]), -1, -1)
    given = operands(q, k, v, plan, formats)
    got = attend(unit, given, plan.forward(unit.tile_m), q, plan)
    most = tolerance(unit, device)
    if (device, unit.precision) == ("cuda", "fp8"):
        most = *most[:2], 0.15
    hold(got, expected(given, formats, plan, dtype, block=unit.tile_n), most, "a step of 85 nats")


def tiny_products_are_masked(unit: Unit, device: str) -> None:
    """Q and K of 0 and a scale of 2^-40: all scores are 0, and none of a masked key is NaN."""
    dtype, d, formats = getattr(torch, unit.dtype), unit.head_dim, FORMATS[unit.precision]
    torch.manual_seed(0)
    v = torch.randn(200, 2, d, device=device).to(dtype)
    q = torch.zeros_like(v)
    plan = plan_local(np.array([200]), np.array([200]), -1, 0)
    given = operands(q, q, v, plan, formats)
    got = attend(unit, given, plan.forward(unit.tile_m), q, plan, scale=2.0**-40)
    ref = expected(given, formats, plan, dtype, scale=2.0**-40, block=unit.tile_n)
    hold(got, ref, tolerance(unit, device), "a scale of 2^-40")


def powers_of_two_of_channels_change_no_bit(unit: Unit, device: str) -> None:
    """E4M3 V times a power of two for each channel: O times the same, equal, in one or two hops.

    From 2^-109 to 2^115, in float16 from 2^-4 to 2^13.
    """
    dtype, formats, d = getattr(torch, unit.dtype), FORMATS[unit.precision], unit.head_dim
    torch.manual_seed(0)
    low, high = (-4, 13) if dtype == torch.float16 else (-109, 115)
    by = torch.ldexp(torch.ones(2, d), torch.randint(low, high + 1, (2, d))).to(device)
    q, k, v = (torch.randn(256, 2, d, device=device).to(dtype) for _ in range(3))
    v = (v * 4).round().clamp(-7, 7) / 4
    plan = plan_local(np.array([256]), np.array([256]), -1, -1)
    whole = plan.forward(unit.tile_m)
    for tilings in (whole, split_into_hops(whole[0], ((0, 128), (128, 256)))):
        got, once = (
            attend(unit, operands(q, k, x, plan, formats), tilings, q, plan)[0]
            for x in ((v.double() * by).to(dtype), v)
        )
        normal = once.abs() >= 2.0**-8
        assert torch.equal(got[normal], (once.double() * by).to(dtype)[normal])
        assert (got.double() / by - once.double()).abs()[~normal].max() <= 2.0**-19
        assert normal.float().mean() > 0.5


def values_at_the_ends_of_float16_give_finite_outputs(unit: Unit, device: str) -> None:
    """E4M3 V of -65504, and 65504 in the last keys: `tolerance` of the reference, no infinity; in
    one hop and in two. Rows whose Q has a NaN stay NaN."""
    dtype, formats, d = getattr(torch, unit.dtype), FORMATS[unit.precision], unit.head_dim
    torch.manual_seed(0)
    q, k = (torch.randn(256, 2, d, device=device).to(dtype) for _ in range(2))
    q[7] = torch.nan
    for last in (1, 3, 8):
        v = torch.full_like(q, -65504)
        v[-last:] = 65504
        plan = plan_local(np.array([256]), np.array([256]), -1, 0)
        given = operands(q, k, v, plan, formats)
        whole = plan.forward(unit.tile_m)
        ref, ref_lse = expected(given, formats, plan, dtype, block=unit.tile_n)
        for tilings in (whole, split_into_hops(whole[0], ((0, 128), (128, 256)))):
            out, lse = attend(unit, given, tilings, q, plan)
            assert torch.equal(out.isnan(), ref.isnan())
            assert out[7].isnan().all()
            assert not out.isinf().any(), f"{last} last keys"
            rows = [*range(7), *range(8, 256)]
            got, want = ((x[rows], y[:, rows]) for x, y in ((out, lse), (ref, ref_lse)))
            hold(got, want, tolerance(unit, device), f"{last} last keys")


CHECKS = (
    rising_scores,
    merged_hops,
    what_is_not_finite_stays_in_its_document,
    sums_of_p_overflow,
    tiny_products_are_masked,
)
