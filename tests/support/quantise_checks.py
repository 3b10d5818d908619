"""Checks of the quantisation kernels, on a GPU or in emulation: against `ringfa3.quantisation`.

Each check takes a unit and a device, makes its own inputs and asserts. Scales are equal within 2
ulp: sums of the rotation are equal bit by bit. 8-bit numbers are equal but for those whose float32
argument lies within 1e-6 of it from a tie: the kernels multiply where the definition divides. There
the other neighbour is allowed, in at most 1 of 10,000 numbers of Q and K and 1 of 1,000 of V, whose
16-bit numbers, mean and maximum have ties as exact quotients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from ringfa3.build.units import Unit
from ringfa3.kernels import quantise
from ringfa3.kernels.quantise import TiledKV
from ringfa3.planning.sharding import Segments
from ringfa3.quantisation import operands
from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
from ringfa3.quantisation.dequantised import DequantisedInputs
from ringfa3.quantisation.formats import FORMATS
from ringfa3.quantisation.key_tiles import KEY_TILE, KeyTiles
from ringfa3.quantisation.rotation import rotate

LENGTHS = (1, 127, 128, 129, 300)
GAP = 5  # rows of no segment, between two segments
HEADS, KV_HEADS = 6, 2
NAN, INF = torch.nan, torch.inf


def segments(lengths: tuple[int, ...] = LENGTHS) -> Segments:
    """Segments with a gap between two neighbours."""
    length = np.array(lengths, np.int64)
    row = np.cumsum(length + GAP) - length - GAP
    return Segments(row, length, np.arange(len(length)), np.zeros(len(length), np.int64))


def tensors(
    unit: Unit, device: str, rows: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (rows, 6, d) and k, v (rows, 2, d) with channel means and an outlier channel.

    For odd seeds they are views of one tensor.
    """
    torch.manual_seed(seed)
    d, dtype = unit.head_dim, getattr(torch, unit.dtype)
    counts = (HEADS, KV_HEADS, KV_HEADS)
    x = torch.randn(rows, sum(counts), d) + torch.randn(1, sum(counts), d)
    x[..., 3] *= 30
    q, k, v = x.to(dtype).to(device).split(counts, dim=1)
    return (q, k, v) if seed % 2 else (q.contiguous(), k.contiguous(), v.contiguous())


@contextmanager
def _new_memory_holds_nan() -> Iterator[None]:
    """Floats that `torch.empty` makes are NaN, bytes 0x55: kernels must write all that counts."""
    empty = torch.empty

    def filled(*shape: object, **options: object) -> torch.Tensor:
        made = empty(*shape, **options)
        if made.element_size() == 1:
            made.view(torch.uint8).fill_(0x55)
            return made
        return made.fill_(NAN)

    with patch.object(torch, "empty", filled):
        yield


def run(
    unit: Unit,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: Segments,
    precision: str,
) -> tuple[operands.QuantisedQ, TiledKV]:
    """The operands of the kernels, with centres from the statistics of `operands`."""
    formats = FORMATS[precision]
    centres = KVCentres.of(ChannelStatistics.of(k, v), formats)
    with _new_memory_holds_nan():
        quantised_q = quantise.quantise_q(unit, q, centres, formats)
        return quantised_q, quantise.quantise_kv(unit, k, v, KeyTiles(keys), centres, formats)


def value_order() -> torch.Tensor:
    """(128,) int64: the key of each position of a tile of V, see csrc/quantise/values.cuh."""
    p = torch.arange(KEY_TILE)
    return p // 16 * 16 + p % 4 // 2 * 8 + p % 16 // 4 * 2 + p % 2


def in_rows(tiled: TiledKV) -> operands.QuantisedKV:
    """The same numbers in the layout of the reference; 0 in rows of no tile."""
    row, place = tiled.tiles.rows(tiled.k.device)
    at, tile, number = row.rows, place // KEY_TILE, place % KEY_TILE
    k = torch.zeros_like(tiled.k).view(torch.uint8)
    k[at] = tiled.k.view(torch.uint8)[at]
    scale = tiled.k_scale.new_zeros(tiled.k.shape[:2])
    scale[at] = tiled.k_scale.t()[tile]
    v = tiled.v
    if v.dim() == 4:
        position = value_order().argsort().to(v.device)[number]
        rows = torch.zeros_like(k)
        rows[at] = v.view(torch.uint8)[tile, :, :, position]
        v = rows.view(v.dtype)
    return operands.QuantisedKV(k.view(tiled.k.dtype), scale, v, tiled.centres)


