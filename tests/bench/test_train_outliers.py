"""If this fails, the published training runs with outliers show another effect than that of the
backward. The training runs with outliers in K: what they plant, and the backward that they
contrast."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import train_outliers
from benchmarks.train_per_tensor import native_backward
from ringfa3 import plan_context, ring_attn_func
from ringfa3.ring import op
from train.config import ModelConfig
from train.model import transformer
from train.model.transformer import Attention, Transformer


def test_weights_are_those_of_the_trainer_but_for_the_outliers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, qk_norm=False, qkv_bias=True)
    modules = [Transformer(model, 50, 7)]
    monkeypatch.setattr(transformer, "initialise", train_outliers.with_outliers)
    modules.append(Transformer(model, 50, 7))
    plain, planted = (dict(x.named_parameters()) for x in modules)
    changed = {name for name in plain if not torch.equal(plain[name], planted[name])}
    layers = [name for name, x in modules[1].named_modules() if isinstance(x, Attention)]
    assert changed == {f"{name}.wk.{part}" for name in layers for part in ("weight", "bias")}
    for name in layers:
        more = planted[f"{name}.wk.weight"] / plain[f"{name}.wk.weight"]
        assert more[0].tolist() == pytest.approx([30] * 32)
        assert (more[1:] == 1).all()
        assert planted[f"{name}.wk.bias"].view(2, 8).tolist() == [[0] * 7 + [100]] * 2


def test_the_backward_from_native_scores_is_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key times 100: RingFA3's own backward has 1,000 times less."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(256, 1, 64) for _ in range(4))
    k[5] *= 100
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = partial(ring_attn_func, plan=plan_context(256, (0, 1)), precision="fp8")
    norms = []
    for backward in (op.straight_through, native_backward):
        monkeypatch.setattr(op, "straight_through", backward)
        norms.append(torch.autograd.grad(attend(*leaves), leaves, dout)[0].norm())
    assert norms[1] > 1000 * norms[0]
