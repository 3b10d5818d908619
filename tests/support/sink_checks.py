"""Checks of sinks in the kernels, on a GPU or in emulation: against float64, and bit by bit.

Each check makes its own inputs on a device and asserts. A sink is one more column of the softmax,
without a value.
"""

from __future__ import annotations

import numpy as np
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.build.units import Unit
from ringfa3.kernels import forward
from ringfa3.kernels.backward import BackwardPass
from ringfa3.kernels.reference import preprocess
from ringfa3.kernels.sinks import sink_gradient
from ringfa3.planning.tile_schedule import LAST
from ringfa3.planning.tiling import plan_local
from tests.support import dense, forward_checks

SINKS = (0.5, 60.0, -60.0, 4.0)  # nats, of four heads; scores are N(0, 1)
HEADS = (4, 2)
# Of (queries, keys), causal: rows of the first see no key, and no tile of the third does.
LENGTHS = ((150, 90), (40, 40), (130, 0), (70, 300))

Tensors = list[torch.Tensor]


def _inputs(unit: Unit, device: str) -> Tensors:
    """q, k, v and sink."""
    t, n = (sum(x) for x in zip(*LENGTHS, strict=True))
    dtype = getattr(torch, unit.dtype)
    torch.manual_seed(0)
    qkv = [torch.randn(shape, device=device).to(dtype) for shape in _shapes(unit, t, n)]
    return [*qkv, torch.tensor(SINKS, device=device)]


def _shapes(unit: Unit, t: int, n: int) -> tuple[tuple[int, int, int], ...]:
    """Of q, k and v, with t queries and n keys."""
    d, d_v = unit.head_dim, unit.v_dim
    return (t, HEADS[0], d), (n, HEADS[1], d), (n, HEADS[1], d_v)


def _out(unit: Unit, q: torch.Tensor) -> torch.Tensor:
    """O of q, NaN."""
    return q.new_full((*q.shape[:2], unit.v_dim), torch.nan)


def _mask(device: str) -> torch.Tensor:
    return torch.from_numpy(dense.mask(*zip(*LENGTHS, strict=True), -1, 0)).to(device)


def _of_kind(inputs: Tensors, kind: torch.dtype) -> Tensors:
    return [x.detach().to(kind, copy=True).requires_grad_() for x in inputs]


def _hold_gate(
    got: tuple[torch.Tensor, torch.Tensor], inputs: Tensors, mask: torch.Tensor, what: str
) -> None:
    """max|out - ref| <= 2 max|out_pt - ref| + 1e-5 of every head, ref in float64 and out_pt by
    PyTorch in the dtype of q; LSE to 1e-4. Rows without keys have output 0 and the sink as LSE."""
    out, lse = got
    ref, ref_lse = dense.attention_with_sink(*(x.double() for x in inputs), mask)
    plain, _ = dense.attention_with_sink(*(x.to(out.dtype) for x in inputs), mask)
    for head in range(out.shape[1]):
        error = forward_checks.largest((out.double() - ref)[:, head])
        bound = 2 * forward_checks.largest((plain.double() - ref)[:, head]) + 1e-5
        assert error <= bound, f"{what}, head {head}: off by {error:.2e}, allowed {bound:.2e}"
    assert forward_checks.largest(lse.double() - ref_lse) < 1e-4, what
    blind = ~mask.any(1)
    assert not out[blind].any(), what
    assert torch.equal(lse[:, blind], inputs[3][:, None].expand(lse.shape)[:, blind]), what


def forward_holds_the_gate(unit: Unit, device: str) -> None:
    """One launch: sinks far above and below the scores, rows and a tile without keys."""
    inputs, mask = _inputs(unit, device), _mask(device)
    plan = plan_local(*(np.array(n) for n in zip(*LENGTHS, strict=True)), -1, 0)
    tiling = plan.forward(unit.tile_m)[0]
    assert (tiling.tiles["num_spans"] == 0).any()
    out = _out(unit, inputs[0])
    lse = torch.full((HEADS[0], len(out)), torch.nan, device=device)
    q, k, v, sink = inputs
    forward.attend(unit, q, k, v, tiling, unit.head_dim**-0.5, out, out[:0], lse, sink=sink)
    _hold_gate((out, lse), inputs, mask, unit.name)


