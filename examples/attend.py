"""Attention over three packed documents that all processes share.

python examples/attend.py                                           # one process
torchrun --standalone --nproc-per-node 2 examples/attend.py         # two CPU processes or GPUs
"""

import os

import torch
import torch.distributed as dist

from ringfa3 import RingFA3Attention, plan_context

if dist.is_torchelastic_launched():  # started by torchrun
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
elif os.environ.get("WORLD_SIZE", "1") != "1":
    raise SystemExit("WORLD_SIZE > 1: run torchrun --nproc-per-node 2 examples/attend.py")

plan = plan_context([0, 300, 1000, 4096])  # cumulative lengths of the documents
tokens = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
tokens = tokens.to("cuda", torch.bfloat16) if torch.cuda.is_available() else tokens
x = plan.shard(tokens)  # (t, 512), the tokens of this rank
q, k, v = x.split((256, 128, 128), dim=-1)
attention = RingFA3Attention(num_heads=4, num_kv_heads=2, head_dim=64)
out = attention(q.unflatten(-1, (4, 64)), k.unflatten(-1, (2, 64)), v.unflatten(-1, (2, 64)), plan)
whole = plan.unshard(out)  # (4096, 4, 64), the outputs of all tokens on every rank
print(f"rank {plan.rank} of {plan.world}: out {tuple(out.shape)}, norm of all {whole.norm():.2f}")

if dist.is_initialized():
    dist.destroy_process_group()
