"""If this fails, the first call of a process takes seconds. What the first call imports: no
compiler, which takes as long as `import torch`."""

from __future__ import annotations

import subprocess
import sys

CALLS = """
import sys
import torch
import torch.distributed as dist

from ringfa3 import *

x = torch.randn(1, 8, 2, 64, requires_grad=True)
rows = x.detach()[0].requires_grad_()
sink = torch.zeros(2, requires_grad=True)
for precision in ("native", "fp8", "int8"):
    flash_attn_func(x, x, x, precision=precision, sink=sink).sum().backward()
flash_attn_varlen_func(rows, rows, rows, [0, 3, 8], [0, 3, 8]).sum().backward()
with torch.autocast("cpu", torch.bfloat16):
    flash_attn_func(x, x, x).sum().backward()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for plan in (plan_context([0, 3, 8]), plan_context([0, 3, 8]).with_window((2, 0))):
    ring_attn_func(rows, rows, rows, plan).sum().backward()
    RingFA3Attention(2, 2, 64)(rows, rows, rows, plan).sum().backward()
    plan.unshard(plan.shard(rows)).sum().backward()
RingFA3Attention(2, 2, 64)(x, x, x).sum().backward()
heavy = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor")
print([name for name in heavy if name in sys.modules])
"""


def test_eager_calls_import_no_compiler() -> None:
    """Forward and backward of every public function, in a new process."""
    run = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
