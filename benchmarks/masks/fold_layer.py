"""Times a transformer layer on many responses to one prompt: folded into a tree, and unfolded.

    python -m benchmarks.masks.fold_layer [--prompt 4096] [--response 3584] [--responses 16]

With the default lengths folding halves the tokens. The layer is the trainer's, as in an 8B model. A
step is its forward and backward in bfloat16, with the gradients of its input and weights. The
unfolded sequences are packed documents.

Both must give each sequence the same output: the rms of the differences is at most 1% of that of
what the layer adds to its input. Steps alternate, A B A B, after a warm-up. Prints the ratio of the
paired times, unfolded over folded, with its 95% interval. On a CPU the layer is small, and this
measures the PyTorch fallback.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from ringfa3 import Mask, plan_context, trees
from ringfa3.bench.common.timing import CudaStopwatch, Stopwatch, WallClock, compare, median, paired
from train.config import ModelConfig
from train.model.rope import rope_frequencies, rotation
from train.model.transformer import Block
from train.sections.model import RopeConfig

MODEL = ModelConfig(dim=4096, n_heads=32, n_kv_heads=8, ffn_dim=14336, qk_norm=False)
SMALL = ModelConfig(dim=64, n_heads=4, n_kv_heads=2, ffn_dim=96, qk_norm=False)
MOST_DIFFERENCE = 0.01


class Layer:
    """A block of a model on random tokens under one mask, forward and backward."""

    def __init__(self, block: Block, x_TD: Tensor, mask: Mask) -> None:
        self.block, self.x_TD = block, x_TD.detach().requires_grad_()
        self.plan = plan_context(mask, (0, 1))
        frequencies = rope_frequencies(block.attention.head_dim, RopeConfig())
        self.rotation = rotation(self.plan.positions.to(x_TD.device), frequencies)
        self.dy_TD = torch.randn_like(x_TD)

    def forward(self) -> Tensor:
        with torch.autocast(self.x_TD.device.type, torch.bfloat16):
            return self.block(self.x_TD, self.rotation, self.plan)

    def step(self) -> tuple[Tensor, ...]:
        leaves = (self.x_TD, *self.block.parameters())
        return torch.autograd.grad(self.forward(), leaves, self.dy_TD)


def layers(
    lengths: tuple[int, int, int], model: ModelConfig, device: torch.device
) -> tuple[Layer, Layer]:
    """Folded and unfolded, with equal weights and tokens. Raises RuntimeError if outputs differ.

    lengths: tokens of the prompt and of a response, and the number of responses.
    """
    prompt, response, responses = lengths
    torch.manual_seed(0)
    shared = torch.arange(prompt)
    own = prompt + torch.arange(response * responses).view(responses, response)
    folded = trees.fold([torch.cat((shared, x)) for x in own])
    rows = torch.cat(folded.rows).to(device)
    with device:
        block = Block(model)
        x_TD = torch.randn(len(folded.tokens), model.dim, dtype=torch.bfloat16)
    length = prompt + response
    documents = Mask.documents([i * length for i in range(responses + 1)])
    found = Layer(block, x_TD, folded.mask), Layer(block, x_TD[rows], documents)
    with torch.no_grad():
        tree, unfolded = (layer.forward().float() for layer in found)
    difference = (tree[rows] - unfolded).norm() / (unfolded - found[1].x_TD).norm()
    if not difference <= MOST_DIFFERENCE:
        raise RuntimeError(f"the folded outputs differ by {difference:.1%} (rms) from the unfolded")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--response", type=int, default=3584, help="tokens")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=10)
    asked = parser.parse_args(arguments)
    lengths = asked.prompt, asked.response, asked.responses
    if min(*lengths, asked.pairs) < 1:
        parser.error("give at least 1 token, response and pair")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    stopwatch: Stopwatch = CudaStopwatch() if on_gpu else WallClock()
    folded, unfolded = layers(lengths, MODEL if on_gpu else SMALL, device)
    tokens = len(folded.x_TD), len(unfolded.x_TD)
    print(f"{tokens[0]} tokens folded, {tokens[1]} unfolded", flush=True)
    times = paired(folded.step, unfolded.step, asked.pairs, stopwatch)
    ratio = compare(times.a, times.b)
    milliseconds = (f"{median(seconds) * 1e3:.1f} ms" for seconds in (times.b, times.a))
    print("unfolded {}, folded {}: ".format(*milliseconds), end="")
    print(f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")


if __name__ == "__main__":
    main()
