"""The PyTorch reference: runs a plan tile by tile, as the kernels run it.

The forward is FlashAttention's online softmax over the blocks of a tile (FlashAttention-3,
Algorithm 1); its epilogue stores, or merges with the results of earlier hops. The backward
recomputes P = exp(S - LSE) per block (Appendix B.1). No tensor has the size of the score matrix.

Statistics, O between hops and all gradients are float32, or float64 for float64 inputs. It runs on
any device; `dispatch` selects it for tensors without a kernel.

Shapes: t query rows, n key rows of a hop; h heads, hk KV heads, g = h // hk; d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ringfa3.kernels.sinks import apply_sink, sink_gradient
from ringfa3.planning.tile_schedule import FIRST, LAST, Table, Tiling
from ringfa3.planning.tiling import Plan
from ringfa3.quantisation.rotation import rotate_back

TILE_M = 128  # query rows of a forward tile, and of a block of padded rows
TILE_N = 128  # keys of a backward tile
BLOCK = 256  # keys (forward) or rows (backward) of one step inside a tile

Span = tuple[int, int, int, int, int, int]  # q0, q1, k0, k1, lo, hi


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics and accumulators for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_partial_out(q: torch.Tensor, plan: Plan) -> torch.Tensor:
    """O between hops for queries like q (t, h, d), uninitialised."""
    del plan  # rows are not padded
    return q.new_empty(q.shape, dtype=accum_dtype(q.dtype))


def read_partial_out(partial_out: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """O between hops as (t, h, d)."""
    del tiling
    return partial_out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiling: Tiling,
    scale: float,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> None:
    """One hop of the forward pass: fills or merges the rows of every tile.

    Args:
        q: (t, h, d); k, v: (n, hk, d), v also with another number of columns.
        out: (t, h, d), or less: the first columns of v's. In the output dtype, written for rows
            whose LAST hop this is.
        partial_out: from `new_partial_out`. Rows that are FIRST and LAST at once do not use it; it
            may be empty if all rows are.
        lse: (h, t) accumulation dtype, natural logarithm; -inf for a row fully masked so far.
        sink: (h,) accumulation dtype, a logit a head, in the softmax of rows whose LAST hop this
            is; LSE counts it from then on.
    """
    for row0, rows, first_span, num_spans, flags, _ in tiling.tiles.tolist():
        here = slice(row0, row0 + rows)
        spans = spans_of(tiling.spans, first_span, num_spans)
        o, tile_lse = _attend_tile(q[here], k, v, spans, row0, scale)
        store_tile(o, tile_lse, here, flags, out, partial_out, lse, sink)


def store_tile(
    o: torch.Tensor,
    tile_lse: torch.Tensor,
    here: slice,
    flags: int,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> None:
    """Stores a tile's rows `here`, or merges them with earlier hops, as its `flags` say.

    Args:
        o: (hk, g * rows, d), normalised; tile_lse: (hk, g * rows).
        out, partial_out, lse, sink: as in `attend`.
    """
    hk, _, d = o.shape
    rows = here.stop - here.start
    o = o.view(hk, -1, rows, d).permute(2, 0, 1, 3).reshape(rows, -1, d)  # (rows, h, d)
    tile_lse = tile_lse.view(-1, rows)  # (h, rows)
    if not flags & FIRST:
        o, tile_lse = merge(partial_out[here], lse[:, here], o, tile_lse)
    if flags & LAST and sink is not None:
        tile_lse = apply_sink(o, tile_lse, sink)
    lse[:, here] = tile_lse
    if flags & LAST:
        out[here] = o[..., : out.shape[-1]]
    else:
        partial_out[here] = o


def merge(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the parts' (O, LSE).

    o1, o2: (rows, h, d); lse1, lse2: (h, rows). A part without keys (LSE -inf) has weight 0, also
    if the other has none either.
    """
    lse = torch.logaddexp(lse1, lse2)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    w1, w2 = (torch.exp(part - finite).t().unsqueeze(-1) for part in (lse1, lse2))
    return o1 * w1 + o2 * w2, lse


