"""Errors of a backward of "fp8" with products in e4m3, by emulation on the CPU.

    python -m benchmarks.fp8_backward_errors [--tokens 512 2048] [--head-dim 128] [--seeds 3]

The reference is the gradient of the rounded forward in float64, see `quantisation.dequantised`.
Each line has the rms errors of dQ, dK and dV, over the rms of each. Q, K and V are e4m3 numbers
already, so a product with them loses nothing. dP has dO in e4m3, with a scale for each row. D has
the same dO. dQ has dS in e4m3, with a scale for each 64 rows and 128 keys. All other operands are
bfloat16, all sums exact.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from ringfa3.planning.sharding import whole_sequences
from ringfa3.quantisation.formats import E4M3, FORMATS
from ringfa3.quantisation.operands import quantise

ROWS, KEYS = 64, 128  # of a block of dS
PRODUCTS = {"bf16": (), "dP in e4m3": ("dP",), "dQ in e4m3": ("dQ",), "both": ("dP", "dQ")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for tokens in given.tokens:
        if tokens % KEYS:
            parser.error(f"--tokens {tokens}: it must be a multiple of {KEYS}")
        for rms in (1, 4, 9):
            errors = np.array([row(tokens, given.head_dim, rms, s) for s in range(given.seeds)])
            for name, found in zip(PRODUCTS, np.median(errors, 0), strict=True):
                print(
                    f"{tokens} tokens, scores of rms {rms}, {name}:", *(f"{x:.4f}" for x in found)
                )


def row(tokens: int, d: int, rms: float, seed: int) -> list[list[float]]:
    """For each of PRODUCTS the errors of dQ, dK and dV, of one head without a mask."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(tokens, 1, d, generator=generator).bfloat16() for _ in range(4))
    q, k = (x * rms**0.5 for x in (q, k))
    segments = whole_sequences(np.array([tokens]))
    queries, kv = quantise(q, k, v, segments, FORMATS["fp8"])
    rounded = (
        queries.values.double() * queries.scale.unsqueeze(-1),
        kv.k.double() * kv.k_scale.unsqueeze(-1),
        kv.v.double() * kv.centres.v_scale + kv.centres.v_mean.double(),
    )
    operands = [x[:, 0].double() for x in (*rounded, dout)]
    exact = gradients(*operands, in_e4m3=None)
    return [
        [relative(x, y) for x, y in zip(gradients(*operands, in_e4m3=names), exact, strict=True)]
        for names in PRODUCTS.values()
    ]


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    in_e4m3: tuple[str, ...] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV, each (n, d), but for the rotation back. None: nothing is rounded.

    Args:
        q, k, v, dout: (n, d) float64, q and k rotated.
    """
    scale = q.shape[1] ** -0.5
    p = torch.softmax(scale * q @ k.T, -1)
    out = p @ v
    rounded_dout = dout
    if in_e4m3 and "dP" in in_e4m3:
        rounded_dout = e4m3(dout, -1)
    delta = (rounded_dout * out).sum(-1, keepdim=True)
    ds = p * (rounded_dout @ v.T - delta)
    if in_e4m3 is None:
        return scale * ds @ k, scale * ds.T @ q, p.T @ dout
    for_dq = bfloat16(ds)
    if "dQ" in in_e4m3:
        n = len(ds)
        for_dq = e4m3(ds.view(n // ROWS, ROWS, n // KEYS, KEYS), (1, 3)).view(n, n)
    return scale * for_dq @ k, scale * bfloat16(ds).T @ q, bfloat16(p).T @ dout


def e4m3(x: torch.Tensor, across: int | tuple[int, ...]) -> torch.Tensor:
    """x in e4m3 with a scale for all numbers across these dimensions."""
    scale = E4M3.scale(x.abs().amax(across, keepdim=True))
    return E4M3.round((x / scale).float()).double() * scale


def bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
