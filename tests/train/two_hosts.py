"""Jobs of two torchrun agents that stand for two hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.ranks import free_port
from tests.train.jobs import Job


class TwoHosts:
    """A job of two agents with one process each; the first holds the rendezvous.

    ``environments`` are those of the agents, beside this process's own. ``replaceable``: a new
    agent can join in a dead one's place. torchrun's default, a store that agents share with their
    processes, does not let it.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        replaceable: bool,
    ) -> None:
        self.stack, self.folder, self.arguments = stack, folder, arguments
        self.environments, self.replaceable = environments, replaceable
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.agents = [self.start(number) for number in range(2)]

    def start(self, number: int) -> Job:
        launcher = ("--nnodes", "2", "--max-restarts", "2", "--rdzv-backend", "c10d")
        launcher += ("--rdzv-endpoint", self.endpoint, "--rdzv-id", "two")
        launcher += ("--rdzv-conf", f"is_host={int(number == 0)}")
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(self.replaceable))}
        job = Job(
            self.folder,
            1,
            *self.arguments,
            launcher=launcher,
            environment={**own_store, **self.environments[number]},
            fresh=True,
        )
        return self.stack.enter_context(job)

    def replace(self, number: int) -> None:
        """SIGKILL to an agent and its process, as if a host lost its power; a new one starts."""
        agent = self.agents[number].process.pid
        for pid in self.agents[number].pids():
            if f"\nPPid:\t{agent}\n" in Path(f"/proc/{pid}/status").read_text():
                os.kill(pid, signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        self.agents[number] = self.start(number)

    def finish(self) -> None:
        """Wait for both agents to end with exit code 0."""
        ends = [agent.end() for agent in self.agents]
        assert [code for code, _ in ends] == [0, 0], ends


@contextmanager
def two_hosts(
    folder: Path,
    *arguments: str,
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    replaceable: bool = False,
) -> Iterator[TwoHosts]:
    """A job in ``folder``; all its processes are killed at the end."""
    with ExitStack() as stack:
        yield TwoHosts(stack, folder, arguments, environments, replaceable)
