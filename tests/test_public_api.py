"""If this fails, code that users have written against RingFA3 breaks. The public names, signatures
and options. They may be added to, not renamed, moved or removed."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable

import pytest

import ringfa3
from ringfa3.bench.__main__ import parser as bench_parser
from ringfa3.build.__main__ import parser as build_parser
from ringfa3.validation import LAYOUTS, PRECISIONS, TRANSPORTS

NAMES = {
    "ContextPlan",
    "Mask",
    "RingError",
    "RingFA3Attention",
    "flash_attn_func",
    "flash_attn_mask_func",
    "flash_attn_varlen_func",
    "keep_attention",
    "plan_context",
    "ring_attn_func",
    "trees",
}


# Each function below has the parameters of the public one: names, order, defaults.
def flash_attn_func(
    q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
    return_lse=False, precision="native", sink=None, **neutral,
): ...  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False, return_lse=False,
    precision="native", sink=None, **neutral,
): ...  # fmt: skip


def flash_attn_mask_func(
    q, k, v, mask, *, softmax_scale=None, deterministic=False, return_lse=False,
    precision="native", sink=None,
): ...  # fmt: skip


def keep_attention(): ...


def plan_context(
    cu_seqlens, group=None, layout="zigzag", causal=True, window_size=(-1, -1), hosts=None,
    prepare=(), kv_budget=None,
): ...  # fmt: skip


def ring_attn_func(
    q, k, v, plan, *, softmax_scale=None, deterministic=False, return_lse=False,
    precision="native", transport="auto", sink=None, **neutral,
): ...  # fmt: skip


def layer(
    num_heads, num_kv_heads, head_dim, causal=True, window_size=(-1, -1), softmax_scale=None,
    group=None, layout="zigzag", precision="native", transport="auto", deterministic=False,
): ...  # fmt: skip


def layer_forward(self, q, k, v, plan=None, sink=None): ...


def shard(self, x, dim=0): ...


def unshard(self, x_local, dim=0): ...


def to_contiguous(self, x, dim=0): ...


def shift(self, x, n, dim=0, fill=0): ...


def halo(self, x, n, dim=0): ...


def with_mask(self, mask): ...


def make_mask(self, spans, q_tokens, k_tokens=None, positions=None, key_positions=None): ...


def documents(
    cu, cu_k=None, causal=True, window_size=(-1, -1), first_keys=0, chunk=None
): ...  # fmt: skip


def tree(lengths, parents): ...


def blocks(rows, columns, size, q_tokens, k_tokens=None): ...


def pack(masks): ...


def with_bidirectional(self, begins, ends): ...


def with_prefix(self, lengths): ...


def plot(self, plan=None): ...


def fold(sequences, weights=None, min_shared=1): ...


SIGNATURES: list[tuple[Callable[..., object], Callable[..., object]]] = [
    (ringfa3.flash_attn_func, flash_attn_func),
    (ringfa3.flash_attn_mask_func, flash_attn_mask_func),
    (ringfa3.flash_attn_varlen_func, flash_attn_varlen_func),
    (ringfa3.keep_attention, keep_attention),
    (ringfa3.plan_context, plan_context),
    (ringfa3.ring_attn_func, ring_attn_func),
    (ringfa3.RingFA3Attention, layer),
    (ringfa3.RingFA3Attention.forward, layer_forward),
    (ringfa3.ContextPlan.shard, shard),
    (ringfa3.ContextPlan.shard_keys, shard),
    (ringfa3.ContextPlan.unshard, unshard),
    (ringfa3.ContextPlan.to_contiguous, to_contiguous),
    (ringfa3.ContextPlan.from_contiguous, to_contiguous),
    (ringfa3.ContextPlan.shift, shift),
    (ringfa3.ContextPlan.halo, halo),
    (ringfa3.ContextPlan.with_mask, with_mask),
    (ringfa3.Mask.__init__, make_mask),
    (ringfa3.Mask.documents, documents),
    (ringfa3.Mask.tree, tree),
    (ringfa3.Mask.blocks, blocks),
    (ringfa3.Mask.pack, pack),
    (ringfa3.Mask.with_bidirectional, with_bidirectional),
    (ringfa3.Mask.with_prefix, with_prefix),
    (ringfa3.Mask.plot, plot),
    (ringfa3.trees.fold, fold),
]
OPTIONS = {
    "attention": "--set --head-dim --dtype --shortest --direction --pairs --fa3 --device --out "
    "--plot-only -q --quiet",
    "ring": "--set --worlds --longest --transport --timeout --dtype --shortest --direction --pairs "
    "--fa3 --device --out --plot-only -q --quiet",
}


def parameters(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    """(name, kind, default) of every parameter."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_the_package_exports_its_names() -> None:
    assert set(ringfa3.__all__) >= NAMES
    assert all(hasattr(ringfa3, name) for name in ringfa3.__all__)


@pytest.mark.parametrize(("public", "expected"), SIGNATURES, ids=lambda f: f.__qualname__)
def test_parameters_keep_their_names_order_and_defaults(
    public: Callable[..., object], expected: Callable[..., object]
) -> None:
    """Further parameters come last, but for `**neutral`, and have defaults."""
    known, found = parameters(expected), parameters(public)
    if known[-1:] == [("neutral", inspect.Parameter.VAR_KEYWORD, inspect.Parameter.empty)]:
        assert known.pop() == found.pop()
    assert found[: len(known)] == known
    assert all(default is not inspect.Parameter.empty for _, _, default in found[len(known) :])


def test_values_of_string_arguments() -> None:
    assert set(LAYOUTS) >= {"zigzag", "contiguous"}
    assert set(PRECISIONS) >= {"native", "fp8"}
    assert set(TRANSPORTS) >= {"auto", "symmetric", "nccl", "gloo"}


def test_a_plan_has_its_attributes() -> None:
    plan = ringfa3.plan_context([0, 3, 12], (1, 3))
    assert (plan.rank, plan.world, plan.group) == (1, 3, None)
    assert (plan.layout, plan.causal, plan.window_size) == ("zigzag", True, (-1, -1))
    assert (plan.total_tokens, plan.local_tokens, plan.tokens_per_rank) == (12, 4, [4, 4, 4])
    assert isinstance(plan.handle, int)
    assert plan.positions.shape == plan.token_index.shape == (4,)
    assert plan.mask is None
    assert plan.local_keys == len(plan.key_positions) == 4
    assert sum(plan.work_per_rank) == 3 * 4 // 2 + 9 * 10 // 2  # causal pairs of both documents


def test_a_layer_keeps_its_arguments() -> None:
    attend = ringfa3.RingFA3Attention(4, 2, 16)
    for name, _, default in parameters(layer)[3:]:
        assert getattr(attend, name) == default
    assert (attend.num_heads, attend.num_kv_heads, attend.head_dim) == (4, 2, 16)
    assert not list(attend.parameters())


def test_a_ring_error_is_a_runtime_error() -> None:
    assert issubclass(ringfa3.RingError, RuntimeError)


def test_options_of_the_build() -> None:
    assert options(build_parser()) >= {"--units", "-j", "--jobs", "--check", "--headers"}


def test_options_of_the_benchmarks() -> None:
    (benchmarks,) = (
        action.choices
        for action in bench_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert set(benchmarks) >= set(OPTIONS)
    for name, expected in OPTIONS.items():
        assert options(benchmarks[name]) >= set(expected.split()), name
