"""If this fails, sinks give wrong outputs or gradients. `sink=` of the functions, the ring and the
layer, against a softmax with one more column."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ringfa3 import (
    RingFA3Attention,
    flash_attn_func,
    flash_attn_varlen_func,
    plan_context,
    ring_attn_func,
)
from tests.support.dense import (
    Window,
    attention_with_sink,
    band,
    cumulative,
    mask,
    tensors,
    worst,
)
from tests.support.ranks import Ranks

EXACT = 1e-12  # float64
HEADS = (4, 2)
SINK = torch.tensor([0.5, -3.0, 6.0, 0.0], dtype=torch.float64)
LENGTHS = [7, 1, 0, 30]


def gradients(leaves: list[torch.Tensor], outputs: tuple[torch.Tensor, torch.Tensor],
              dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:  # fmt: skip
    loss = (outputs[0] * dout).sum() + (outputs[1] * dlse).sum()
    return list(torch.autograd.grad(loss, leaves))


def reference(
    q_lengths: list[int], k_lengths: list[int], causal: bool, window: Window
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """[q, k, v, sink], dout, dlse and [out, lse, dq, dk, dv, dsink], packed."""
    (q, _, _), dout, dlse = tensors(0, sum(q_lengths), HEADS, 8)
    (_, k, v), _, _ = tensors(1, sum(k_lengths), HEADS, 8)
    leaves = [x.requires_grad_() for x in (q, k, v, SINK.clone())]
    allowed = torch.from_numpy(mask(q_lengths, k_lengths, *band(causal, window)))
    outputs = attention_with_sink(*leaves, allowed)
    expected = [*(x.detach() for x in outputs), *gradients(leaves, outputs, dout, dlse)]
    return leaves, dout, dlse, expected


CASES = [
    ([9, 9], [9, 9], True, (-1, -1)),
    ([9, 9], [9, 9], False, (2, 1)),
    ([12, 12], [5, 5], True, (-1, -1)),  # seven rows of each see no key
    ([12], [5], True, (1, -1)),
]


@pytest.mark.parametrize(("q_lengths", "k_lengths", "causal", "window"), CASES, ids=str)
def test_a_batch(q_lengths: list[int], k_lengths: list[int], causal: bool, window: Window) -> None:
    """out, LSE and all gradients, 1e-12; a row without keys has output 0 and the sink as LSE."""
    leaves, dout, dlse, expected = reference(q_lengths, k_lengths, causal, window)
    b = len(q_lengths)
    q, k, v = (x.unflatten(0, (b, -1)) for x in leaves[:3])
    out, lse = flash_attn_func(
        q, k, v, causal=causal, window_size=window, return_lse=True, sink=leaves[3]
    )
    outputs = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    got = [*outputs, *gradients(leaves, outputs, dout, dlse)]
    assert worst(list(zip(got, expected, strict=True))) < EXACT
    hidden = torch.isclose(expected[1], SINK[:, None], rtol=0, atol=0).all(0)
    assert hidden.sum() == b * max(0, q_lengths[0] - k_lengths[0])
    assert not out.flatten(0, 1)[hidden].any()


@pytest.mark.parametrize("window", [(-1, -1), (3, -1)])
def test_packed_documents(window: Window) -> None:
    """out, LSE and all gradients, 1e-12."""
    leaves, dout, dlse, expected = reference(LENGTHS, LENGTHS, True, window)
    cu = cumulative(LENGTHS)
    outputs = flash_attn_varlen_func(
        *leaves[:3], cu, cu, causal=True, window_size=window, return_lse=True, sink=leaves[3]
    )
    assert isinstance(outputs, tuple)
    got = [*outputs, *gradients(leaves, outputs, dout, dlse)]
    assert worst(list(zip(got, expected, strict=True))) < EXACT


def _ring(group: dist.ProcessGroup, window: Window) -> tuple[float, torch.Tensor]:
    """The largest error of this rank's tokens, and its gradient of the sink."""
    inputs, dout, dlse, expected = reference(LENGTHS, LENGTHS, True, window)
    plan = plan_context(cumulative(LENGTHS), group, window_size=window)
    leaves = [plan.shard(x.detach()).requires_grad_() for x in inputs[:3]]
    leaves.append(SINK.clone().requires_grad_())
    outputs = ring_attn_func(*leaves[:3], plan, return_lse=True, sink=leaves[3])
    assert isinstance(outputs, tuple)
    *grads, dsink = gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))
    wanted = [plan.shard(x, int(i == 1)) for i, x in enumerate(expected[:5])]
    layer = RingFA3Attention(*HEADS, 8, group=group)
    alike = (layer(*leaves[:3], plan, sink=leaves[3]), outputs[0])
    return worst([*zip((*outputs, *grads), wanted, strict=True), alike]), dsink


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1)])
def test_a_ring(ranks: Ranks, world: int, window: Window) -> None:
    """out, LSE, dQ, dK, dV of every rank, and dsink summed over ranks, 1e-12; the layer as well."""
    results = ranks.run(world, _ring, window)
    assert max(error for error, _ in results) < EXACT
    *_, expected = reference(LENGTHS, LENGTHS, True, window)[3]
    assert worst([(sum(dsink for _, dsink in results), expected)]) < EXACT


def test_the_layer_on_one_device() -> None:
    """A batch, against `flash_attn_func`, exactly."""
    q, k, v = (torch.randn(2, 9, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    out = RingFA3Attention(4, 2, 8)(q, k, v, sink=SINK)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True, sink=SINK))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_8_bits(precision: str) -> None:
    """The output without sinks times exp(LSE - LSE'), 1e-6."""
    q, k, v = (torch.randn(1, 300, h, 64) for h in (4, 2, 2))
    sink = SINK.float()
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, precision=precision)
    got, with_sink = flash_attn_func(
        q, k, v, causal=True, return_lse=True, precision=precision, sink=sink
    )
    assert worst([(with_sink, torch.logaddexp(lse, sink[:, None]))]) < 1e-6
    assert worst([(got, out * torch.exp(lse - with_sink).transpose(1, 2)[..., None])]) < 1e-6


def test_bfloat16_rounds_once() -> None:
    """Each number within 2^-8 of its size, + 1e-6, of float64: the reference counts the sink before
    it rounds."""
    (q, k, v), _, _ = tensors(2, 200, HEADS, 32)
    allowed = torch.from_numpy(mask([200], [200], -1, 0))
    half = [x.bfloat16() for x in (q, k, v)]
    exact, _ = attention_with_sink(*(x.double() for x in half), SINK, allowed)
    got = flash_attn_func(*(x[None] for x in half), causal=True, sink=SINK.float())
    assert isinstance(got, torch.Tensor)
    assert ((got[0] - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


X = torch.randn(1, 5, 4, 8)
REFUSED: list[tuple[str, type[Exception], Callable[[], object]]] = [
    ("sink must be a tensor", TypeError, lambda: flash_attn_func(X, X, X, sink=1.0)),  # type: ignore[arg-type]
    ("sink is torch.float64", TypeError, lambda: flash_attn_func(X, X, X, sink=SINK)),
    ("sink has shape", ValueError, lambda: flash_attn_func(X, X, X, sink=torch.zeros(2))),
    (
        "sink has shape",
        ValueError,
        lambda: ring_attn_func(X[0], X[0], X[0], plan_context(5), sink=torch.zeros(2)),
    ),
]


@pytest.mark.parametrize(("text", "kind", "call"), REFUSED)
def test_errors_name_the_sink(text: str, kind: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()
