"""If this fails, gradients of 8-bit attention are those of another function. Gradients of attention
in 8 bits: those of the function that the forward has computed."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func, plan_context, ring_attn_func
from ringfa3.kernels import dispatch
from ringfa3.kernels.quantised_reference import QuantisedReference
from ringfa3.quantisation.dequantised import backward_keys
from tests.support import straight_through as reference
from tests.support.dense import mask

PRECISIONS = pytest.mark.parametrize("precision", ["fp8", "int8"])


def gradients(
    inputs: tuple[torch.Tensor, ...], precision: str, **settings: bool
) -> list[torch.Tensor]:
    """dq, dk, dv of one sequence."""
    *qkv, dout = (x[None] for x in inputs)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = flash_attn_func(*leaves, precision=precision, **settings)
    return [x[0] for x in torch.autograd.grad(out, leaves, dout)]


def dense(
    inputs: tuple[torch.Tensor, ...], precision: str, causal: bool = False
) -> tuple[torch.Tensor, ...]:
    """The reference's dq, dk, dv."""
    q, k, v, dout = inputs
    exact = (x.float()[None] for x in inputs[:3])
    out = flash_attn_func(*exact, precision=precision, causal=causal)
    assert isinstance(out, torch.Tensor)
    allowed = torch.from_numpy(mask([len(q)], [len(k)], -1, 0 if causal else -1))
    given = reference.Rounded.of_call(q, k, v, precision, np.array([len(k)]))
    return reference.gradients(q, k, v, dout, out[0], allowed, given)


@PRECISIONS
@pytest.mark.parametrize("name", reference.INPUTS)
def test_hostile_inputs_have_the_gradient_of_the_rounded_function(
    name: str, precision: str
) -> None:
    """bfloat16; medians of 3 draws, dv within .004. Reference: that of tests/support, in float64.

    Measured at most, dq and dk: .0051, rms 25 .0104, keys .0157 and .038 (fp8); .0036, .0071, .0157
    and .039 (int8).
    """
    errors = []
    for seed, (heads, d, causal) in enumerate(
        [((1, 1), 64, False), ((4, 1), 64, True), ((1, 1), 128, False)]
    ):
        inputs = reference.inputs(name, 256, heads, d, seed)
        got = gradients(inputs, precision, causal=causal)
        expected = dense(inputs, precision, causal)
        errors.append([reference.relative(x, y) for x, y in zip(got, expected, strict=True)])
    dq, dk, dv = np.median(errors, axis=0)
    assert max(dq, dk) <= reference.MOST.get(name, 0.006), errors
    assert dv <= 0.004, errors


@PRECISIONS
@pytest.mark.parametrize("with_sink", [False, True])
def test_packed_documents_sinks_and_gradients_of_lse(with_sink: bool, precision: str) -> None:
    """float32, GQA, a window, K with means: within 1e-4 of the reference; also a frozen sink."""
    torch.manual_seed(0)
    lengths, heads = [150, 1, 200], (4, 2)
    t = sum(lengths)
    q, k, v, dout = (torch.randn(t, h, 64) for h in (heads[0], heads[1], heads[1], heads[0]))
    k += 3 * torch.randn(2, 64)
    dlse, cu = torch.randn(heads[0], t), [0, *np.cumsum(lengths).tolist()]
    sink = torch.randn(heads[0], requires_grad=True) if with_sink else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    settings = {"causal": True, "window_size": (100, -1), "precision": precision}
    out, lse = flash_attn_varlen_func(*leaves, cu, cu, return_lse=True, sink=sink, **settings)
    wanted = leaves if sink is None else [*leaves, sink]
    got = torch.autograd.grad((out, lse), wanted, (dout, dlse), retain_graph=True)
    allowed = torch.from_numpy(mask(lengths, lengths, 100, 0))
    given = reference.Rounded.of_call(q, k, v, precision, np.array(lengths))
    expected = reference.gradients(q, k, v, dout, out, allowed, given, sink, dlse)
    for x, y in zip(got, expected, strict=True):
        assert reference.relative(x, y) <= 1e-4
    if sink is not None:
        frozen, _ = flash_attn_varlen_func(
            *leaves, cu, cu, return_lse=True, sink=sink.detach(), **settings
        )
        dq = torch.autograd.grad(frozen, leaves, dout)[0]
        expected = reference.gradients(q, k, v, dout, out, allowed, given, sink)
        assert reference.relative(dq, expected[0]) <= 1e-4


