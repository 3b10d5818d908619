"""Trains one attention layer: every token of a sequence learns to output the first token.

    torchrun --standalone --nproc-per-node 2 examples/train_layer.py    # CPU processes or GPUs

All processes share the sequence. Every rank computes the loss of its own tokens. The gradient of
the whole sequence is the sum of all ranks' gradients.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from ringfa3 import RingFA3Attention, plan_context


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 8 * 64), nn.Linear(4 * 64, 128)
        self.attention = RingFA3Attention(num_heads=4, num_kv_heads=2, head_dim=64)

    def forward(self, x, plan):
        q, k, v = self.qkv(x).unflatten(-1, (8, 64)).split((4, 2, 2), dim=-2)  # (t, heads, 64)
        return self.out(self.attention(q, k, v, plan).flatten(-2))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
torch.manual_seed(0)  # the same weights and the same tokens on all ranks
layer = Layer().to(device)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
plan = plan_context(512)  # one document of 512 tokens, cut over all ranks
for step in range(1, 41):
    tokens = torch.randn(512, 128)
    tokens[0, 0] = 10.0  # marks the first token
    x = plan.shard(tokens).to(device)  # (t, 128), the tokens of this rank
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = (layer(x, plan) - tokens[0].to(device)).square().sum() / tokens.numel()
    loss.backward()
    for tensor in (loss.detach(), *(p.grad for p in layer.parameters())):
        dist.all_reduce(tensor)  # sums: every rank has the loss and the gradients of all tokens
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
