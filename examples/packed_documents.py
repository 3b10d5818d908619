"""The loss and gradients of a small language model on packed documents of any length.

    python examples/packed_documents.py                                     # one process
    torchrun --standalone --nproc-per-node 2 examples/packed_documents.py   # CPU processes or GPUs

Attention, positions and labels stop at the documents' borders. Any number of processes prints the
same loss and the same norm of the gradient.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringfa3 import RingFA3Attention, keep_attention, plan_context

LENGTHS, VOCABULARY, DIM, HEADS, HEAD_DIM = [900, 1, 350, 77, 720], 100, 128, 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * HEADS * HEAD_DIM, bias=False)
        self.attention = RingFA3Attention(HEADS, HEADS, HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, plan):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        return x + self.out(self.attention(q, k, v, plan).flatten(-2))


if dist.is_torchelastic_launched():  # started by torchrun
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
elif os.environ.get("WORLD_SIZE", "1") != "1":
    raise SystemExit("WORLD_SIZE > 1: run torchrun --nproc-per-node 2 examples/packed_documents.py")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)  # the same weights and the same tokens on all ranks
embedding = nn.Embedding(VOCABULARY, DIM).to(device)
position_embedding = nn.Embedding(max(LENGTHS), DIM).to(device)
block, head = Block().to(device), nn.Linear(DIM, VOCABULARY, bias=False).to(device)
ids = torch.randint(VOCABULARY, (sum(LENGTHS),))
labels = ids.roll(-1)
ends = torch.tensor(LENGTHS).cumsum(0)
labels[ends - 1] = -100  # the last token of a document predicts nothing

plan = plan_context([0, *ends.tolist()])
ids, labels = plan.shard(ids).to(device), plan.shard(labels).to(device)  # labels: shifted before
with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
    x = embedding(ids) + position_embedding(plan.positions.to(device))
    # Recompute the block in the backward, except for attention, whose output is saved.
    x = checkpoint(block, x, plan, use_reentrant=False, context_fn=keep_attention)
    logits = head(x)
loss = F.cross_entropy(logits.float(), labels, reduction="sum") / (sum(LENGTHS) - len(LENGTHS))
loss.backward()

print(f"rank {plan.rank}: {plan.local_tokens} of {plan.total_tokens} tokens", flush=True)
weights = [p for m in (embedding, position_embedding, block, head) for p in m.parameters()]
if plan.world > 1:
    for tensor in (loss.detach(), *(p.grad for p in weights)):
        dist.all_reduce(tensor)  # sums over the ranks' tokens
if plan.rank == 0:
    norm = torch.cat([p.grad.flatten() for p in weights]).norm()
    print(f"loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
if plan.world > 1:
    dist.destroy_process_group()
