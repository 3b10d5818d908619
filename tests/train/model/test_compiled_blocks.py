"""If this fails, compiled blocks compute something else. ``train.compile=block`` against the same
model uncompiled."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.train.model.test_transformer import SMALL, VOCABULARY, packed_sample
from train.config import MemoryConfig, ModelConfig
from train.data.batches import make_batch
from train.model import compiled
from train.model.transformer import LanguageModel, Transformer

PLANS = ([37, 1, 64, 2, 51], [155], [90, 65], [3, 152])  # of as many tokens


def build(memory: MemoryConfig, compile: bool, dtype: torch.dtype) -> LanguageModel:
    config = ModelConfig(**SMALL, zero_init=False)
    transformer = Transformer(config, VOCABULARY, 3, memory, compile=compile)
    return LanguageModel(transformer, dtype, loss_chunk=50)


def step(model: LanguageModel, lengths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses of all tokens, and the gradients of all parameters."""
    losses = model(make_batch(packed_sample(lengths), None, "zigzag"))
    return losses.detach(), torch.autograd.grad(losses.sum(), list(model.parameters()))


def attentions(graph: fx.GraphModule) -> int:
    """Nodes of attention in a graph and in the graphs inside it."""
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    return sum(node.target is torch.ops.ringfa3.ring_attention.default for node in nodes)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that are compiled, by AOTAutograd and without code generation."""
    seen: list[fx.GraphModule] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]):
        seen.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    return seen


@pytest.mark.parametrize(
    ("recompute", "chunk", "plans"),
    [
        pytest.param("none", None, 4, marks=pytest.mark.soak),
        pytest.param("none", 40, 4, marks=pytest.mark.soak),
        pytest.param("full", None, 4, marks=pytest.mark.soak),
        pytest.param("attention-saving", 40, 4, marks=pytest.mark.soak),
        ("attention-saving", 40, 1),
    ],
)
def test_losses_and_gradients_are_those_of_the_uncompiled_model(graphs, recompute, chunk, plans):
    """float32: 1e-6 of the largest value, of one plan or four. fullgraph=True: a break raises.

    Attention is one node. Two blocks share a graph; the second plan compiles anew, later ones not.
    """
    memory = MemoryConfig(recompute, chunk)
    models = [build(memory, compile, torch.float32) for compile in (True, False)]
    for lengths in PLANS[:plans]:
        (losses, got), (expected, wanted) = (step(model, lengths) for model in models)
        for one, other in zip([losses, *got], [expected, *wanted], strict=True):
            assert float((one - other).abs().max()) <= 1e-6 * float(other.abs().max())
    of_blocks = [attentions(graph) for graph in graphs if attentions(graph)]
    assert of_blocks == [1] * min(plans, 2)
    # of the last norm; of the loss and its gradient: a chunk, then chunks of any number of tokens
    assert 3 <= len(graphs) - len(of_blocks) <= 5


@pytest.mark.soak
def test_bfloat16_gradients_are_as_exact(graphs):
    """Under autocast, with a float32 residual: errors against float32 at most 1.2x the eager's."""
    memory = MemoryConfig("attention-saving", 40)
    _, exact = step(build(memory, False, torch.float32), PLANS[0])
    errors = []
    for compile in (True, False):
        _, got = step(build(memory, compile, torch.bfloat16), PLANS[0])
        pairs = zip(got, exact, strict=True)
        errors.append(torch.stack([(g - e).norm() / e.norm() for g, e in pairs]))
    assert (errors[0] <= 1.2 * errors[1]).all()
    assert sum(map(attentions, graphs)) == 1


def test_an_evaluation_compiles_nothing(graphs):
    """Its samples have many lengths."""
    model = build(MemoryConfig(), True, torch.float32)
    with torch.no_grad():
        losses = model(make_batch(packed_sample(PLANS[0]), None, "zigzag"))
    torch.testing.assert_close(
        losses, step(build(MemoryConfig(), False, torch.float32), PLANS[0])[0]
    )
    assert not graphs


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recompute", ["none", "attention-saving"])
def test_generated_code_computes_the_same(recompute, tmp_path, monkeypatch):
    """inductor, float32: losses 1e-6 of the largest, gradients 1e-5, as their sums have another
    order. Needs g++.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    memory = MemoryConfig(recompute, None)
    models = [build(memory, compile, torch.float32) for compile in (True, False)]
    for lengths in PLANS[:2]:
        (losses, got), (expected, wanted) = (step(model, lengths) for model in models)
        for one, other in zip([losses, *got], [expected, *wanted], strict=True):
            bound = 1e-6 if other is expected else 1e-5
            assert float((one - other).abs().max()) <= bound * float(other.abs().max())