@PRECISIONS
@pytest.mark.parametrize("call", ["one", "batch", "ring", "compiled"])
def test_a_backward_takes_the_centres_of_its_forward(call: str, precision: str) -> None:
    """They are computed again, to equal gradients, where hooks have moved LSE."""
    torch.manual_seed(0)
    shape = {"batch": (3, 50, 2, 64), "ring": (50, 2, 64)}.get(call, (1, 50, 2, 64))
    q, k, v, dout = (torch.randn(shape) for _ in range(4))
    leaves, found, counts = [x.requires_grad_() for x in (q, k, v)], [], []
    attend = partial(flash_attn_func, precision=precision)
    if call == "ring":
        attend = partial(ring_attn_func, plan=plan_context(50, (0, 1)), precision=precision)
    elif call == "compiled":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for pack in (lambda x: x, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attend(*leaves)
        with mock.patch.object(
            QuantisedReference,
            "statistics",
            autospec=True,
            side_effect=QuantisedReference.statistics,
        ) as statistics:
            found.append(torch.autograd.grad(out, leaves, dout))
        counts.append(statistics.call_count)
    assert counts == [0, 1]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@PRECISIONS
def test_rows_without_keys_have_no_gradient(precision: str) -> None:
    """With a gradient of LSE, and with a sink, whose own gradient they have."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64, requires_grad=True) for n in (10, 4, 4))
    sink = torch.randn(2, requires_grad=True)
    for given in (None, sink):
        out, lse = flash_attn_func(
            q, k + 5, v, causal=True, return_lse=True, precision=precision, sink=given
        )
        dq, dk = torch.autograd.grad((out.sum(), lse[lse > -torch.inf].sum()), (q, k))
        assert not dq[:, :6].any()
        assert dq[:, 6:].abs().min() > 0
        assert dk.isfinite().all()


@PRECISIONS
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_random_hostile_inputs_have_bounded_gradients(count: int, precision: str) -> None:
    """As `hold_bounds`. float32 LSE has few bits for P from 2^17 nats on, also in "native"."""
    reference.hold_bounds(count, (40, 1, 64), precision, "cpu", 0, most_nats=2**17)


@PRECISIONS
def test_float16_and_two_backwards(precision: str) -> None:
    """float16 inputs at the ends of the range: finite; equal bits at the second backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 64).half().requires_grad_() for _ in range(3))
    with torch.no_grad():
        k[0, 0] = 6e4
        q[0, :, :, 0] = 3e4
    out = flash_attn_func(q, k, v, precision=precision)
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert x.dtype == torch.float16
        assert x.isfinite().all()
        assert torch.equal(x, y)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_same_unit_moves_and_attends_to_keys(d: int) -> None:
    """A ring builds it before its first hop; K has more columns than Q there."""
    asked: list[tuple[str, int, str]] = []

    def note(direction: str, like: torch.Tensor, precision: str, **options: object) -> None:
        assert not options.get("clips")
        asked.append((direction, like.shape[-1], precision))

    q = torch.empty(8, 2, d, dtype=torch.bfloat16)
    with mock.patch.object(dispatch, "_select_unit", note):
        dispatch.select_backward(q, "fp8")
        dispatch.select_local_kv("backward", backward_keys(q), plan_context(8), "fp8")
    assert asked == [("backward", d, "dequantised")] * 2


@pytest.mark.parametrize(
    ("name", "precision", "most"),
    [
        ("normal", "fp8", 0.06),
        ("rms 4", "fp8", 0.12),
        ("rms 9", "fp8", 0.26),
        ("means", "fp8", 0.06),
        ("normal", "int8", 0.017),
        ("rms 9", "int8", 0.075),
    ],
)
def test_how_far_gradients_are_from_those_of_exact_attention(
    name: str, precision: str, most: float
) -> None:
    """The trade of 8 bits: rms errors of dq and dk against dense float64, 5 draws of 512 tokens."""
    errors = []
    for seed in range(5):
        inputs = reference.inputs(name, 512, (1, 1), 64 if seed % 2 else 128, seed)
        q, k, v, dout = (x.double() for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        scores = torch.einsum("thd,nhd->htn", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("htn,nhd->thd", scores.softmax(-1), v)
        exact = torch.autograd.grad(out, leaves, dout)
        got = gradients(tuple(x.float() for x in inputs), precision)
        errors.append([reference.relative(x, y) for x, y in zip(got[:2], exact[:2], strict=True)])
    assert np.median(errors, 0).max() <= most, errors
