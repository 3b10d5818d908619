"""If this fails, offloaded activations change gradients. Offloaded activations: gradients to the
last bit, one ring per block, when copies run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.fake_pinning import fake_pinning
from tests.train.model.test_transformer import VOCABULARY, packed_sample
from train.config import MemoryConfig, ModelConfig
from train.data.batches import make_batch
from train.model.offload import Copies, HostPool
from train.model.transformer import LanguageModel, Transformer

LAYERS = 4
LENGTHS = [40, 1, 24]
WAYS = [("full", "residual"), ("attention-saving", "residual"), ("attention-saving", "all")]


def build(
    recompute: str, offload: str = "none", dtype=torch.float32, **layers: int | None
) -> LanguageModel:
    model = ModelConfig(n_layers=LAYERS, dim=32, ffn_dim=48, zero_init=False)
    memory = MemoryConfig(recompute, mlp_chunk=16, offload=offload, **layers)
    transformer = Transformer(model, VOCABULARY, 3, memory, residual=dtype, tokens=sum(LENGTHS))
    return LanguageModel(transformer, dtype, loss_chunk=50)


def batch_of(lengths: list[int] = LENGTHS):
    return make_batch(packed_sample(lengths), None, "zigzag")


def gradients(model: LanguageModel, loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()))


class CountRings(TorchDispatchMode):
    """Counts forwards of the ring op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls += op is torch.ops.ringfa3.ring_attention.default
        return op(*args, **(kwargs or {}))


@dataclass(eq=False)
class LateCopy:
    """A copy that has been issued. Whoever issues it must keep its source until it has ended."""

    to: Tensor
    source: Callable[[], Tensor | None]
    fetches: bool  # to the device
    done: bool = False


class LateCopies(Copies):
    """The latest moment that a stream allows: a copy runs when work first waits for it."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.issued: list[LateCopy] = []
        self.ahead: list[int] = []  # fetches that have been issued and not waited for, at each wait

    @property
    def fetches(self) -> list[LateCopy]:
        return [copy for copy in self.issued if copy.fetches]

    def copy(self, to: Tensor, source: Tensor) -> LateCopy:
        fetches = any(source.data_ptr() == buffer.data_ptr() for buffer in self.pool.buffers)
        if fetches:
            to.fill_(torch.nan)
        kept = (lambda: source) if fetches else weakref.ref(source)
        self.issued.append(LateCopy(to, kept, fetches))
        return self.issued[-1]

    def wait(self, ticket: LateCopy) -> None:
        if ticket.fetches:
            self.ahead.append(sum(not copy.done for copy in self.fetches))
        for copy in self.issued[: self.issued.index(ticket) + 1]:  # a stream keeps the order
            if not copy.done:
                source = copy.source()
                assert source is not None, "the source was freed before its copy"
                copy.to.copy_(source)
                copy.done = True


def use_late_copies(model: LanguageModel) -> LateCopies:
    offload = model.transformer.offload
    offload.copies = LateCopies(offload.pool)
    return offload.copies


@pytest.mark.parametrize(
    ("recompute", "offload", "dtype"),
    [*((*way, torch.float32) for way in WAYS), (*WAYS[-1], torch.bfloat16)],
)
def test_offload_changes_no_bit_and_no_number_of_rings(recompute, offload, dtype):
    """Three times forward and backward, against the same model without offload. Rings: one a layer
    each time, two where the recomputation repeats them. Copies run as late as they may."""
    found = []
    for way in ("none", offload):
        model = build(recompute, way, dtype)
        if way != "none":
            use_late_copies(model)
        with CountRings() as rings:
            found.append([gradients(model, model(batch_of()).sum()) for _ in range(3)])
        assert rings.calls == 3 * LAYERS * (2 if recompute == "full" else 1)
    for off, on in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
    assert all(grad.isfinite().all() for grad in found[1][-1])


@pytest.mark.parametrize(("recompute", "offload"), WAYS)
def test_a_block_is_fetched_while_the_next_one_runs_backward(recompute, offload):
    """When the backward of a block waits for its tensors, those of the block before are issued."""
    model = build(recompute, offload)
    copies = use_late_copies(model)
    gradients(model, model(batch_of()).sum())
    tensors = 3 if offload == "all" else 1
    assert len(copies.fetches) == (LAYERS - 1) * tensors
    # The first block has none before it. Where a block has three, it waits for them in turn.
    expected = []
    for before in (tensors, tensors, 0):
        expected += [own + before for own in range(tensors, 0, -1)]
    assert copies.ahead == expected


@pytest.mark.parametrize(("recompute", "offload"), WAYS)
def test_between_forward_and_backward_tensors_are_on_the_host(recompute, offload):
    """Of the inputs of 4 blocks, and of attention's outputs, those of the last block and the source
    of a block's copies are on the device; with offload=none all are that a checkpoint keeps."""
    for way in ("none", offload):
        model, inputs, outputs = build(recompute, way), [], []

        def remember(to: list) -> Any:
            return lambda _, given, out: to.append(StorageWeakRef(out.untyped_storage()))

        for block in model.transformer.blocks[:-1]:
            block.register_forward_hook(remember(inputs))  # the input of the next block
        for block in model.transformer.blocks:
            block.attention.attend.register_forward_hook(remember(outputs))
        loss = model(batch_of()).sum()
        here = [[not ref.expired() for ref in refs] for refs in (inputs, outputs)]
        kept = recompute == "attention-saving"
        if way == "none":
            assert here == [[True] * 3, [kept] * 4]
        else:
            of_all = [False, False, True, True]
            assert here == [[False, True, True], of_all if way == "all" else [kept] * 4]
        loss.backward()


