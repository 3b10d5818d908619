"""If this fails, attention on one device is wrong, or accepts wrong arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ringfa3 import flash_attn_func, flash_attn_varlen_func, functional, keep_attention
from ringfa3.kernels import reference
from tests.support.dense import attention, band, cumulative, mask, worst

EXACT = 1e-12  # float64


def dense_inputs(
    b: int, s: int, s_k: int, heads: tuple[int, int] = (4, 2), d: int = 8, seed: int = 0
) -> list[torch.Tensor]:
    """Float64 q (b, s, h, d), k and v (b, s_k, hk, d) that require gradients."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(b, s, heads[0], d), (b, s_k, heads[1], d), (b, s_k, heads[1], d)]
    return [torch.randn(x, generator=g, dtype=torch.float64).requires_grad_() for x in shapes]


def both(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradients into out and lse differ from element to element."""
    some = torch.where(lse == -torch.inf, 0, lse.sin())
    return (out * out.cos()).sum() + some.sum()


@settings(max_examples=60)
@given(
    b=st.integers(1, 3),
    s=st.integers(0, 40),
    s_k=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    causal=st.booleans(),
    window=st.tuples(st.sampled_from([-1, 0, 5]), st.sampled_from([-1, 0, 9])),
    scale=st.sampled_from([None, 0.3]),
)
def test_dense_equals_the_reference(
    b: int, s: int, s_k: int, heads: tuple[int, int], causal: bool, window: tuple[int, int],
    scale: float | None,
) -> None:  # fmt: skip
    """Float64, out, lse and gradients to 1e-12, one sequence of the batch at a time."""
    inputs = dense_inputs(b, s, s_k, heads)
    out, lse = flash_attn_func(
        *inputs, softmax_scale=scale, causal=causal, window_size=window, return_lse=True
    )
    assert out.shape == inputs[0].shape
    assert lse.shape == (b, heads[0], s)
    got = torch.autograd.grad(both(out, lse), inputs)
    allowed = mask([s], [s_k], *band(causal, window))
    parts = [attention(*(x[i] for x in inputs), allowed, scale) for i in range(b)]
    ref_out, ref_lse = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    wanted = torch.autograd.grad(both(ref_out, ref_lse), inputs)
    pairs = [(out, ref_out), (lse, ref_lse), *zip(got, wanted, strict=True)]
    assert worst(pairs) < EXACT


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.tuples(st.sampled_from([-1, 0, 5]), st.sampled_from([-1, 0, 9])),
)
def test_varlen_equals_the_reference(
    lengths: list[tuple[int, int]], causal: bool, window: tuple[int, int]
) -> None:
    """Float64, out, lse and gradients to 1e-12."""
    nq, nk = ([x[i] for x in lengths] for i in range(2))
    inputs = [x[0] for x in dense_inputs(1, sum(nq), sum(nk))]
    out, lse = flash_attn_varlen_func(
        *inputs, cumulative(nq), cumulative(nk), causal=causal, window_size=window, return_lse=True
    )
    assert lse.shape == (4, sum(nq))
    got = torch.autograd.grad(both(out, lse), inputs)
    outputs = attention(*inputs, mask(nq, nk, *band(causal, window)))
    wanted = torch.autograd.grad(both(*outputs), inputs)
    assert worst([*zip((out, lse), outputs, strict=True), *zip(got, wanted, strict=True)]) < EXACT


@pytest.mark.parametrize("causal", [False, True])
def test_dense_equals_pytorchs_attention(causal: bool) -> None:
    """`scaled_dot_product_attention` with GQA, float64, out and gradients to 1e-12."""
    inputs = dense_inputs(2, 300, 300, (4, 2), 16)
    out = flash_attn_func(*inputs, causal=causal)
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in inputs), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    dout = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, ref = (torch.autograd.grad(x, inputs, dout) for x in (out, wanted))
    assert worst([(out, wanted), *zip(got, ref, strict=True)]) < EXACT


@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (1, 2)])
def test_gradcheck(window: tuple[int, int]) -> None:
    """Out and lse against finite differences, float64; all rows see keys."""
    inputs = dense_inputs(2, 4, 6, (4, 2), 3)
    assert torch.autograd.gradcheck(
        lambda *x: flash_attn_func(*x, window_size=window, return_lse=True), inputs
    )
    packed = [x[0].detach().requires_grad_() for x in inputs]
    cu_q, cu_k = torch.tensor([0, 1, 1, 4]), torch.tensor([0, 2, 3, 6])
    assert torch.autograd.gradcheck(
        lambda *x: flash_attn_varlen_func(
            *x, cu_q, cu_k, causal=True, window_size=window, return_lse=True
        ),
        packed,
    )


@pytest.mark.parametrize("sizes", [(3, 8), (8, 3)])
@pytest.mark.parametrize("window", [(-1, 1), (1, -1), (-1, -1)])
def test_the_largest_window_is_unlimited(sizes: tuple[int, int], window: tuple[int, int]) -> None:
    """`sys.maxsize` in place of -1, bit for bit; the diagonal ends at the bottom right."""
    inputs = dense_inputs(1, *sizes)
    large = tuple(sys.maxsize if side < 0 else side for side in window)
    wanted = flash_attn_func(*inputs, window_size=window, return_lse=True)
    got = flash_attn_func(*inputs, window_size=large, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_rows_without_keys_are_zero_with_zero_gradients() -> None:
    """5 queries on 3 keys, causal: the first two rows see no key."""
    q, k, v = dense_inputs(1, 5, 3)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all()
    assert (lse[..., :2] == -torch.inf).all()
    assert lse[..., 2:].isfinite().all()
    out.sum().backward()
    assert (q.grad[:, :2] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides, the last dim contiguous."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "slice of a fused projection":
        return torch.cat((x, x, x), dim=-2)[..., x.shape[-2] : 2 * x.shape[-2], :]
    if how == "padded rows":
        return F.pad(x, (0, 3))[..., : x.shape[-1]]
    return x[:, :1].expand_as(x)  # "expanded"


@pytest.mark.parametrize(
    "how", ["heads first", "slice of a fused projection", "padded rows", "expanded"]
)
def test_strided_inputs(how: str) -> None:
    """Out and gradients as of contiguous copies, float64, 1e-12; strided output gradients, too."""
    leaves = dense_inputs(2, 33, 33)
    views = [strided(x, how) for x in leaves]
    assert not any(x.is_contiguous() for x in views)
    dout = strided(torch.randn(2, 33, 4, 8, dtype=torch.float64), how)
    results = []
    for inputs in (views, [x.contiguous() for x in views]):
        out, lse = flash_attn_func(*inputs, causal=True, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    assert worst(list(zip(*results, strict=True))) < EXACT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_results(dtype: torch.dtype) -> None:
    """out and gradients in the inputs' dtype; lse float32, float64 for float64."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in dense_inputs(2, 9, 9)]
    out, lse = flash_attn_func(*inputs, return_lse=True)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (dtype, statistics)
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum() + lse.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype: torch.dtype) -> None:
    """The bits of inputs cast by hand; float64 stays; gradients have the dtype of the leaves."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in dense_inputs(2, 40, 40)]
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(*leaves, causal=True)
    by_hand = dtype if dtype == torch.float64 else torch.bfloat16
    wanted = flash_attn_func(*(x.to(by_hand) for x in leaves), causal=True)
    assert out.dtype == by_hand
    assert torch.equal(out, wanted)
    got, ref = (torch.autograd.grad(x.sum(), leaves) for x in (out, wanted))
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(got, ref, strict=True))


def test_deterministic_gradients_are_bitwise_equal() -> None:
    inputs = [x.detach().float().requires_grad_() for x in dense_inputs(2, 300, 300)]
    runs = []
    for _ in range(3):
        out = flash_attn_func(*inputs, causal=True, deterministic=True)
        runs.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(torch.equal(a, b) for r in runs[1:] for a, b in zip(runs[0], r, strict=True))


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, lse = flash_attn_func(q * 1.5, k, v, causal=True, window_size=(9, 0), return_lse=True)
    return both(out, lse)


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    out, lse = flash_attn_varlen_func(q * 1.5, k, v, cu, cu, causal=True, return_lse=True)
    return both(out, lse)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_one_graph(dynamic: bool) -> None:
    """fullgraph, forward and backward, at several lengths: as eager to 1e-12."""
    torch._dynamo.reset()
    compiled = torch.compile(_dense, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for s in (16, 33, 50) if dynamic else (16, 33):
        inputs = dense_inputs(2, s, s, seed=s)
        values, grads = zip(
            *((y, torch.autograd.grad(y, inputs)) for y in (compiled(*inputs), _dense(*inputs))),
            strict=True,
        )
        assert worst([values, *zip(*grads, strict=True)]) < EXACT
    compiled = torch.compile(_packed, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([5, 0, 12], [20, 1]):
        inputs = [x[0] for x in dense_inputs(1, sum(lengths), sum(lengths))]
        cu = torch.tensor(cumulative(lengths))
        values, grads = zip(
            *((y, torch.autograd.grad(y, inputs))
              for y in (compiled(*inputs, cu), _packed(*inputs, cu))),
            strict=True,
        )  # fmt: skip
        assert worst([values, *zip(*grads, strict=True)]) < EXACT


def test_dynamic_shapes_compile_once() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_dense, fullgraph=True, backend=counter, dynamic=True)
    for s in (16, 33, 50):
        compiled(*dense_inputs(2, s, s))
    assert counter.frame_count == 1


def test_opcheck() -> None:
    """Schema, fake implementation, autograd registration and AOT dispatch of both ops."""
    settings = (0.5, -1, 0, True, "native")
    inputs = dense_inputs(2, 9, 9)
    op = torch.ops.ringfa3.attention.default
    torch.library.opcheck(op, (*inputs, None, None, None, *settings))
    packed = [x[0].detach().requires_grad_() for x in inputs]
    cu = torch.tensor([0, 3, 9])
    sink = torch.randn(packed[0].shape[1], dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(op, (*packed, sink, cu, cu, *settings))
    for x, s, c in ((inputs, None, None), (packed, sink.detach(), cu)):
        q, k, v = (y.detach() for y in x)
        out, lse = functional.attention(q, k, v, s, c, c, *settings)
        args = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, s, c, c, *settings)
        torch.library.opcheck(torch.ops.ringfa3.attention_backward.default, args)


def test_a_second_derivative_raises() -> None:
    """It must not count as zero."""
    inputs = dense_inputs(1, 5, 5)
    out = flash_attn_func(*inputs)
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once, not twice"):
        dq.sum().backward()


def test_a_forward_mode_derivative_raises() -> None:
    q, k, v = (x.detach() for x in dense_inputs(1, 5, 5))
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: flash_attn_func(q, k, x), (v,), (v,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="no forward-mode"):
            flash_attn_func(dual, k, v)


def test_tensors_without_data() -> None:
    """On the meta device, forward and backward; autocast does not know that device."""
    inputs = [x.detach().to("meta").requires_grad_() for x in dense_inputs(2, 5, 7)]
    out, lse = flash_attn_func(*inputs, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 5, 4, 8), (2, 4, 5))
    grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
    assert [(g.shape, g.device.type) for g in grads] == [(x.shape, "meta") for x in inputs]


def test_an_output_without_a_gradient_costs_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused lse gives dLSE None. An unused out gives the right gradients, float64, 1e-12."""
    given = []
    begin = reference.BackwardPass

    def noted(*args: object, **keywords: object) -> reference.BackwardPass:
        given.append(args[1])
        return begin(*args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "BackwardPass", noted)
    inputs = dense_inputs(1, 7, 7)
    out, lse = flash_attn_func(*inputs, return_lse=True)
    torch.autograd.grad(out.sum(), inputs)
    assert given == [None]
    out, lse = flash_attn_func(*inputs, return_lse=True)
    got = torch.autograd.grad(lse.sum(), inputs[:2])
    parts = attention(*(x[0] for x in inputs), mask([7], [7], -1, -1))
    wanted = torch.autograd.grad(parts[1].sum(), inputs[:2])
    assert worst(list(zip(got, wanted, strict=True))) < EXACT


