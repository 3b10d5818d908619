"""What a backward takes in place of Q, K, V and LSE: the operands of an 8-bit forward, in 16 bits.

Rounding counts as the identity (straight through), and K's mean as a constant. So the gradient is
that of the function that the forward has computed. With Q~ and K~ the rounded operands, R the
rotation, m the mean of K and c the softmax scale:

    LSE~ = LSE - c q.m         without the offset that centring takes off a row's scores
    P = min(1, exp(c Q~ K~^T - LSE~)),  dV = P^T dO,  dS = P (dO V~^T - D),  D = dO.O - dLSE
    dQ = c dS K~ R^T + c w m,  dK = c dS^T Q~ R^T,    w = dS 1 = dLSE + exp(sink - LSE) D

V~ is not centred: the output and dP have its mean then, and dP - D is 0 where one key dominates.

Shapes: t query rows, n key rows; h heads, hk KV heads; d head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringfa3.quantisation.operands import QuantisedKV, QuantisedQ

FACTOR_COLUMNS = 16  # after K's own: rows fill whole sectors of 32 bytes; the first has the factor


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the operands for inputs of `dtype`.

    bfloat16 also for float16: rotated numbers may exceed the range of float16.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def backward_keys(k: torch.Tensor) -> torch.Tensor:
    """A "meta" tensor like K of `DequantisedInputs`, for the k (n, hk, d) of a call."""
    shape = *k.shape[:2], k.shape[2] + FACTOR_COLUMNS
    return torch.empty(shape, dtype=operand_dtype(k.dtype), device="meta")


class DequantisedInputs(NamedTuple):
    """Operands in `operand_dtype`; exact but for V, which is rounded to it.

    q    (t, h, d): rotated, times its scales
    k    (n, hk, d + FACTOR_COLUMNS): centred and rotated, the numbers of 8 bits times a power of
         two, then the factor of the key's tile, from 1 to 2, by which they are to be divided
    v    (n, hk, d): with its mean
    lse  (h, t) float32: LSE~
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(
        cls,
        q: QuantisedQ,
        kv: QuantisedKV,
        lse: torch.Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> DequantisedInputs:
        """From the operands of a forward and its lse (h, t).

        Args:
            scale: the softmax scale.
            dtype: that of the call's inputs.
        """
        dtype = operand_dtype(dtype)
        d = q.values.shape[-1]
        rounded_q = torch.empty(q.values.shape, dtype=dtype, device=lse.device)
        torch.mul(_numbers(q.values, dtype), q.scale.unsqueeze(-1), out=rounded_q)
        # 1 / scale is a bfloat16 number, but for the rounding of the scale: factor * 2^exponent
        factor, exponent = torch.frexp((1 / kv.k_scale).bfloat16().float())
        power = torch.ldexp(torch.ones_like(factor), 1 - exponent).unsqueeze(-1)
        k = rounded_q.new_empty((*kv.k.shape[:2], d + FACTOR_COLUMNS))
        torch.mul(_numbers(kv.k, dtype), power, out=k[..., :d])
        k[..., d:] = 2 * factor.unsqueeze(-1)
        v = kv.v.to(dtype)  # exact for numbers of 8 bits
        if kv.v.itemsize == 1:
            v = torch.addcmul(kv.centres.v_mean, v, kv.centres.v_scale).to(dtype)
        offset = (scale * q.k_offset).t()
        return cls(rounded_q, k, v, torch.where(lse == -torch.inf, lse, lse - offset))


def _numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """8-bit numbers in a dtype that PyTorch multiplies: int8, or `dtype` for E4M3."""
    return x if x.dtype == torch.int8 else x.to(dtype)


def add_mean_term(dq: torch.Tensor, k_mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dQ with c w m, in the dtype of dq.

    Args:
        dq: (t, h, d), rotated back. k_mean: (hk, d) float32. weight: (h, t), c w.
    """
    mean = k_mean.repeat_interleave(dq.shape[1] // len(k_mean), 0)  # (h, d)
    return torch.addcmul(dq.float(), weight.t().unsqueeze(-1), mean).to(dq.dtype)
