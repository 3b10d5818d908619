"""If this fails, `torch.func` gives wrong gradients of attention. `torch.func` and attention:
transforms equal loops of plain autograd; others are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from ringfa3 import (
    RingFA3Attention,
    flash_attn_func,
    flash_attn_varlen_func,
    plan_context,
    ring_attn_func,
)
from tests.support.dense import worst
from tests.support.ranks import Ranks

Call = Callable[..., torch.Tensor]
EXACT = 1e-13  # float64
CU = [0, 2, 7]
PLAN = plan_context(CU, (0, 1))
SINK = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def samples(count: int = 3) -> list[torch.Tensor]:
    """q (count, t, h, d), k and v."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(count, 7, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    layer = RingFA3Attention(4, 2, 8)
    return functional_call(layer, {}, (q[None], k[None], v[None]))[0]


def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    inputs = (x[None] for x in (q, k, v))
    out, lse = flash_attn_func(*inputs, sink=SINK + q.sum(), return_lse=True)
    return out[0] * lse[0].mT[..., None]


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = flash_attn_varlen_func(q, k, v, CU, CU, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = ring_attn_func(PLAN.unshard(PLAN.shard(q)), k, v, PLAN)
    assert isinstance(out, torch.Tensor)
    return out


CALLS = pytest.mark.parametrize("call", [dense, with_lse, packed, ring])


def loss_of(call: Call) -> Call:
    return lambda *inputs: call(*inputs).sin().sum()


def plain(call: Call, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss_of(call)(*leaves), leaves)


@CALLS
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients(call: Call) -> None:
    """grad, vjp and jacrev against `torch.autograd.grad`, float64, 1e-13."""
    inputs = [x[0] for x in samples()]
    wanted = plain(call, inputs)
    got = grad(loss_of(call), (0, 1, 2))(*inputs)
    out, pull = vjp(call, *inputs)
    rows = jacrev(lambda q: call(q, *inputs[1:]).sum((1, 2)))(inputs[0])
    q = inputs[0].clone().requires_grad_()
    (summed,) = torch.autograd.grad(call(q, *inputs[1:]).sum(), q)
    pairs = [*zip(got, wanted, strict=True), *zip(pull(out.cos()), wanted, strict=True)]
    assert worst([*pairs, (rows.sum(0), summed)]) < EXACT


@CALLS
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_per_sample(call: Call) -> None:
    """vmap over grad, and grad of a sum over vmap, against a loop, float64, 1e-13."""
    inputs = samples()
    each = [plain(call, [x[i] for x in inputs]) for i in range(3)]
    wanted = [torch.stack(g) for g in zip(*each, strict=True)]
    per_sample = vmap(grad(loss_of(call), (0, 1, 2)))(*inputs)
    summed = grad(lambda *x: vmap(loss_of(call))(*x).sum(), (0, 1, 2))(*inputs)
    assert worst([*zip(per_sample, wanted, strict=True), *zip(summed, wanted, strict=True)]) < EXACT


def test_an_outer_gradient_passes_through_a_transform() -> None:
    """vjp with respect to k of a call whose q is a leaf of autograd, to the bit."""
    q, k, v = (x[0] for x in samples())
    leaf = q.clone().requires_grad_()
    value, _ = vjp(lambda k: dense(leaf, k, v), k)
    (got,) = torch.autograd.grad(value.sin().sum(), leaf)
    assert torch.equal(got, plain(dense, [q, k, v])[0])


TWICE, FORWARD = "can be differentiated once, not twice", "has no forward-mode derivative"
REFUSED: dict[str, tuple[str, Callable[[Call, torch.Tensor], Any]]] = {
    "grad of grad": (TWICE, lambda f, q: grad(lambda q: grad(f)(q).sum())(q)),
    "jacrev of jacrev": (TWICE, lambda f, q: jacrev(jacrev(f))(q)),
    "grad of vmap of grad": (TWICE, lambda f, q: grad(lambda q: vmap(grad(f))(q[None]).sum())(q)),
    "jvp": (FORWARD, lambda f, q: jvp(f, (q,), (q,))),
    "jacfwd": (FORWARD, lambda f, q: jacfwd(f)(q)),
    "hessian": (FORWARD, lambda f, q: hessian(f)(q)),
    "jvp of vjp's value": (FORWARD, lambda f, q: jvp(lambda q: vjp(f, q)[0], (q,), (q,))),
    "grad of jvp": (FORWARD, lambda f, q: grad(lambda q: jvp(f, (q,), (q,))[1])(q)),
}


@pytest.mark.parametrize("transform", REFUSED)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_second_and_forward_derivatives_raise(transform: str) -> None:
    """They must not count as zero."""
    said, run = REFUSED[transform]
    q, k, v = (x[0] for x in samples())
    for call in (dense, packed, lambda q, k, v: ring_attn_func(q, k, v, PLAN)):
        with pytest.raises((RuntimeError, NotImplementedError), match=said):
            run(lambda q, call=call: loss_of(call)(q, k, v), q)


def test_a_compiled_transform() -> None:
    """grad inside of one graph: the bits of the eager transform."""
    torch._dynamo.reset()
    q, k, v = (x[0] for x in samples())
    function = grad(lambda q: loss_of(dense)(q, k, v))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), function(q))


def _saved(group: dist.ProcessGroup) -> None:
    layer = RingFA3Attention(4, 2, 8, group=group)
    with pytest.raises(TypeError, match=r"cannot be pickled: save model.state_dict\(\), or set"):
        torch.save(torch.nn.Sequential(layer), io.BytesIO())
    assert copy.copy(layer).group is copy.deepcopy(layer).group is group
    layer.group = None
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).head_dim == 8


def test_saving_a_layer_with_a_group_names_the_remedy(ranks: Ranks) -> None:
    ranks.run(1, _saved)
