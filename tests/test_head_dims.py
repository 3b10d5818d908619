"""If this fails, a head dim gives wrong results on the CPU, or is refused although it works. Head
dims on the CPU: v narrower than q and k, odd ones, which kernel runs which, refusals.

Letters: d head dim of q and k, d_v of v and out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from ringfa3 import (
    Mask,
    RingFA3Attention,
    flash_attn_func,
    flash_attn_mask_func,
    flash_attn_varlen_func,
    plan_context,
    ring_attn_func,
)
from ringfa3.kernels import dispatch
from ringfa3.planning.tiling import plan_local
from tests.support.dense import (
    attention,
    attention_with_sink,
    cumulative,
    mask,
    tensors,
    worst,
)
from tests.support.ranks import Ranks
from tests.test_sinks import EXACT, HEADS, SINK, gradients

LENGTHS = [7, 1, 0, 30]
HEAD_DIMS = [(24, 8), (12, 8), (5, 5), (100, 96)]

Problem = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]


def problem(d: int, d_v: int, sink: bool) -> Problem:
    """[q, k, v, (sink)], dout, dlse, and [out, lse] with the gradients; packed and causal."""
    (q, k, v), dout, dlse = tensors(0, sum(LENGTHS), HEADS, d)
    v, dout = v[..., :d_v], dout[..., :d_v]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *((SINK,) if sink else ()))]
    allowed = torch.from_numpy(mask(LENGTHS, LENGTHS, -1, 0))
    outputs = attention_with_sink(*leaves, allowed) if sink else attention(*leaves, allowed)
    grads = gradients(leaves, outputs, dout, dlse)
    return leaves, dout, dlse, [*(x.detach() for x in outputs), *grads]


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_one_device(head_dims: tuple[int, int], sink: bool) -> None:
    """out with d_v columns, LSE and all gradients of packed documents; float64, 1e-12."""
    leaves, dout, dlse, expected = problem(*head_dims, sink)
    cu = cumulative(LENGTHS)
    options = {"sink": leaves[3]} if sink else {}
    outputs = flash_attn_varlen_func(*leaves[:3], cu, cu, causal=True, return_lse=True, **options)
    assert isinstance(outputs, tuple)
    got = [*outputs, *gradients(leaves, outputs, dout, dlse)]
    assert worst(list(zip(got, expected, strict=True))) < EXACT


Asked = set[tuple[str, int, int | None]]


@contextmanager
def selections() -> Iterator[Asked]:
    """The (direction, d, d_v) for which kernels are selected; the PyTorch fallback runs."""
    asked: Asked = set()

    def select(
        direction: str, q: torch.Tensor, *_: object, v_dim: int | None = None, **__: object
    ) -> None:
        asked.add((direction, q.shape[-1], v_dim))

    with mock.patch.object(dispatch, "_select_unit", select):
        yield asked


def _ring(group: dist.ProcessGroup, d: int, d_v: int) -> tuple[float, torch.Tensor, Asked]:
    """The largest error of this rank's tokens, its gradient of the sink, and `selections`."""
    inputs, dout, dlse, expected = problem(d, d_v, sink=True)
    plan = plan_context(cumulative(LENGTHS), group)
    leaves = [plan.shard(x.detach()).requires_grad_() for x in inputs[:3]]
    leaves.append(SINK.clone().requires_grad_())
    with selections() as asked:
        outputs = ring_attn_func(*leaves[:3], plan, return_lse=True, sink=leaves[3])
        assert isinstance(outputs, tuple)
        *grads, dsink = gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))
    wanted = [plan.shard(x, int(i == 1)) for i, x in enumerate(expected[:5])]
    layer = RingFA3Attention(*HEADS, d, group=group)
    alike = (layer(*leaves[:3], plan, sink=leaves[3]), outputs[0])
    return worst([*zip((*outputs, *grads), wanted, strict=True), alike]), dsink, asked


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("head_dims", HEAD_DIMS[:2], ids=str)
def test_a_ring(ranks: Ranks, world: int, head_dims: tuple[int, int]) -> None:
    """out, LSE, dQ, dK, dV of every rank, and dsink summed over ranks; float64, 1e-12. Kernels are
    selected by the head dim of V without its columns of zeros."""
    results = ranks.run(world, _ring, *head_dims)
    assert max(error for error, *_ in results) < EXACT
    dsink = sum(x for _, x, _ in results)
    assert worst([(dsink, problem(*head_dims, sink=True)[3][-1])]) < EXACT
    for *_, asked in results:
        assert asked == {("forward", *head_dims), ("backward", *head_dims)}