@pytest.mark.parametrize(("selective", "runs"), [(True, 1), (False, 2)])
def test_selective_checkpointing_runs_the_forward_once(
    monkeypatch: pytest.MonkeyPatch, selective: bool, runs: int
) -> None:
    """The test counts forward calls of the reference; plain checkpointing runs it twice."""
    count = 0
    inner = reference.attend

    def counted(*args: object, **options: object) -> None:
        nonlocal count
        count += 1
        inner(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "attend", counted)
    inputs = dense_inputs(2, 12, 12)
    plain = torch.autograd.grad(_dense(*inputs), inputs)
    count = 0

    options = {"context_fn": keep_attention} if selective else {}
    y = checkpoint(_dense, *inputs, use_reentrant=False, **options)
    got = torch.autograd.grad(y, inputs)
    assert count == runs
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def call(q=(2, 6, 4, 8), k=(2, 6, 2, 8), v=None, dtype=torch.float32, k_dtype=None, **options):  # type: ignore[no-untyped-def]
    q, k, v = torch.zeros(q, dtype=dtype), torch.zeros(k), torch.zeros(v or k)
    k, v = k.to(k_dtype or dtype), v.to(dtype)
    return flash_attn_func(q, k, v, **options)


def varlen(cu_q: object, cu_k: object) -> object:
    q = torch.zeros(6, 2, 8)
    return flash_attn_varlen_func(q, q, q, cu_q, cu_k)  # type: ignore[arg-type]