def hold_values(
    got: torch.Tensor,
    argument: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor],
    what: str,
    slack: torch.Tensor | None = None,
) -> int:
    """Asserts that `got` are the 8-bit numbers of float32 `argument`, or of one within `slack`.

    Args:
        rounded: as `Format.round`. slack: default 1e-6 of the argument.

    Returns: how many are not those of the argument.
    """
    slack = 1e-6 * argument if slack is None else slack
    got, expected, *near = (
        x.float() for x in (got, *(rounded(argument + e * slack) for e in (0, -1, 1)))
    )
    same = (got == expected) | (got.isnan() & expected.isnan())
    low, high = torch.minimum(*near), torch.maximum(*near)  # rounding never changes the order
    wrong = ~same & ~((low <= got) & (got <= high))
    assert not wrong.any(), f"{what}: {int(wrong.sum())} numbers differ"
    return int((~same).sum())


def hold_scale(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Within 2 ulp; NaN where NaN is expected."""
    assert torch.equal(got.isnan(), expected.isnan()), f"{what}: other rows are NaN"
    error = ((got - expected).abs() / expected).nan_to_num(0).amax().item()
    assert error <= 2.4e-7, f"{what}: off by {error:.1e}"


def hold_q(
    got: operands.QuantisedQ, q: torch.Tensor, centres: KVCentres, precision: str, what: str
) -> int:
    """Numbers, scales, and offsets: these within 1e-5 of the sum of magnitudes, or not finite."""
    qk = FORMATS[precision].qk
    expected = operands.quantise_q(q, centres, FORMATS[precision])
    rotated, scale = rotate(q), got.scale.unsqueeze(-1)
    # a scale has few bits: an ulp of the largest number may lead to the next one
    amax = rotated.abs().amax(-1)
    near = [qk.row_scale(amax * (1 + e * 2.4e-7)) for e in (-1, 1)]
    same = (got.scale == near[0]) | (got.scale == near[1])
    assert (same | (got.scale.isnan() & expected.scale.isnan())).all(), f"{what}, scale of Q"

    def rounded(argument: torch.Tensor) -> torch.Tensor:
        return qk.round_row(argument, scale)

    differ = hold_values(got.values, rotated / scale, rounded, f"{what}, Q")
    t, h, d = q.shape
    hk = len(centres.k_mean)
    size = q.float().abs().view(t, hk, h // hk, d) @ centres.k_mean.abs().unsqueeze(-1)
    error = (got.k_offset - expected.k_offset).abs().nan_to_num(0, 0, 0)
    assert (error <= 1e-5 * size.reshape(t, h).nan_to_num(0, 0, 0) + 1e-30).all(), what
    finite = expected.k_offset.isfinite()
    assert torch.equal(got.k_offset.isfinite(), finite), f"{what}: other offsets are not finite"
    return differ


def hold_kv(
    tiled: TiledKV, k: torch.Tensor, v: torch.Tensor, keys: Segments, precision: str, what: str
) -> dict[str, int]:
    """Numbers and scales in rows of segments; zeros in V past a tile's rows. As `hold_values`."""
    formats, centres = FORMATS[precision], tiled.centres
    expected = operands.quantise_kv(k, v, keys, centres, formats)
    got = in_rows(tiled)
    inside = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    for row, length in zip(keys.row.tolist(), keys.length.tolist(), strict=True):
        inside[row : row + length] = True
    hold_scale(got.k_scale[inside], expected.k_scale[inside], f"{what}, scale of K")
    argument = rotate(k, centres.k_mean) / expected.k_scale.unsqueeze(-1)
    kept = got.k.float()[inside]
    differ = {"K": hold_values(kept, argument[inside], formats.qk.round, f"{what}, K")}
    if formats.v is None:
        assert tiled.v is v
        return differ
    argument = (v.float() - centres.v_mean) / centres.v_scale
    # the kernel's difference of two quotients is off by ulps of these
    slack = 1.2e-7 * (argument.abs() + 2 * (centres.v_mean / centres.v_scale).abs())
    kept = got.v.float()[inside]
    rounded = formats.v.round
    differ["V"] = hold_values(kept, argument[inside], rounded, f"{what}, V", slack[inside])
    rows = torch.from_numpy(tiled.tiles.table["rows"].copy()).to(k.device)
    past = value_order().to(k.device) >= rows.view(-1, 1, 1, 1)
    spare = tiled.v.view(torch.uint8).masked_fill(~past, 0)
    assert (spare == 0).all(), f"{what}: V past a tile's rows is not 0"
    return differ


def operands_are_those_of_the_definition(unit: Unit, device: str, precision: str) -> None:
    """Awkward segments, GQA, strided and packed inputs."""
    keys = segments()
    rows = int(keys.row[-1] + keys.length[-1])
    for seed in range(2):
        q, k, v = tensors(unit, device, rows, seed)
        quantised_q, kv = run(unit, q[: 270 + seed], k, v, keys, precision)
        what = f"{unit.name}, {precision}, seed {seed}"
        differ = hold_q(quantised_q, q[: 270 + seed], kv.centres, precision, what)
        assert differ <= 1e-4 * quantised_q.values.numel(), f"{what}: {differ} of Q differ"
        for name, differ in hold_kv(kv, k, v, keys, precision, what).items():
            limit = {"K": 1e-4, "V": 1e-3}[name]
            assert differ <= limit * k.numel(), f"{what}: {differ} of {name} differ"


def boxes_are_refilled(unit: Unit, device: str, precision: str, repeats: int) -> None:
    """Many segments: 4 * `repeats` tiles of K. 400 give each CTA of 132 SMs six pairs of a tile and
    a head, or more, and each of their warps six boxes of Q."""
    keys = segments((130, 40, 1) * repeats)
    q, k, v = tensors(unit, device, int(keys.row[-1] + keys.length[-1]), seed=1)
    quantised_q, kv = run(unit, q, k, v, keys, precision)
    what = f"{unit.name}, {precision}, {len(kv.tiles)} tiles"
    differ = hold_q(quantised_q, q, kv.centres, precision, what)
    assert differ <= 1e-4 * quantised_q.values.numel(), f"{what}: {differ} of Q differ"
    differ = hold_kv(kv, k, v, keys, precision, what)["K"]
    assert differ <= 1e-4 * k.numel(), f"{what}: {differ} of K differ"


def backward_operands_are_those_of_the_forward(unit: Unit, device: str, precision: str) -> None:
    """Q and K are those that `DequantisedInputs.of` makes of the forward's operands, bit by bit.

    LSE is within 2 ulp of its terms. V is the nearest bfloat16 number, but for ties within
    ulps of its terms. Also of zeros and numbers that are not finite.
    """
    keys, formats, scale = segments(), FORMATS[precision], unit.head_dim**-0.5
    rows = int(keys.row[-1] + keys.length[-1])
    for seed in range(2):
        q, k, v = (x.clone() if seed == 0 else x for x in tensors(unit, device, rows, seed))
        if seed == 0:
            q[0], q[2, 1, 5], q[3, 4, 0], k[6:133] = 0, INF, NAN, 0
            k[140, 1, 7], v[5, 0, 9], v[150, 1, 8] = INF, -INF, NAN
        else:
            v[:, 1, 6] = 1.7  # a constant channel has the least scale, which its rounding exceeds
        q = q[: 270 + seed]
        forward_q, tiled = run(unit, q, k, v, keys, precision)
        lse = torch.randn(HEADS, len(q), device=device) * 20
        lse[0, :3], lse[1, 2] = -INF, -INF
        operands_of = q, k, v, tiled.tiles, tiled.centres
        with _new_memory_holds_nan():
            got = quantise.dequantise(unit, *operands_of, formats, lse, scale)
        kv = in_rows(tiled)
        expected = DequantisedInputs.of(forward_q, kv, lse, scale, q.dtype)
        inside = tiled.tiles.rows(k.device)[0].rows
        what = f"{unit.name}, {precision}, seed {seed}"
        for name, x, y in (("Q", got.q, expected.q), ("K", got.k[inside], expected.k[inside])):
            assert x.dtype == y.dtype
            assert torch.equal(x.nan_to_num(nan=7e7), y.nan_to_num(nan=7e7)), f"{what}: {name}"
        offset = scale * forward_q.k_offset.t()
        terms = (lse.abs() + offset.abs()).nan_to_num(0, 0, 0)
        error = (got.lse - expected.lse).nan_to_num(0, 0, 0).abs()
        assert torch.equal(got.lse.isfinite(), expected.lse.isfinite()), what
        assert torch.equal(got.lse == -INF, lse == -INF), what
        assert (error <= 2.4e-7 * terms).all(), f"{what}: LSE"
        if formats.v is None:
            assert torch.equal(got.v.nan_to_num(nan=7e7), v.to(got.v).nan_to_num(nan=7e7)), what
            continue
        part, v_mean = kv.v.double() * kv.centres.v_scale, kv.centres.v_mean.double()
        slack = 2.0**-23 * (part.abs() + v_mean.abs())[inside]
        exact, rounded = (part + v_mean)[inside], torch.Tensor.bfloat16
        hold_values(got.v[inside], exact, rounded, f"{what}: V", slack)
        assert seed == 0 or got.v[inside].isfinite().all(), f"{what}: V"


def bad_input_stays_where_it_is(unit: Unit, device: str, precision: str) -> None:
    """Zeros, subnormals, infinities, NaN and huge numbers, as the definition has them."""
    keys = segments((128, 40, 300))
    rows = int(keys.row[-1] + keys.length[-1])
    huge = torch.finfo(getattr(torch, unit.dtype)).max
    q, k, v = tensors(unit, device, rows)
    q, k, v = q[:40].clone(), k.clone(), v.clone()
    q[0], q[1, 2] = 0, 1e-40
    q[2, 1, 5], q[3, 4, unit.head_dim - 1], q[4], q[5, 0, 9] = INF, NAN, huge, -huge
    q[6, :, ::2], q[6, :, 1::2] = huge, -huge
    q[7] = -INF
    k[133:173] = 0  # a whole tile
    k[200, 1, 7], k[330, 0, 0], k[340, 1], v[5, 0, 9], v[150, 1, 8] = INF, NAN, huge, -INF, NAN
    v[201, :, 20] = huge
    quantised_q, kv = run(unit, q, k, v, keys, precision)
    what = f"{unit.name}, {precision}"
    hold_q(quantised_q, q, kv.centres, precision, what)
    hold_kv(kv, k, v, keys, precision, what)
    centres = kv.centres._replace(k_mean=torch.full_like(kv.centres.k_mean, 2.0**98))
    formats = FORMATS[precision]  # a centre that hides huge keys
    k[220] = min(2.0**98, huge)
    again = quantise.quantise_kv(unit, k, v, KeyTiles(keys), centres, formats)
    hold_kv(again, k, v, keys, precision, f"{what}, a huge centre")


def statistics_hold(unit: Unit, device: str, precision: str) -> None:
    """Sums within 1e-5 of the sum of magnitudes, maximum and minimum exact; also of no token.

    Centres are equal to those that `KVCentres.of` has of the same statistics.
    """
    formats = FORMATS[precision]
    for tokens, seed in ((0, 0), (1, 0), (63, 1), (1000, 0), (1000, 1)):
        _, k, v = tensors(unit, device, max(tokens, 20), seed)
        k, v = k.clone() if seed == 0 else k, v.clone() if seed == 0 else v
        k[3 % len(k), 0, 5], v[9, 1, 0], v[10, 1, 0], v[11, 0, 2] = NAN, INF, -INF, NAN
        k, v = k[:tokens], v[:tokens]
        got, centres = quantise.channel_statistics(unit, k, v, formats)
        expected = ChannelStatistics.of(k, v).values
        size = torch.stack([x.float().nan_to_num(0, 0, 0).abs().sum(0) for x in (k, v)])
        what = f"{unit.name}, {tokens} tokens, seed {seed}"
        assert got.tokens == tokens
        assert ((got.values[:2] - expected[:2]).abs() <= 1e-5 * size).all(), what
        assert torch.equal(got.values[2:], expected[2:]), what
        hold_centres(centres, got, precision, what)


def extreme_channels(n: int, dtype: torch.dtype, d: int) -> torch.Tensor:
    """V (n, 1, d) near the bounds of the dtype: channels repeat eleven patterns."""
    torch.manual_seed(n)
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    noise = torch.randn(n, dtype=torch.float64)
    place = torch.arange(n)
    patterns = (
        torch.zeros(n),
        torch.full((n,), largest),
        torch.full((n,), -0.9 * largest),
        torch.full((n,), largest * 2.0**-40),
        largest * (-1.0) ** place,
        torch.where(place == 0, -largest, 0.97 * largest),  # farther from the mean than `largest`
        largest * (0.9 + 0.02 * noise),
        largest * 0.1 * noise,
        torch.where(place == n - 1, largest, tiny),
        tiny * noise,
        tiny * 2.0**-5 * torch.ones(n),
    )
    v = torch.stack([patterns[c % len(patterns)].double() for c in range(d)], -1)
    return v.clamp(-largest, largest).to(dtype).unsqueeze(1)


def v_of_every_magnitude(unit: Unit, device: str) -> None:
    """Channels of 2^-110 to 2^124, in float16 of 2^-12 to 2^13, and extreme ones: `hold_kv`, with
    centres that are those of the kernels' statistics. GPUs flush products below 2^-126 to 0."""
    dtype, d = getattr(torch, unit.dtype), unit.head_dim
    low, high = (-12, 13) if dtype == torch.float16 else (-110, 124)
    for n in (1, 3, 4, 300):
        torch.manual_seed(n)
        exponents = torch.randint(low, high + 1, (d,))
        by = torch.ldexp(torch.ones(d), exponents)
        mean = torch.randn(d) * torch.tensor([0, 1, 30])[torch.randint(3, (d,))]
        largest = torch.finfo(dtype).max
        drawn = ((torch.randn(n, 1, d) + mean) * by).clamp(-largest, largest).to(dtype)
        extreme = extreme_channels(n, dtype, d)
        extreme[..., 9::11], extreme[..., 10::11], extreme[..., 8::11] = 0, 0, 0  # flushed
        v = torch.cat((drawn, extreme), 1).to(device)
        k = torch.randn(n, 2, d).to(v)
        what = f"{unit.name}, {n} keys"
        statistics, centres = quantise.channel_statistics(unit, k, v, FORMATS["fp8"])
        hold_centres(centres, statistics, "fp8", what)
        keys = segments((n,))
        with _new_memory_holds_nan():
            kv = quantise.quantise_kv(unit, k, v, KeyTiles(keys), centres, FORMATS["fp8"])
        hold_kv(kv, k, v, keys, "fp8", what)


def hold_centres(got: KVCentres, statistics: ChannelStatistics, precision: str, what: str) -> None:
    """Equal to `KVCentres.of`, on the CPU: elsewhere PyTorch multiplies by 1 / tokens."""
    values = statistics.values.cpu()
    expected = KVCentres.of(ChannelStatistics(values, statistics.tokens), FORMATS[precision])
    for name, x, y in zip(KVCentres._fields, got, expected, strict=True):
        assert torch.equal(x.cpu(), y), f"{what}: {name}"


def statistics_of_ranks_are_combined(unit: Unit, device: str, precision: str) -> None:
    """Sums within 1e-6 of the sum of magnitudes, maximum and minimum exact; one rank has no token.

    A sum that overflows has mean 0.
    """
    torch.manual_seed(0)
    for ranks in (1, 2, 4, 7):
        values = torch.randn(ranks, 4, KV_HEADS, unit.head_dim, device=device) * 100
        values[:, 2:] = values[:, 2:].sort(1, descending=True).values
        values[ranks - 1, 2:] = torch.tensor([-INF, INF], device=device).view(2, 1, 1)  # no token
        values[:, :2, 0, 3] = 3e38
        parts = [ChannelStatistics(x, 10) for x in values.unbind()]
        expected = ChannelStatistics.combine(parts)
        got, centres = quantise.combine_statistics(unit, values, 10 * ranks, FORMATS[precision])
        what = f"{unit.name}, {ranks} ranks"
        assert torch.equal(got.values[2:], expected.values[2:]), what
        sums, known = got.values[:2].nan_to_num(), expected.values[:2].nan_to_num()
        size = values[:, :2].abs().sum(0).nan_to_num()
        assert ((sums - known).abs() <= 1e-6 * size).all(), what
        hold_centres(centres, got, precision, what)
        assert ranks == 1 or (centres.k_mean[0, 3] == 0).all(), what
