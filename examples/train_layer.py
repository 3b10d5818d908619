"""Trains one attention layer, by which every token of a long sequence finds the first one.

    torchrun --standalone --nproc-per-node 2 examples/train_layer.py    # CPU processes or GPUs

Every rank computes the loss of its own tokens; the sum of all ranks' gradients is the gradient of
the whole sequence.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from ringfa3 import RingFA3Attention, plan_context

TOKENS, DIM, HEADS, KV_HEADS, HEAD_DIM = 512, 128, 4, 2, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.attention = RingFA3Attention(HEADS, KV_HEADS, HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x, plan):
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))  # (t, heads + 2 * kv_heads, head_dim)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
        return self.out(self.attention(q, k, v, plan).flatten(-2))


dist.init_process_group()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)  # the same weights and the same tokens on all ranks
layer = Layer().to(device)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
plan = plan_context(TOKENS)  # one document, cut over all ranks
for step in range(40):
    tokens = torch.randn(TOKENS, DIM)
    tokens[0, 0] = 10.0  # marks token 0, whose content every token has to find
    x = plan.shard(tokens).to(device)  # (t, DIM), the tokens of this rank
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = (layer(x, plan) - tokens[0].to(device)).square().sum() / (TOKENS * DIM)
    loss.backward()
    for tensor in (loss.detach(), *(p.grad for p in layer.parameters())):
        dist.all_reduce(tensor)  # sums: every rank has the loss and the gradients of all tokens
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}")
dist.destroy_process_group()