def _attend_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Iterator[Span],
    row0: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (hk, g * rows, d), normalised, and LSE (hk, g * rows) of one tile, q (rows, h, d)."""
    rows, hk = q.shape[0], k.shape[1]
    q_tile = by_kv_head(q, hk)  # (hk, g * rows, d)
    high = q_tile.new_full(q_tile.shape[:2], -torch.inf)  # running maximum
    total = torch.zeros_like(high)  # running sum of exp(S - high)
    o = q_tile.new_zeros(*q_tile.shape[:2], v.shape[-1])
    for span in spans:
        q0, q1, k0, k1, lo, hi = span
        i, end_row = row0 - q0, min(row0 + rows, q1) - q0
        for j, end in _blocks(max(0, max(0, i) + lo), min(k1 - k0, end_row + hi)):
            keys = slice(k0 + j, k0 + end)
            s = (q_tile @ by_kv_head(k[keys], hk).mT).mul_(scale)  # (hk, g * rows, end - j)
            apply_mask(s, span, i, i + rows, j, end)
            new_high = torch.maximum(high, s.amax(-1))
            shift = new_high.masked_fill(new_high == -torch.inf, 0)
            p = s.sub_(shift.unsqueeze(-1)).exp_()
            decay = torch.exp(high - shift)
            total = total * decay + p.sum(-1)
            o = o.mul_(decay.unsqueeze(-1)).baddbmm_(p, by_kv_head(v[keys], hk))
            high = new_high
    lse = high + total.log()
    o /= total.masked_fill(total == 0, 1).unsqueeze(-1)
    return o, lse


class BackwardPass:
    """A backward pass over all hops of a plan: preprocesses at once, then takes hops in any order.

    Args:
        dout, q, out: (t, h, d).
        dlse, lse: (h, t) accumulation dtype, natural logarithm; a dlse of None stands for zeros.
        kv_heads: of the k and v of all hops.
        first_heads: of these, in hop 0, how many `hop` gets in a call of their own, before or after
            the others; 0: all at once.
        dequantised: q, lse and the k, v of hops are those of
            `quantisation.dequantised.DequantisedInputs`, see `attend_backward`.
    """

    def __init__(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        plan: Plan,
        scale: float,
        deterministic: bool,
        kv_heads: int,
        first_heads: int = 0,
        sink: torch.Tensor | None = None,
        dequantised: bool = False,
    ) -> None:
        del plan, deterministic  # no padded rows, and one order of additions
        del kv_heads, first_heads  # no tables
        self._dout, self._q, self._scale, self._dequantised = dout, q, scale, dequantised
        self._lse, self._delta = preprocess(dout, out, lse, dlse)
        self._dsink = None if sink is None else sink_gradient(self._lse, self._delta, sink)
        self._dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

    def hop(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        tiling: Tiling,
        dk: torch.Tensor,
        dv: torch.Tensor,
        first_head: int = 0,
        num_heads: int | None = None,
    ) -> None:
        """One hop, for all query heads or `num_heads` of them from `first_head` on.

        Args:
            k, v: (n, hk, d), the KV heads of these query heads. V has the columns of dout, or more.
            tiling: of the plan's backward, with the tiles of `select_backward`.
            dk, dv: (n, hk, d), or only the rows up to the last tile. The rows of tiles are stored;
                other rows may hold anything. Statistics dtype, or the dtype of k if no other rank
                adds to them.
        """
        end = self._q.shape[1] if num_heads is None else first_head + num_heads
        heads = slice(first_head, end)
        dout, q, dq = (x[:, heads] for x in (self._dout, self._q, self._dq))
        if dout.shape[-1] < v.shape[-1]:
            dout = torch.nn.functional.pad(dout, (0, v.shape[-1] - dout.shape[-1]))
        lse, delta = self._lse[heads], self._delta[heads]
        settings = self._scale, dq, dk, dv, self._dequantised
        attend_backward(dout, q, k, v, lse, delta, tiling, *settings)

    def dq(self) -> torch.Tensor:
        """(t, h, d) in the dtype of q, after the last hop; if `dequantised` rotated back."""
        return (rotate_back(self._dq) if self._dequantised else self._dq).to(self._q.dtype)

    def dsink(self) -> torch.Tensor:
        """(h,) in the dtype of LSE, of all rows; (0,) for a pass without a sink."""
        return self._lse.new_empty((0,)) if self._dsink is None else self._dsink


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    tiling: Tiling,
    scale: float,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dequantised: bool = False,
) -> None:
    """One hop of the backward pass.

    Args:
        q: (t, h, d); k: (n, hk, d). dout, v: the same, or both with another number of columns.
        lse, delta: (h, t) from `preprocess`, over all hops together.
        dq: (t, h, d) accumulation dtype, added to.
        dk, dv: like k and v, as in `BackwardPass.hop`.
        dequantised: k has more columns than q, and dk, which is rotated back, may have. The first
            of these, in a tile's first row as in the kernel, is the factor that divides the tile's
            K. P is at most 1: where the forward has summed scores less exactly, LSE may lie below a
            score.
    """
    hk, d = k.shape[1], q.shape[2]
    g = q.shape[1] // hk
    for row0, rows, first_span, num_spans, _, _ in tiling.tiles.tolist():
        here = slice(row0, row0 + rows)
        k_tile, v_tile = by_kv_head(k[here], hk), by_kv_head(v[here], hk)  # (hk, rows, d)
        if dequantised:
            k_tile = k_tile[..., :d] / k_tile[:, :1, d : d + 1]
        dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for span in spans_of(tiling.spans, first_span, num_spans):
            q0, q1, k0, k1, lo, hi = span
            j, end_key = row0 - k0, min(row0 + rows, k1) - k0
            for i, end in _blocks(max(0, max(0, j) - hi), min(q1 - q0, end_key - lo)):
                m = end - i
                at = slice(q0 + i, q0 + end)
                q_block = by_kv_head(q[at], hk)  # (hk, g * m, d)
                do_block = by_kv_head(dout[at], hk)
                s = (q_block @ k_tile.mT).mul_(scale)  # (hk, g * m, rows)
                apply_mask(s, span, i, end, j, j + rows)
                p = s.sub_(lse[:, at].reshape(hk, g * m, 1)).exp_()
                if dequantised:
                    p.clamp_(max=1)  # NaN stays
                ds = do_block @ v_tile.mT
                ds.sub_(delta[:, at].reshape(hk, g * m, 1)).mul_(p)
                dv_tile.baddbmm_(p.mT, do_block)
                dk_tile.baddbmm_(ds.mT, q_block, alpha=scale)
                dq_block = torch.baddbmm(q_block, ds, k_tile, beta=0, alpha=scale)
                dq[at] += dq_block.view(hk, g, m, -1).permute(2, 0, 1, 3).reshape(m, hk * g, -1)
        if dequantised:
            dk_tile = rotate_back(dk_tile)
        dk[here, :, :d], dv[here] = dk_tile.transpose(0, 1), dv_tile.transpose(0, 1)


def preprocess(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(LSE, D) for `attend_backward`, (h, t) each, once per backward; dlse is (h, t).

    D = rowsum(dO * O) - dLSE. For a fully masked row LSE is +inf, so that P = 0, and D is 0
    whatever its gradients are.
    """
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    if dlse is not None:
        delta = delta - dlse
    no_keys = lse == -torch.inf
    return lse.masked_fill(no_keys, torch.inf), delta.masked_fill(no_keys, 0)


