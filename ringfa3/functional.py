"""Attention on one device: the functions, and the custom op behind them.

The op makes its plan itself, from shapes and cumulative lengths. So `torch.compile(fullgraph=True)`
and selective activation checkpointing see one node with outputs (out, lse).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from ringfa3 import host
from ringfa3.attention_op import (
    lse_by_head,
    lse_by_sequence,
    out_shape,
    packed,
    register_attention,
)
from ringfa3.custom_op import autocast_inputs, custom_op
from ringfa3.kernels.dispatch import select_backward, select_forward, select_quantised
from ringfa3.kernels.reference import accum_dtype
from ringfa3.kernels.sinks import apply_sink
from ringfa3.kernels.symbolic import current_builder
from ringfa3.keywords import check_call, hides_positional
from ringfa3.masks.padding import separate_padding
from ringfa3.planning.sharding import effective_window
from ringfa3.planning.tiling import Plan, plan_local
from ringfa3.quantisation.key_tiles import KeyTiles
from ringfa3.straight_through import forward_centres, straight_through
from ringfa3.tensor_cache import TensorCache
from ringfa3.validation import (
    Window,
    check_batch,
    check_bool,
    check_cu_seqlens,
    check_max_seqlen,
    check_precision,
    check_qkv,
    check_quantisable,
    check_sink,
    check_tensors,
    check_unpadded,
    check_window,
    is_deterministic,
    resolve_scale,
    sequence_lengths,
    whole_numbers,
)


@hides_positional
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *positional: object,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    precision: str = "native",
    sink: torch.Tensor | None = None,
    **neutral: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, over a batch of sequences.

    Args:
        q: (b, s, h, d); k: (b, s_k, h_kv, d) with h % h_kv == 0; v: (b, s_k, h_kv, d_v), where d_v
            is d or a smaller multiple of 8. Any float dtype on the CPU, bfloat16 or float16 on the
            GPU; last dim contiguous.
        softmax_scale: positive, from 2^-64 to 2^64; default d ** -0.5.
        causal: hide keys to the right of the diagonal, which ends at the bottom right if s != s_k.
        window_size: (left, right) keys around the diagonal to which a query attends, -1 or None for
            unlimited.
        deterministic: bitwise equal gradients from run to run. True also if the backward runs
            under `torch.use_deterministic_algorithms`, with `warn_only` or without.
        return_lse: also return the log-sum-exp of each row's scores; it is differentiable.
        precision: "native" computes in the dtype of q. "fp8" rounds Q, K, V and P to E4M3, "int8"
            Q and K to int8, as `ringfa3.quantisation` does; d = d_v = 64, 128 or 256, not float64.
            Gradients are those of the rounded function: rounding counts as the identity.
        sink: (h,) float32 (float64 for float64 inputs), a logit a head that takes part in the
            softmax of every row and has no value; differentiable. It counts in LSE.
        neutral: other keywords of FlashAttention 2, 3 and 4, at values that ask for nothing:
            `ringfa3.keywords.NEUTRAL`.

    Returns:
        out (b, s, h, d_v) in the dtype of q; with `return_lse` (out, lse), lse (b, h, s) float32
        (float64 for float64 inputs), natural log. A fully masked row has output 0, LSE -inf
        (with a sink: the sink) and gradient 0.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and what is allowed.
    """
    if positional or neutral:
        check_call(flash_attn_func, positional, neutral)
    if not torch.compiler.is_compiling() and host.attend is not None:
        results: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = host.attend(
            q, k, v, softmax_scale, causal, window_size, deterministic, return_lse, precision, sink
        )
        if results is not None:
            return results
    check_precision(precision)
    deterministic = check_bool("deterministic", deterministic)
    return_lse = check_bool("return_lse", return_lse)
    left, right = effective_window(check_bool("causal", causal), check_window(window_size))
    check_tensors(q, k, v)
    q, k, v = autocast_inputs(q, k, v)
    check_qkv(q, k, v, dims=4)
    check_batch(q, k)
    check_quantisable(precision, q, v)
    scale = resolve_scale(softmax_scale, q)
    check_sink(sink, q)
    out, lse = attention(q, k, v, sink, None, None, scale, left, right, deterministic, precision)
    return (out, lse) if return_lse else out