def test_the_layer_on_one_device() -> None:
    """A batch, against `flash_attn_func`, exactly; and the shapes that a compiler sees."""
    q, k, v = (torch.randn(2, 9, h, d) for h, d in ((4, 24), (2, 24), (2, 8)))
    out = RingFA3Attention(4, 2, 24)(q, k, v)
    assert out.shape == (2, 9, 4, 8)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    with FakeTensorMode() as mode:
        fake = flash_attn_func(*(mode.from_tensor(x) for x in (q, k, v)), causal=True)
    assert isinstance(fake, torch.Tensor)
    assert (fake.shape, fake.stride()) == (out.shape, out.stride())


def test_multiples_of_8_run_on_the_next_larger_kernel() -> None:
    """Every head dim up to 264, in 16 bits; in 8 bits 64, 128 and 256 alone."""
    for d in range(1, 265):
        wanted = next((n for n in (64, 128, 256) if n >= d), None) if d % 8 == 0 else None
        own = d if d in (64, 128, 256) else None
        for direction in ("forward", "backward"):
            unit = dispatch.narrowest_unit(direction, torch.float16, d)
            assert (unit and unit.head_dim) == wanted, d
            assert unit is None or (unit.direction, unit.dtype) == (direction, "float16")
        for args in (("quantise", torch.bfloat16, d), ("forward", torch.bfloat16, d, "fp8")):
            unit = dispatch.narrowest_unit(*args)
            assert (unit and unit.head_dim) == own, d
            assert unit is None or unit.precision == (*args, "native")[3]


def test_192_and_128_have_kernels_of_their_own() -> None:
    """Other narrow V run on the next larger kernel."""
    for dtype in (torch.bfloat16, torch.float16):
        for head_dims in ((192, 128), (192, 120), (192, 136), (184, 128), (256, 128), (192, 192)):
            wanted = head_dims if head_dims == (192, 128) else (256, 256)
            for direction in ("forward", "backward"):
                unit = dispatch.narrowest_unit(direction, dtype, head_dims[0], v_dim=head_dims[1])
                assert unit is not None
                assert (unit.head_dim, unit.v_dim) == wanted, (direction, head_dims)


def test_every_function_selects_by_the_head_dim_of_v() -> None:
    """So that the kernels for 192 and 128 run wherever their head dims are given."""
    q, k, v = (torch.randn(6, 2, d, requires_grad=True) for d in (192, 192, 128))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: flash_attn_func(q[None], k[None], v[None]),
        lambda: flash_attn_varlen_func(q, k, v, [0, 6], [0, 6]),
        lambda: flash_attn_mask_func(q, k, v, Mask.documents([0, 2, 6])),
        lambda: ring_attn_func(q, k, v, plan_context(6, (0, 1))),
        lambda: RingFA3Attention(2, 2, 192)(q[None], k[None], v[None]),
    ]
    for call in calls:
        with selections() as asked:
            call().sum().backward()
        assert asked == {("forward", 192, 128), ("backward", 192, 128)}


def test_the_fallback_is_named_once_and_only_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU of Hopper's capability, as far as the dispatch can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(dispatch, "_build_problem", lambda _: None)
    for cached in (dispatch._unit_for, dispatch.log_once):
        cached.cache_clear()
    device = torch.device("cuda", 0)
    plan = plan_local(np.array([3]), np.array([3]), -1, 0)
    said = []
    for d in (40, 96, 192, 248, 100, 100, 260):
        q = SimpleNamespace(is_cuda=True, device=device, dtype=torch.bfloat16, shape=(3, 1, d))
        dispatch.select_forward(q, plan)  # type: ignore[arg-type]
        dispatch.select_backward(q)  # type: ignore[arg-type]
        said.append(capsys.readouterr().err)
    dispatch._unit_for.cache_clear()  # its device is no GPU here
    assert said[:4] == [""] * 4
    assert said[4].count("ringfa3: using the PyTorch fallback") == 1
    assert "no fused kernel for head_dim 100 on H200" in said[4]
    assert said[5] == ""
    assert "head_dim 260" in said[6]


def attend(
    head_dims: tuple[int, int, int], precision: str = "native"
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_func of q, k, v with these head dims."""
    return flash_attn_func(*(torch.zeros(1, 5, 2, d) for d in head_dims), precision=precision)


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("k has head_dim 8, q has 16", lambda: attend((16, 8, 8))),
    ("v has head_dim 32, q has 16: give 16, or a smaller", lambda: attend((16, 16, 32))),
    ("v has head_dim 12, q has 16: .* multiple of 8", lambda: attend((16, 16, 12))),
    ("v has head_dim 0", lambda: attend((16, 16, 0))),
    ("'fp8' has no kernel for head_dim 96: .* 64, 128, 256", lambda: attend((96,) * 3, "fp8")),
    ("'int8' has no kernel for head_dim 80: .* 64, 128, 256", lambda: attend((80,) * 3, "int8")),
    ("'fp8': v has head_dim 64, q has 128: add col", lambda: attend((128, 128, 64), "fp8")),
]


@pytest.mark.parametrize(("text", "call"), REFUSED)
def test_errors_name_the_head_dims(text: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=text):
        call()