def nothing_is_seen(unit: Unit, device: str) -> None:
    """No row sees a key, so no kernel runs: output 0, and the sink as LSE."""
    q, k, v, sink = _inputs(unit, device)
    tiling = plan_local(np.array([len(q)]), np.array([0]), -1, 0).forward(unit.tile_m)[0]
    out = _out(unit, q)
    lse = torch.full((HEADS[0], len(q)), torch.nan, device=device)
    forward.attend(unit, q, k[:0], v[:0], tiling, 1.0, out, out[:0], lse, sink=sink)
    assert not out.any()
    assert torch.equal(lse, sink[:, None].expand(lse.shape))


def hops_hold_the_gate(unit: Unit, device: str) -> None:
    """Two hops, of which tiles see one or both: the sink counts once, at a row's last hop.

    Until then LSE is that of the keys so far, to 1e-4.
    """
    t, n, pieces, scale = 500, 480, ((0, 60), (60, 480)), unit.head_dim**-0.5
    dtype, sink = getattr(torch, unit.dtype), torch.tensor(SINKS, device=device)
    torch.manual_seed(1)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in _shapes(unit, t, n))
    mask = torch.from_numpy(dense.mask([t], [n], -1, 0)).to(device)
    plan = plan_local(np.array([t]), np.array([n]), -1, 0)
    whole = plan.forward(unit.tile_m)[0]
    for order in (1, -1):
        out = _out(unit, q)
        running = forward_checks.empty_partial_out(unit, plan, HEADS[0], device)
        lse = torch.full((HEADS[0], t), torch.nan, device=device)
        hops = forward_checks.split_into_hops(whole, pieces[::order])
        for number, hop in enumerate(hops):
            forward.attend(unit, q, k, v, hop, scale, out, running, lse, sink=sink)
            if number:
                continue
            here = slice(*pieces[::order][0])
            keys = k[here].double(), v[here].double()
            _, so_far = dense.attention(q.double(), *keys, mask[:, here])
            for tile in hop.tiles[hop.tiles["flags"] & LAST == 0]:
                rows = slice(tile["row0"], tile["row0"] + tile["rows"])
                assert dense.worst([(lse[:, rows], so_far[:, rows])]) < 1e-4
        assert (hops[1].tiles["flags"] == LAST).any()
        _hold_gate((out, lse), [q, k, v, sink], mask, f"order {order}")


def special_sinks(unit: Unit, device: str) -> None:
    """+inf gives output 0 and an LSE of +inf, -inf the bits of a call without a sink, NaN gives NaN
    in rows with keys. Other heads do not change."""
    q, k, v, sink = _inputs(unit, device)
    cu = [dense.cumulative(n) for n in zip(*LENGTHS, strict=True)]
    blind = ~_mask(device).any(1)

    def attend(sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        found = flash_attn_varlen_func(q, k, v, *cu, causal=True, return_lse=True, sink=sink)
        assert isinstance(found, tuple)
        return found

    out, lse = attend(None)
    usual_out, usual_lse = attend(sink)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, SINKS[3]], device=device)
    got, got_lse = attend(special)
    assert not got[:, 0].any()
    assert (got_lse[0] == torch.inf).all()
    assert torch.equal(got[:, 1], out[:, 1])
    assert torch.equal(got_lse[1], lse[1])
    assert (got_lse[1, blind] == -torch.inf).all()
    assert got[~blind, 2].isnan().all()
    assert got_lse[2].isnan().all()
    assert torch.equal(got[:, 3], usual_out[:, 3])
    assert torch.equal(got_lse[3], usual_lse[3])