@hides_positional
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | Sequence[int],
    cu_seqlens_k: torch.Tensor | Sequence[int],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *positional: object,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    precision: str = "native",
    sink: torch.Tensor | None = None,
    seqused_q: torch.Tensor | Sequence[int] | None = None,
    seqused_k: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_q_padded: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_k_padded: torch.Tensor | Sequence[int] | None = None,
    **neutral: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over packed sequences of any length, 0 and 1 included.

    Args:
        q: (t, h, d); k: (t_k, h_kv, d); v: (t_k, h_kv, d_v). Query sequence i attends to key
            sequence i.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) cumulative lengths from 0 to t and t_k, as
            lists or integer tensors, best on the CPU. A tensor on the GPU costs one synchronisation
            for each version of it, and is an error under CUDA graph capture. Collectives and
            `.data` change values without a version: pass a new tensor then.
        max_seqlen_q, max_seqlen_k: whole numbers, which callers of other libraries pass. Their
            values are ignored: the cumulative lengths decide.
        seqused_q, seqused_k: (sequences,) tokens in use of each sequence, its first ones, as in
            FlashAttention 3. The others are padding: it attends to nothing, and nothing
            attends to it; causal diagonals end at the last tokens in use. Only "native".
        cu_seqlens_q_padded, cu_seqlens_k_padded: (sequences + 1,) cumulative lengths with padding,
            as in TransformerEngine; then cu_seqlens_q and cu_seqlens_k are without. Not both this
            and seqused of one side.

    Other arguments, results and errors as in `flash_attn_func`; lse is (h, t). Padded rows have the
    results of fully masked ones.
    """
    if positional or neutral:
        check_call(flash_attn_varlen_func, positional, neutral)
    check_max_seqlen("max_seqlen_q", max_seqlen_q)  # the plan has every length
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    padding = seqused_q, seqused_k, cu_seqlens_q_padded, cu_seqlens_k_padded
    padded = any(x is not None for x in padding)
    if not padded and not torch.compiler.is_compiling() and host.attend_varlen is not None:
        results: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = host.attend_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, deterministic,
            return_lse, precision, sink,
        )  # fmt: skip
        if results is not None:
            return results
    check_precision(precision)
    deterministic = check_bool("deterministic", deterministic)
    return_lse = check_bool("return_lse", return_lse)
    left, right = effective_window(check_bool("causal", causal), check_window(window_size))
    check_tensors(q, k, v)
    q, k, v = autocast_inputs(q, k, v)
    check_qkv(q, k, v, dims=3)
    check_quantisable(precision, q, v)
    if padded:
        check_unpadded(precision)
        cu_seqlens_q, cu_seqlens_k = separate_padding(
            (cu_seqlens_q, seqused_q, cu_seqlens_q_padded),
            (cu_seqlens_k, seqused_k, cu_seqlens_k_padded),
        )
    cu_q, cu_k = (
        cu
        if isinstance(cu, torch.Tensor)
        else torch.tensor(whole_numbers(name, cu), dtype=torch.int64, device="cpu")
        for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    )
    scale = resolve_scale(softmax_scale, q)
    check_sink(sink, q)
    out, lse = attention(q, k, v, sink, cu_q, cu_k, scale, left, right, deterministic, precision)
    return (out, lse) if return_lse else out


# Plans that live: those of `_plan`'s cache, and those that programs of the C++ launcher hold.
_living: weakref.WeakValueDictionary[tuple[object, ...], Plan] = weakref.WeakValueDictionary()


@lru_cache(64)
def _plan(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], left: int, right: int) -> Plan:
    key = q_lengths, k_lengths, left, right
    plan = _living.get(key)
    if plan is None:
        lengths_q, lengths_k = (np.array(x, np.int64) for x in (q_lengths, k_lengths))
        plan = _living.setdefault(key, plan_local(lengths_q, lengths_k, left, right))
    return plan


_lengths_on_gpu: TensorCache[tuple[int, ...]] = TensorCache()  # of cu_seqlens


def _lengths(name: str, cu: torch.Tensor, tokens: int) -> tuple[int, ...]:
    """Lengths of packed sequences of `tokens` tokens. Raises ValueError: `cu` does not fit them."""
    check_cu_seqlens(name, cu)

    def read() -> tuple[int, ...]:
        if cu.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{name} is on the GPU and would be read under CUDA graph capture: pass it on "
                "the CPU"
            )
        return sequence_lengths(name, cu.tolist())

    lengths = _lengths_on_gpu.get(cu, None, read) if cu.is_cuda else read()
    if sum(lengths) != tokens:
        raise ValueError(
            f"{name} ends at {sum(lengths)}, but there are {tokens} tokens: they must be equal"
        )
    return lengths


def _local_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    left: int,
    right: int,
) -> Plan:
    if cu_q is None or cu_k is None:
        return _held(_plan((q.shape[1],) * q.shape[0], (k.shape[1],) * k.shape[0], left, right))
    lengths_q = _lengths("cu_seqlens_q", cu_q, q.shape[0])
    lengths_k = _lengths("cu_seqlens_k", cu_k, k.shape[0])
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"cu_seqlens_q has {len(lengths_q)} sequences, cu_seqlens_k has {len(lengths_k)}: "
            "they must be equal"
        )
    return _held(_plan(lengths_q, lengths_k, left, right))


def _held(plan: Plan) -> Plan:
    """A plan that lives as long as the schedule that is built, if one is: a capture of the call,
    which Python runs, finds what the plan has uploaded."""
    builder = current_builder()
    if builder is not None:
        builder.hold_reference(plan)
    return plan


@custom_op
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of validated inputs: (b, s, h, d), or with cu_q and cu_k packed (t, h, d)."""
    if q.is_cuda:
        host.ensure()
    plan = _local_plan(q, k, cu_q, cu_k, left, right)
    out = q.new_empty(out_shape(q, v))
    rows = packed(out)  # (t, h, d_v)
    lse = rows.new_empty((rows.shape[1], rows.shape[0]), dtype=accum_dtype(q.dtype))
    with torch.autocast(q.device.type, enabled=False):
        qkv = packed(q), packed(k), packed(v)
        if precision == "native":
            kernel = select_forward(qkv[0], plan, v.shape[-1])
            tiling = plan.forward(kernel.tile_m)[0]
            kernel.attend(*qkv, tiling, scale, rows, rows[:0], lse, sink=sink)
        else:
            in_8_bits = select_quantised(qkv[0], precision)
            operands = in_8_bits.quantise(*qkv, plan)
            tiling = plan.forward(in_8_bits.tile_m)[0]
            in_8_bits.attend(*operands, tiling, scale, rows, rows[:0], lse)
            if sink is not None:
                lse = apply_sink(rows, lse, sink)
    if q.dim() == 4:
        lse = lse_by_sequence(lse, q)
    if precision != "native":
        forward_centres.set(lse, operands[1].centres)
    return out, lse


