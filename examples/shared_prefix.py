"""Policy-gradient steps on many responses to one prompt, which is computed once.

    python examples/shared_prefix.py                                     # one process
    torchrun --standalone --nproc-per-node 2 examples/shared_prefix.py   # CPU processes or GPUs

As in GRPO, a token of a response has the response's advantage as its weight. `trees.fold` makes
trees of all sequences; loss and gradients are those of the sequences one by one. Any number of
processes prints the same losses.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ringfa3 import RingFA3Attention, plan_context, trees

PROMPTS, RESPONSES, VOCABULARY, DIM, HEADS, HEAD_DIM = (300, 170), 8, 100, 64, 2, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * HEADS * HEAD_DIM, bias=False)
        self.attention = RingFA3Attention(HEADS, HEADS, HEAD_DIM)  # the plan has the mask
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, plan):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        return x + self.out(self.attention(q, k, v, plan).flatten(-2))


if dist.is_torchelastic_launched():  # started by torchrun
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
elif os.environ.get("WORLD_SIZE", "1") != "1":
    raise SystemExit("WORLD_SIZE > 1: run torchrun --nproc-per-node 2 examples/shared_prefix.py")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)  # the same weights and the same sequences on all ranks

sequences, weights = [], []
for length in PROMPTS:
    prompt = torch.randint(VOCABULARY, (length,))
    rewards = torch.rand(RESPONSES)
    for advantage in (rewards - rewards.mean()) / rewards.std():
        response = torch.randint(VOCABULARY, (int(torch.randint(20, 60, ())),))
        sequences.append(torch.cat((prompt, response)))
        weights.append(torch.cat((torch.zeros(length), advantage.expand(len(response)))))
folded = trees.fold(sequences, weights, min_shared=16)

embedding = nn.Embedding(VOCABULARY, DIM).to(device)
position_embedding = nn.Embedding(512, DIM).to(device)
block, head = Block().to(device), nn.Linear(DIM, VOCABULARY, bias=False).to(device)
parameters = [p for m in (embedding, position_embedding, block, head) for p in m.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.003)

plan = plan_context(folded.mask)
if plan.rank == 0:
    print(f"{sum(map(len, sequences))} tokens fold into {plan.total_tokens}")
tokens, labels = (plan.shard(x).to(device) for x in (folded.tokens, folded.labels))
factors = plan.shard(folded.weights).to(device, torch.float32) / len(sequences)
positions = plan.positions.to(device)

for step in range(3):
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        x = block(embedding(tokens) + position_embedding(positions), plan)
        logits = head(x)
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    loss = (losses * factors).sum()
    loss.backward()
    if plan.world > 1:  # sums over the ranks' tokens
        for tensor in (loss.detach(), *(p.grad for p in parameters)):
            dist.all_reduce(tensor)
    optimizer.step()
    optimizer.zero_grad()
    if plan.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if plan.world > 1:
    dist.destroy_process_group()