def gradients_hold_the_gate(unit: Unit, device: str, with_dlse: bool) -> torch.Tensor:
    """dq, dk, dv by the gate of `backward_checks`, dsink twice: to 2e-5 of what it sums, against
    float64 on the kernel's inputs; to 2^-7 of that, against autograd in float64, as `out` is
    rounded, and to 0 where it is smaller than its dtype has. Returns dsink."""
    inputs, mask = _inputs(unit, device), _mask(device)
    torch.manual_seed(1)
    dout = torch.randn_like(_out(unit, inputs[0]))
    dlse = torch.randn(HEADS[0], len(dout), device=device) if with_dlse else None
    results = []
    for kind in (torch.float64, dout.dtype):
        leaves = _of_kind(inputs, kind)
        outputs = dense.attention_with_sink(*leaves, mask)
        given = None if dlse is None else dlse.to(kind)
        results.append((outputs, dense.gradients(leaves, outputs, dout.to(kind), given)))
    (exact_out, exact_lse), exact = results[0]
    out, lse = exact_out.detach().to(dout.dtype), exact_lse.detach().float()

    q, k, v, sink = inputs
    plan = plan_local(*(np.array(n) for n in zip(*LENGTHS, strict=True)), -1, 0)
    scale = unit.head_dim**-0.5
    dk, dv = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    rows = dout, dlse, q, out, lse
    run = BackwardPass(unit, *rows, plan, scale, False, k.shape[1], sink=sink)
    run.hop(k, v, plan.backward(unit.tile_n, unit.tile_m)[0], dk, dv)
    found = ("dq", run.dq()), ("dk", dk), ("dv", dv)
    for (name, x), ref, plain in zip(found, exact[:3], results[1][1][:3], strict=True):
        error = forward_checks.largest(x.double() - ref)
        bound = 2 * forward_checks.largest(plain.double() - ref) + 1e-5
        assert error <= bound, f"{name} is off by {error:.2e}, allowed {bound:.2e}"

    got = run.dsink()
    doubles = dout.double(), out.double(), lse.double(), None if dlse is None else dlse.double()
    on_inputs = sink_gradient(*preprocess(*doubles), sink.double())
    delta = (dout.double() * out.double()).abs().sum(-1).t()
    summed = delta if dlse is None else delta + dlse.double().abs()
    share = (sink.double()[:, None] - lse.double()).exp()
    size = (share * summed).sum(1)
    assert ((got - on_inputs).abs() <= 2e-5 * size).all(), f"{got} {on_inputs}"
    info = torch.finfo(dout.dtype)
    lost = info.smallest_normal * info.eps * (share * dout.double().abs().sum(-1).t()).sum(1)
    assert ((got - exact[3]).abs() <= 2**-7 * size + lost).all(), f"{got} {exact[3]}"
    return got


def a_pass_without_sinks_gives_none(unit: Unit, device: str) -> None:
    inputs = _inputs(unit, device)
    q = inputs[0]
    plan = plan_local(*(np.array(n) for n in zip(*LENGTHS, strict=True)), -1, 0)
    lse = torch.zeros(HEADS[0], len(q), device=device)
    run = BackwardPass(unit, q, None, q, q, lse, plan, 1.0, False, inputs[1].shape[1])
    assert run.dsink().shape == (0,)


def the_function_differentiates(unit: Unit, device: str) -> None:
    """`flash_attn_varlen_func` and its gradients, against autograd in float64: 3e-2 of the largest,
    dsink to that of what it sums."""
    inputs, mask = _inputs(unit, device), _mask(device)
    exact, leaves = _of_kind(inputs, torch.float64), [x.requires_grad_() for x in inputs]
    cu = [dense.cumulative(n) for n in zip(*LENGTHS, strict=True)]
    outputs = flash_attn_varlen_func(*leaves[:3], *cu, causal=True, return_lse=True, sink=leaves[3])
    assert isinstance(outputs, tuple)
    expected = dense.attention_with_sink(*exact, mask)
    dout, dlse = torch.randn_like(outputs[0]), torch.randn_like(outputs[1])
    got = torch.autograd.grad(outputs, leaves, (dout, dlse))
    wanted = dense.gradients(exact, expected, dout.double(), dlse.double())
    for x, ref in zip((*outputs, *got), (*expected, *wanted), strict=True):
        assert forward_checks.largest(x.double() - ref) <= 3e-2 * forward_checks.largest(ref)


OF_FORWARD = (forward_holds_the_gate, nothing_is_seen, hops_hold_the_gate)
OF_CALLS = (special_sinks, a_pass_without_sinks_gives_none, the_function_differentiates)