@custom_op
def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink) in the dtypes of q, k, v, lse, from the gradients of out and lse.

    Without a sink dsink has shape (0,).
    """
    deterministic = is_deterministic(deterministic)
    plan = _local_plan(q, k, cu_q, cu_k, left, right)
    centres = None if precision == "native" else forward_centres.get(lse)
    if q.dim() == 4:
        lse, dlse = lse_by_head(lse), None if dlse is None else lse_by_head(dlse)
    rows = packed(dout), dlse, packed(q), packed(k), packed(v), packed(out), lse, sink
    backward = partial(_backward, plan, scale, deterministic, precision)
    with torch.autocast(q.device.type, enabled=False):
        if precision == "native":
            grads = backward(*rows)
        else:
            kernel = select_quantised(rows[2], precision)
            if centres is None:
                centres = kernel.centres([kernel.statistics(*rows[3:5])])
            tiles = KeyTiles.of(plan, plan.keys)
            grads = straight_through(backward, *rows, scale, kernel, tiles, centres)
    dq, dk, dv = (x.view(y.shape) for x, y in zip(grads[:3], (q, k, v), strict=True))
    return dq, dk, dv, lse.new_empty((0,)) if sink is None else grads[3]


def _backward(
    plan: Plan,
    scale: float,
    deterministic: bool,
    precision: str,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), and dsink for a sink; of packed tensors."""
    kernel = select_backward(q, precision, v_dim=v.shape[2])
    tiling = plan.backward(kernel.tile_n, kernel.tile_m, deterministic)[0]
    shapes = (*k.shape[:2], q.shape[2]), v.shape  # in 8 bits K has more columns than its gradient
    dk, dv = (k.new_empty(shape) for shape in shapes)
    inputs = dout, dlse, q, out, lse
    backward = kernel.make_pass(*inputs, plan, scale, deterministic, k.shape[1], sink=sink)
    backward.hop(k, v, tiling, dk, dv)
    return backward.dq(), dk, dv, *(() if sink is None else (backward.dsink(),))


register_attention(
    attention,
    attention_backward,
    lambda ctx, cu_q, cu_k, *settings: ((cu_q, cu_k), settings),
)
