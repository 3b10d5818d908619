"""If this fails, a wrong argument gives wrong numbers instead of an error. What callers may pass to
the public functions: no value becomes another one in silence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringfa3
from ringfa3 import RingFA3Attention, flash_attn_func, flash_attn_varlen_func, plan_context
from ringfa3.keywords import NEUTRAL

Q, K = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
PLAN = plan_context(6, (0, 1))


def dense(**options: Any) -> Any:
    return flash_attn_func(Q, K, K, **options)


def varlen(cu: Any = (0, 6), *more: Any, **options: Any) -> Any:
    return flash_attn_varlen_func(Q[0], K[0], K[0], cu, (0, 6), *more, **options)


def ring(**options: Any) -> Any:
    return ringfa3.ring_attn_func(Q[0], K[0], K[0], PLAN, **options)


def layer(**options: Any) -> Any:
    return RingFA3Attention(4, 2, 8, **options)


def plan(cu: Any = 6, **options: Any) -> Any:
    return plan_context(cu, (0, 1), **options)


FUNCTIONS = (dense, varlen, ring)
ALL = (*FUNCTIONS, layer, plan)
BOOLS = ("no", "", 1, 0, None, 0.5, torch.tensor(True), np.array(True), [True])
SCALES = (
    "0.1", True, np.True_, [0.1], torch.tensor(0.1), torch.tensor(0.1, requires_grad=True),
    np.array(0.1), 1j, np.complex64(1),
)  # fmt: skip
WINDOWS = (
    (0.5, 0), (True, 0), (np.True_, 0), ("1", "2"), "12", b"12", {1, 2}, {1: 2, 2: 3}, 128, None,
    (torch.tensor(0.5), 0),
)  # fmt: skip
STRINGS = (None, 8, torch.bfloat16, ["native"], True)
LENGTHS = (
    [0.0, 6.0], [False, True], [0, True, 6], [0, np.True_, 6], "06", b"06", {0, 6}, {0: 0, 6: 6},
    None, 6.0, True,
)  # fmt: skip
# (arguments of a call, those that take it, values that raise TypeErrors)
WRONG: list[tuple[str, tuple[Callable[..., Any], ...], tuple[Any, ...]]] = [
    ("causal", (dense, varlen, layer, plan), BOOLS),
    ("deterministic", (*FUNCTIONS, layer), BOOLS),
    ("return_lse", FUNCTIONS, BOOLS),
    ("softmax_scale", (*FUNCTIONS, layer), SCALES),
    ("window_size", (dense, varlen, layer, plan, PLAN.with_window), WINDOWS),
    ("precision", (*FUNCTIONS, layer), STRINGS),
    ("transport", (ring, layer), STRINGS),
    ("layout", (layer, plan), STRINGS),
    ("sink", FUNCTIONS, (0.0, [0.0] * 4, True, np.zeros(4))),
]
# By name: a type that no value has.
CALLS = [
    pytest.param(call, name, value, id=f"{call.__name__} {name} {type(value).__name__} {number}")
    for name, calls, values in WRONG
    for call in calls
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("call", "name", "value"), CALLS)
def test_a_value_of_another_type_is_refused(
    call: Callable[..., Any], name: str, value: object
) -> None:
    with pytest.raises(TypeError, match=f"^(rank 0: )?{name}\\b"):
        call(**{name: value})


@pytest.mark.parametrize("call", [varlen, plan])
@pytest.mark.parametrize("value", LENGTHS, ids=repr)
def test_lengths_are_whole_numbers(call: Callable[..., Any], value: Any) -> None:
    """A bool has an index, and is none; sets and bytes are no sequences of lengths."""
    with pytest.raises(TypeError, match=r"^cu_seqlens"):
        call(value)


@pytest.mark.parametrize(
    "value", [0.0, 0.125, True, "6", -1, [6], torch.tensor(6.0), torch.ones(2)]
)
def test_the_longest_length_may_be_another_argument_of_another_library(value: Any) -> None:
    """It has no use here. FlashAttention's next one, dropout_p, must not pass for it."""
    for arguments in ((value, 6), (6, value)):
        with pytest.raises(TypeError, match=r"^max_seqlen_"):
            varlen((0, 6), *arguments)


@pytest.mark.parametrize("value", [None, 6, 0, np.int32(6), torch.tensor(6)])
def test_a_longest_length_is_ignored(value: Any) -> None:
    assert torch.equal(varlen((0, 6), value, value), varlen())


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [True, 4.0, "4", None])
def test_sizes_of_a_layer_are_whole_numbers(name: str, value: Any) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4}
    with pytest.raises(TypeError, match=f"^{name}="):
        RingFA3Attention(**{**sizes, name: value})
    with pytest.raises(TypeError, match=r"^group="):
        plan_context(6, (value, 2))


OUT_OF_RANGE = {
    "softmax_scale": [0, -0.1, float("nan"), float("inf"), 10**400, np.float32(0)],
    "window_size": [(-2, 0), (1,), (1, 1, 1), (1 << 63, 0), (None, -2), ()],
    "precision": ["fp4", "NATIVE", ""],
}


