"""How the functions of attention are called: by name, with the keywords of FlashAttention.

Callers of FlashAttention 2, 3 and 4 pass keywords that RingFA3 does not have, mostly at values that
ask for nothing. `NEUTRAL` has these values. Any other value asks for what RingFA3 would not do, so
it is refused by name and never ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from ringfa3.validation import is_bool, is_number, shown

Function = TypeVar("Function", bound=Callable[..., object])

_HINT = "it changes the speed of FlashAttention and no result, so leave it out"
_MASKS = "flash_attn_mask_func takes a ringfa3.Mask: spans, trees, blocks, chunks, no function"
_PAGES = "RingFA3 has no paged K/V cache, so gather the pages first"
_IN_USE = "flash_attn_varlen_func takes it, and for plans Mask.documents"
_DESCALE = "precision='fp8' takes q, k and v in 16 bits and scales them itself"
_SCORES = "RingFA3 computes softmax(softmax_scale * q k^T) v and changes no score"

# By name: the values that are accepted, and what to do instead of another.
NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    # FlashAttention 2
    "dropout_p": ((0.0,), "RingFA3 has no dropout"),
    "softcap": ((0.0, None), _SCORES),
    "alibi_slopes": ((None,), _SCORES),
    "return_attn_probs": ((False,), "return_lse=True returns (out, lse)"),
    "block_table": ((None,), _PAGES),
    "return_softmax_lse": ((False,), "return_lse=True returns (out, lse)"),
    "s_aux": ((None,), "pass sink=s_aux.float()"),
    # FlashAttention 3
    "qv": ((None,), _SCORES),
    "q_descale": ((None,), _DESCALE),
    "k_descale": ((None,), _DESCALE),
    "v_descale": ((None,), _DESCALE),
    "attention_chunk": ((0,), _MASKS),
    "num_splits": ((0, 1), _HINT),
    "pack_gqa": ((None,), _HINT),
    "sm_margin": ((0,), "RingFA3 leaves no SM free, so leave it out"),
    "seqused_q": ((None,), _IN_USE),
    "seqused_k": ((None,), _IN_USE),
    # FlashAttention 4
    "learnable_sink": ((None,), "pass sink=learnable_sink.float()"),
    "score_mod": ((None,), _SCORES),
    "score_mod_bwd": ((None,), _SCORES),
    "mask_mod": ((None,), _MASKS),
    "aux_tensors": ((None,), _MASKS),
    "aux_scalars": ((None,), _MASKS),
    "block_sparse_tensors": ((None,), _MASKS),
    "block_sparse_tensors_bwd": ((None,), _MASKS),
    "full_block_cnt": ((None,), _MASKS),
    "full_block_idx": ((None,), _MASKS),
    "mask_block_cnt": ((None,), _MASKS),
    "mask_block_idx": ((None,), _MASKS),
    "block_size": ((None,), _HINT),
    "gather_kv_indices": ((None,), _MASKS),
    "gather_bwd_recompute_p": ((False,), _HINT),
    "gather_bwd_token_chunk": ((None,), _HINT),
    "page_table": ((None,), _PAGES),
    "min_seqlen_k": ((None,), _HINT),
    "scheduler_metadata": ((None,), _HINT),
    "seqlen_k_per_split": ((None,), _HINT),
    "disable_scheduler_metadata": ((False,), _HINT),
}


def hides_positional(function: Function) -> Function:
    """`function`, whose `*positional` only serve `check_call`: its signature does not show them."""
    signature = inspect.signature(function)
    parameters = [x for x in signature.parameters.values() if x.kind is not x.VAR_POSITIONAL]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def check_call(
    function: Callable[..., object], positional: tuple[object, ...], keywords: Mapping[str, object]
) -> None:
    """Checks what a function was given beyond its parameters.

    Raises:
        TypeError: a value by position, or a keyword that no FlashAttention has.
        ValueError: a keyword of FlashAttention has a value that asks for something.
    """
    if positional:
        parameters = inspect.signature(function).parameters.values()
        named = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        options = [f"{x.name}=" for x in parameters if x.kind is x.KEYWORD_ONLY]
        raise TypeError(
            f"{function.__name__} takes {', '.join(named)} by position, and got "
            f"{len(positional)} more, {', '.join(map(shown, positional))}: pass them by name, "
            f"{', '.join(options)}"
        )
    for name, value in keywords.items():
        if name not in NEUTRAL:
            raise TypeError(
                f"{function.__name__} has no argument {name!r}{_advice(name, function)}"
            )
        allowed, remedy = NEUTRAL[name]
        usual = allowed[0]
        if type(value) is type(usual) and value == usual:  # every call pays for this line
            continue
        if not any(_equal(value, x) for x in allowed):
            values = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}={shown(value)}: allowed is {values}; {remedy}")


def _equal(value: Any, neutral: object) -> bool:
    """Whether `value` is a neutral one, and of its type: False is no 0.0."""
    for is_type in (is_bool, is_number):
        if is_type(neutral):
            return is_type(value) and bool(value == neutral)
    return value is neutral


def _advice(name: str, function: Callable[..., object]) -> str:
    if name in ("causal", "window_size"):
        return ": the plan has it, so pass it to plan_context"
    close = get_close_matches(name, inspect.signature(function).parameters, 1)
    return f": did you mean {close[0]!r}?" if close else ""