def long(queries: int, keys: int) -> object:
    q, k = (torch.zeros(1, 1, 1, 8).expand(1, n, 1, 8) for n in (queries, keys))
    return flash_attn_func(q, k, k)


Q = torch.zeros(2, 6, 4, 8)
REFUSED: list[tuple[str, type[Exception], Callable[[], object]]] = [
    ("q must be a tensor", TypeError, lambda: flash_attn_func(None, Q, Q)),  # type: ignore[arg-type]
    ("v must be a tensor", TypeError, lambda: flash_attn_func(Q, Q, [1.0])),  # type: ignore[arg-type]
    ("q has shape", ValueError, lambda: call(q=(6, 4, 8))),
    ("k has shape", ValueError, lambda: call(k=(2, 6, 8))),
    ("q is torch.int32", TypeError, lambda: call(dtype=torch.int32)),
    ("k is torch.float64, q is torch.float32", TypeError, lambda: call(k_dtype=torch.float64)),
    ("k has head_dim 4, q has 8", ValueError, lambda: call(k=(2, 6, 2, 4))),
    ("head_dim 0", ValueError, lambda: call(q=(2, 6, 4, 0), k=(2, 6, 2, 0))),
    ("q has 4 heads, k has 3", ValueError, lambda: call(k=(2, 6, 3, 8))),
    ("q has 4 heads, k has 0", ValueError, lambda: call(k=(2, 6, 0, 8))),
    ("v has shape", ValueError, lambda: call(v=(2, 5, 2, 8))),
    ("k has batch 3, q has 2", ValueError, lambda: call(k=(3, 6, 2, 8))),
    ("q has stride", ValueError, lambda: flash_attn_func(Q.mT.contiguous().mT, Q, Q)),
    ("v has stride", ValueError, lambda: flash_attn_func(Q, Q, Q.mT.contiguous().mT)),
    ("q has layout torch.sparse_coo", ValueError, lambda: flash_attn_func(Q.to_sparse(), Q, Q)),
    ("k has 2147483648 tokens", ValueError, lambda: long(1, 1 << 31)),
    ("q has 2147483648 tokens", ValueError, lambda: long(1 << 31, 1)),
    ("k is on meta", ValueError, lambda: flash_attn_func(Q, Q.to("meta"), Q)),
    ("softmax_scale=0.0", ValueError, lambda: call(softmax_scale=0.0)),
    ("softmax_scale=-1", ValueError, lambda: call(softmax_scale=-1)),
    ("softmax_scale=1e-30: it must be", ValueError, lambda: call(softmax_scale=1e-30)),
    ("softmax_scale=nan", ValueError, lambda: call(softmax_scale=torch.nan)),
    ("window_size", ValueError, lambda: call(window_size=(-2, 0))),
    ("window_size has the number 92", ValueError, lambda: call(window_size=(1 << 63, 0))),
    ("precision", ValueError, lambda: call(precision="fp16")),
    ("precision='fp8' has no kernel for head_dim 8", ValueError, lambda: call(precision="fp8")),
    ("cu_seqlens_q", ValueError, lambda: varlen([1, 6], [0, 6])),
    ("cu_seqlens_q ends at 5", ValueError, lambda: varlen([0, 5], [0, 6])),
    ("cu_seqlens_k ends at 7", ValueError, lambda: varlen([0, 6], [0, 7])),
    ("cu_seqlens_k must not decrease", ValueError, lambda: varlen([0, 2, 6], [0, 7, 6])),
    ("cu_seqlens_q has 1 seq", ValueError, lambda: varlen([0, 6], [0, 3, 6])),
    ("cu_seqlens_k must be one-dim", ValueError, lambda: varlen([0, 6], torch.zeros(2, 1).int())),
    ("cu_seqlens_q must be one-dim", ValueError, lambda: varlen(torch.zeros(2), [0, 6])),
    ("integer, got torch.bool", ValueError, lambda: varlen(torch.tensor([False, True]), [0, 1])),
    ("cu_seqlens_q must start with 0", ValueError, lambda: varlen([], [0, 6])),
    ("cu_seqlens_k has the number", ValueError, lambda: varlen([0, 6], [0, 1 << 70])),
]


@pytest.mark.parametrize(("said", "kind", "wrong"), REFUSED, ids=[r[0] for r in REFUSED])
def test_errors_name_the_argument_and_its_value(
    said: str, kind: type[Exception], wrong: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=said):
        wrong()