def test_the_pool_is_allocated_once():
    """By the first of three steps: input, O and LSE of every block but the last, to the byte."""
    model = build("attention-saving", "all")
    pool, tokens = model.transformer.offload.pool, sum(LENGTHS)
    sizes = []
    for lengths in ([5], LENGTHS, [30, 3]):  # priming uses few tokens
        gradients(model, model(batch_of(lengths)).sum())
        assert not model.transformer.offload._sources
        sizes.append(sorted(len(buffer) for buffer in pool.buffers))
    row_bytes = [32 * 4, 32 * 4, 4 * 4]
    assert (
        sizes[0] == sizes[1] == sizes[2] == sorted((LAYERS - 1) * [n * tokens for n in row_bytes])
    )
    with pytest.raises(ValueError, match="66 tokens do not fit buffers for 65"):
        model(batch_of([66]))


@pytest.mark.parametrize(("recompute", "offload"), WAYS)
def test_the_first_layers_may_offload_alone(recompute, offload):
    """2 of 4: gradients to the last bit, and host buffers for 2 blocks."""
    model, plain = build(recompute, offload, offload_layers=2), build(recompute)
    use_late_copies(model)
    got, expected = (gradients(m, m(batch_of()).sum()) for m in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    buffers = model.transformer.offload.pool.buffers
    assert len(buffers) == 2 * (3 if offload == "all" else 1)


@pytest.mark.parametrize(("recompute", "offload"), [("full", "none"), *WAYS])
def test_the_first_layers_may_recompute_alone(recompute, offload):
    """3 of 4: gradients to the last bit, and host buffers for 2 blocks.

    After the forward the device holds the activations of the last block: its output of gate.
    """
    model = build(recompute, offload, recompute_layers=3)
    plain, gates = build(recompute), []
    for block in model.transformer.blocks:
        block.mlp.chunk = None
        remember = lambda _, given, out: gates.append(StorageWeakRef(out.untyped_storage()))  # noqa: E731
        block.mlp.gate.register_forward_hook(remember)
    for block in plain.transformer.blocks:
        block.mlp.chunk = None
    with CountRings() as rings:
        loss = model(batch_of()).sum()
        assert [not gate.expired() for gate in gates] == [False, False, False, True]
        got = gradients(model, loss)
    assert rings.calls == LAYERS + (3 if recompute == "full" else 0)
    expected = gradients(plain, plain(batch_of()).sum())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if offload != "none":
        assert len(model.transformer.offload.pool.buffers) == 2 * (3 if offload == "all" else 1)


def test_two_graphs_share_no_buffer():
    """Two forwards before two backwards, the first graph last; a third graph is dropped."""
    model, plain = build("attention-saving", "all"), build("attention-saving")
    batches = [batch_of(), batch_of([65])]
    expected = [gradients(plain, plain(batch).sum()) for batch in batches]
    for _ in range(2):
        losses = [model(batch).sum() for batch in batches]
        model(batches[0])
        got = [gradients(model, loss) for loss in reversed(losses)][::-1]
        for one, other in zip(got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(model.transformer.offload.pool.buffers) <= 3 * 3 * (LAYERS - 1)


def test_a_graph_may_run_backward_twice():
    """As without offload: where attention is recomputed too."""
    model, plain = build("full", "residual"), build("full")
    loss, other = (m(batch_of()).sum() for m in (model, plain))
    for retain in (True, False):
        got = torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
        expected = torch.autograd.grad(other, list(plain.parameters()), retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_buffer_is_free_when_it_is_given_back():
    pool, like = HostPool(8), torch.zeros(4, 6)
    one, other = pool.take(like, 4), pool.take(like, 4)
    assert len(one) == 8 * 24
    assert one.data_ptr() != other.data_ptr()
    pool.give(one)
    assert pool.take(like, 4).data_ptr() == one.data_ptr()


def test_buffers_for_a_gpu_are_pinned_at_their_exact_size():
    """Until the pool is gone; on the GPU of the tensors."""
    device = torch.device("cuda", 1)
    like = SimpleNamespace(nbytes=4 * 24, device=device)
    with fake_pinning(device) as memory:
        pool = HostPool(7)
        pool.give(pool.take(like, 4))
        pool.take(like, 4)
        assert list(memory.pinned.values()) == [7 * 24]
        del pool
        assert not memory.pinned
