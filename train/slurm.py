"""The variables of torchrun from those of Slurm, for ``srun python train/pretrain.py``.

It imports the standard library alone: it runs before the check for missing packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import MutableMapping

# Below the ports that Linux gives to outgoing connections, 32768 and above.
FIRST_PORT, PORTS = 15_000, 15_000


def set_ranks(environment: MutableMapping[str, str]) -> None:
    """Set rank, world size and rendezvous of a task that srun has started among several.

    Only srun sets the variables of a job step (``SLURM_STEP_*``). In the batch script, and in the
    shell of salloc, ``SLURM_NTASKS`` counts tasks that nobody has started. Processes of torchrun,
    and a ``MASTER_ADDR`` or ``MASTER_PORT`` that is set, stay as they are.
    """
    world = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if world == 1 or "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return
    node, nodes = int(environment["SLURM_NODEID"]), environment["SLURM_STEP_NUM_NODES"]
    tasks = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=str(world),
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(tasks[node]),
        GROUP_RANK=str(node),
        GROUP_WORLD_SIZE=nodes,
    )
    if "MASTER_ADDR" not in environment:
        hosts = environment["SLURM_STEP_NODELIST"]
        environment["MASTER_ADDR"] = "127.0.0.1" if nodes == "1" else first_host(hosts)
    # Steps of a job may run at the same time, and so may jobs on one host.
    step = 16 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + step % PORTS))


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as ``gpu[03-05,9],login1``, by scontrol if it runs.

    Rank 0 runs there, unless ``--distribution`` is arbitrary.
    """
    scontrol = shutil.which("scontrol")
    if scontrol is not None:
        done = subprocess.run(
            [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches an empty text too
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def tasks_per_node(counts: str) -> list[int]:
    """The tasks of each node, from Slurm's ``4(x2),3``: 4, 4 and 3."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
