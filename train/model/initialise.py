"""Initial weights: each value depends only on the seed, the parameter's name and its index.

A rank therefore draws only the rows that it holds, and every engine starts with the same weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from train.config import ModelConfig

BLOCK = 2**20  # about this many values share a random generator
MAX_THREADS = 16  # that draw at the same time


def all_rows(parameter: Tensor) -> tuple[int, Tensor]:
    """Number of the first row and rows, for a parameter that this rank holds whole."""
    return 0, parameter


@torch.no_grad()
def initialise(
    transformer: nn.Module,
    model: ModelConfig,
    seed: int,
    rows: Callable[[Tensor], tuple[int, Tensor]] = all_rows,
    prefix: str = "",
) -> None:
    """Fill the parameters of a ``Transformer`` of ``model``, or of the module at ``prefix`` in it.

    ``rows`` returns the number of a parameter's first row on this rank, and its rows as a tensor.
    The embedding starts at unit variance. Small rows may come close to zero as they learn, and
    RMSNorm would then magnify their gradients and the rounding errors in them.
    """
    for inner, parameter in transformer.named_parameters():
        name = prefix + inner
        first, values = rows(parameter)
        if name.endswith(".bias"):
            values.zero_()
            continue
        if parameter.ndim < 2:
            # A tied head starts aligned with the embedding of the input token. With rows of std s
            # and the gain g of the last norm, that token's logit is s * g * dim and all others are
            # N(0, s^2 * g^2 * dim): GPT-2's s = 0.02, g = 1 begins dim 768 at a loss of 15. Here
            # s = 1 and g = 1 / dim. The gain is learned: Adam's first steps are larger than it.
            values.fill_(1 / model.dim if model.tied_embeddings and name == "norm.weight" else 1)
            continue
        std = parameter.shape[1] ** -0.5
        if name == "embedding.weight":
            std = 1.0
        elif name.endswith((".wo.weight", ".down.weight")):
            std = 0.0 if model.zero_init else std / math.sqrt(2 * model.n_layers)
        elif name == "output.weight" and model.zero_init:
            std = 0.0
        draw(values, f"{seed} {name}", first, parameter.shape[0], std)


def draw(values: Tensor, name: str, first: int, height: int, std: float) -> None:
    """Fill ``values`` with rows ``first`` ... of the N(0, std^2) matrix of ``name``.

    The matrix has ``height`` rows and the width of ``values``. Threads draw its blocks.
    """
    if std == 0.0:
        values.zero_()
        return
    width = values.shape[1]
    step = max(1, BLOCK // width)  # rows of a block
    starts = range(first // step * step, first + len(values), step)

    def rows(start: int) -> Tensor:
        digest = hashlib.sha256(f"{name} {start}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        shape = min(step, height - start), width
        block = torch.empty(shape, dtype=torch.float32, device="cpu")
        # With a generator, PyTorch fills the block in one thread: the threads here do not multiply.
        return block.normal_(0.0, std, generator=generator)

    with ThreadPoolExecutor(min(MAX_THREADS, torch.get_num_threads())) as threads:
        for some in batched(starts, MAX_THREADS):  # bounds the memory of blocks not copied yet
            for start, block in zip(some, threads.map(rows, some), strict=True):
                low, high = max(start, first), min(start + step, first + len(values))
                drawn = block[low - start : high - start]
                values[low - first : high - first] = drawn.to(values.device)


def batched(starts: range, size: int) -> list[range]:
    """``starts`` in ranges of at most ``size``."""
    return [starts[i : i + size] for i in range(0, len(starts), size)]
