"""`python -m ringfa3.bench` on the ranks of a job, for `tests.support.ranks.sacrifice`."""

from __future__ import annotations

import contextlib
import io
import os

import torch.distributed as dist

from ringfa3.bench.__main__ import main


def bench_job(group: dist.ProcessGroup, port: int, *arguments: str) -> tuple[int, str]:
    """The exit code of this rank of a job, and what it prints to stdout."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(x) for name, x in place.items()}}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(arguments), printed.getvalue()