def by_kv_head(x: torch.Tensor, hk: int) -> torch.Tensor:
    """(rows, h, d) as (hk, g * rows, d) in the accumulation dtype: heads of a group are joined."""
    rows, h, d = x.shape
    x = x.to(accum_dtype(x.dtype))
    return x.view(rows, hk, h // hk, d).permute(1, 2, 0, 3).reshape(hk, h // hk * rows, d)


def spans_of(table: Table, first: int, count: int) -> Iterator[Span]:
    for span in table[first : first + count].tolist():
        yield span[:6]


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, BLOCK):
        yield start, min(start + BLOCK, end)


def apply_mask(s: torch.Tensor, span: Span, i: int, end_row: int, j: int, end: int) -> None:
    """Sets S to -inf where row r of [i, end_row) does not attend to column c of [j, end).

    s: (hk, g * rows, end - j); unchanged if the whole block lies inside the band. Rows and columns
    count from the first ones of the span. One of the two may lie outside of it.
    """
    q0, q1, k0, k1, lo, hi = span
    clipped = i < 0 or end_row > q1 - q0 or j < 0 or end > k1 - k0
    if not clipped and lo <= j - (end_row - 1) and end - 1 - i <= hi:
        return
    r = torch.arange(i, end_row, dtype=torch.int64, device=s.device).unsqueeze(1)
    c = torch.arange(j, end, dtype=torch.int64, device=s.device)
    hidden = (c - r < lo) | (c - r > hi)
    if clipped:
        hidden |= (r < 0) | (r >= q1 - q0) | (c < 0) | (c >= k1 - k0)
    s.view(s.shape[0], -1, end_row - i, end - j).masked_fill_(hidden, -torch.inf)