@pytest.mark.parametrize("call", [dense, varlen])
@pytest.mark.parametrize(("name", "value"), [(n, x) for n, xs in OUT_OF_RANGE.items() for x in xs])
def test_a_value_out_of_range_is_refused(call: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        call(**{name: value})


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"causal": np.True_}, {"causal": True}),
        ({"softmax_scale": np.float32(0.5)}, {"softmax_scale": 0.5}),
        ({"softmax_scale": 1}, {"softmax_scale": 1.0}),
        ({"window_size": [np.int32(2), 0]}, {"window_size": (2, 0)}),
        ({"window_size": torch.tensor([2, 0])}, {"window_size": (2, 0)}),
        ({"window_size": (None, None)}, {}),
        ({"window_size": (2, None)}, {"window_size": (2, -1)}),
        ({"deterministic": np.False_}, {}),
    ],
)
def test_other_spellings_of_a_value(given: dict[str, Any], plain: dict[str, Any]) -> None:
    """NumPy's scalars, sequences, and None for an unlimited side: the same bits."""
    for call in (dense, varlen):
        assert torch.equal(call(**given), call(**plain))
    window = {"window_size": given["window_size"]} if "window_size" in given else {}
    assert plan(**window) is plan(**{name: plain[name] for name in window if name in plain})


def test_arguments_of_another_library_by_position_are_refused() -> None:
    """(dropout_p, softmax_scale) of FlashAttention 2; the error names what to pass by name."""
    for call, named in (
        (lambda: flash_attn_func(Q, K, K, 0.1, 0.25), "q, k, v"),
        (lambda: varlen((0, 6), 6, 6, 0.1, 0.25), "cu_seqlens_k, max_seqlen_q, max_seqlen_k"),
        (lambda: ringfa3.ring_attn_func(Q[0], K[0], K[0], PLAN, 0.1, 0.25), "q, k, v, plan"),
    ):
        with pytest.raises(
            TypeError, match=rf"{named} by position, and got 2 more, 0\.1, 0\.25: .*softmax_scale="
        ):
            call()  # type: ignore[no-untyped-call]
    for function in (flash_attn_func, flash_attn_varlen_func, ringfa3.ring_attn_func):
        parameters = inspect.signature(function).parameters
        assert parameters["softmax_scale"].kind is inspect.Parameter.KEYWORD_ONLY


# The keywords of flash_attn_func and flash_attn_varlen_func in flash-attn 2.8.3, FlashAttention 3
# (hopper/flash_attn_interface.py) and flash-attn-4 4.0.0b36, with their defaults.
FLASH_ATTENTION_2 = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    "block_table": None,
}  # fmt: skip
FLASH_ATTENTION_3 = {
    "softmax_scale": None, "causal": False, "qv": None, "q_descale": None, "k_descale": None,
    "v_descale": None, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0,
    "num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0,
    "return_attn_probs": False, "seqused_q": None, "seqused_k": None,
}  # fmt: skip
FLASH_ATTENTION_4 = {
    "qv": None, "gather_kv_indices": None, "softmax_scale": None, "causal": False,
    "window_size": (None, None), "learnable_sink": None, "softcap": 0.0, "num_splits": 1,
    "pack_gqa": None, "deterministic": False, "score_mod": None, "score_mod_bwd": None,
    "mask_mod": None, "aux_tensors": None, "aux_scalars": None, "block_sparse_tensors": None,
    "block_sparse_tensors_bwd": None, "return_lse": False, "gather_bwd_recompute_p": False,
    "gather_bwd_token_chunk": None, "min_seqlen_k": None, "seqused_q": None, "seqused_k": None,
    "page_table": None, "scheduler_metadata": None, "seqlen_k_per_split": None,
    "disable_scheduler_metadata": False,
}  # fmt: skip


@pytest.mark.parametrize("call", FUNCTIONS)
@pytest.mark.parametrize("defaults", [FLASH_ATTENTION_2, FLASH_ATTENTION_3, FLASH_ATTENTION_4])
def test_defaults_of_flash_attention_are_accepted(
    call: Callable[..., Any], defaults: dict[str, Any]
) -> None:
    """All at once, and the result is that of no keyword; the plan has the ring's mask."""
    mask = ("causal", "window_size") if call is ring else ()
    assert torch.equal(call(**{x: y for x, y in defaults.items() if x not in mask}), call())


@pytest.mark.parametrize("name", NEUTRAL)
def test_any_other_value_of_a_neutral_keyword_is_refused(name: str) -> None:
    """By name, with its value. A bool is no number, and a tensor is not read."""
    others: list[Any] = [0.1, 2, -1, float("nan"), "no", torch.zeros(4), torch.zeros(()), object()]
    others += [x for x in (True, False, None) if not any(x is y for y in NEUTRAL[name][0])]
    calls = [x for x in FUNCTIONS if not (x is varlen and name.startswith("seqused"))]
    for value in others:
        for call in calls:
            with pytest.raises(ValueError, match=rf"^(rank 0: )?{name}=.*: allowed is .*; \w"):
                call(**{name: value})


def test_a_number_may_have_another_type() -> None:
    for options in ({"dropout_p": 0}, {"softcap": np.float32(0)}, {"softcap": None},
                    {"num_splits": 0}):  # fmt: skip
        assert torch.equal(dense(**options), dense())


def test_unknown_keywords_are_refused_by_name() -> None:
    for call, given, said in (
        (dense, "casual", "flash_attn_func has no argument 'casual': did you mean 'causal'?"),
        (varlen, "dropout", "flash_attn_varlen_func has no argument 'dropout'"),
        (ring, "causal", "no argument 'causal': the plan has it, so pass it to plan_context"),
    ):
        with pytest.raises(TypeError) as caught:
            call(**{given: True})
        assert said in str(caught.value)


def test_neutral_keywords_compile() -> None:
    """In one graph."""
    options: dict[str, Any] = {**FLASH_ATTENTION_2, **FLASH_ATTENTION_4}
    torch._dynamo.reset()
    compiled = torch.compile(dense, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**options), dense())
