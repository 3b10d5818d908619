"""If this fails, shifted labels, halos and recurrent layers get other ranks' rows wrongly on GPUs.
Shifts, halos and remaps of rows between GPUs, over NCCL: equal bits. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringfa3 import plan_context
from tests.ring.test_row_exchange import CU, convolved, shifted, whole
from tests.support.gpus import spawn, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _worker(rank: int, world: int) -> None:
    """Reference: the same operation on all tokens, on the CPU; gradients to 1e-15."""
    everything, weight = whole().requires_grad_(), torch.randn(3, 1, 4, dtype=torch.float64)
    dist.broadcast(on_gpu := weight.cuda(), 0)
    weight = on_gpu.cpu()
    for layout in ("zigzag", "contiguous"):
        plan = plan_context(CU, layout=layout)

        def of_halo(x: torch.Tensor, plan=plan) -> torch.Tensor:  # type: ignore[no-untyped-def]
            rows, own = plan.halo(x, 3)
            padded = torch.nn.functional.pad(rows.t(), (3, 0))[None]
            return torch.nn.functional.conv1d(padded, on_gpu, groups=3)[0].t()[own]

        def there_and_back(x: torch.Tensor, plan=plan) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return plan.from_contiguous(2 * plan.to_contiguous(x))

        operations = {
            "shift": (lambda x, plan=plan: plan.shift(x, 3), lambda x: shifted(x, 3) + 0 * x),
            "halo": (of_halo, lambda x: convolved(x, weight)),
            "remap": (there_and_back, lambda x: 2 * x),
        }
        for name, (ours, theirs) in operations.items():
            expected = theirs(everything)
            everything.grad = None
            expected.backward(torch.ones_like(expected))
            for _ in range(2):  # the second call agrees on nothing
                mine = plan.shard(whole()).cuda().requires_grad_()
                found = ours(mine)
                found.backward(torch.ones_like(found))
                for x, y in ((found, expected), (mine.grad, everything.grad)):
                    assert x is not None
                    assert y is not None
                    torch.testing.assert_close(
                        x.detach().cpu(), plan.shard(y.detach()), rtol=1e-14, atol=1e-14, msg=name
                    )
        labels = torch.arange(CU[-1], dtype=torch.int16)
        moved = plan.shift(plan.shard(labels).cuda(), -1, fill=-100)
        assert torch.equal(moved.cpu(), plan.shard(shifted(labels, -1, -100)))


@worlds(2, 3, 4, 8)
def test_rows_between_gpus_are_those_of_all_tokens(world: int) -> None:
    spawn(_worker, world)
