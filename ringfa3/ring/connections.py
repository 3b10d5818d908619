"""What moves tensors between the ranks of a CP group: process groups and shared memory.

Tensors use a process group of our own, apart from the user's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from ringfa3.errors import first_line
from ringfa3.ring.agreement import AgreementWords
from ringfa3.ring.levels.opening import Owner, open_two_levels
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.ring.p2p import P2P_TRANSPORTS, Transport
from ringfa3.ring.process_group import connect_ranks, new_group
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.ipc_memory import IpcMemory
from ringfa3.symmetric.self_test import open_backend


class Connections:
    """The connections of one rank; all ranks make and abandon them together.

    unsupported     why this group cannot use `symmetric`; None if nothing is known against it
    backend         of the `symmetric` transport; None before it has been tried, or if unsupported
    last_transport  the transport of the latest call
    words           by which the ranks agree; None unless they are connected over `symmetric`
    """

    def __init__(self, group: Owner, name: str, before_first: Callable[[], None]) -> None:
        """name: the group's; before_first() is called before ranks connect."""
        self._group, self._name, self._before_first = group, name, before_first
        self._transport_generation = 0  # an error in mid-call leaves messages on the transports
        self._transports: dict[str, Transport] = {}
        self._abandoned: list[Transport | SymmetricBackend] = []  # peers may use their memory
        self.backend: SymmetricBackend | None = None
        self._two_levels: dict[tuple[int, ...], TwoLevelTransport | str] = {}  # by hosts
        self.words: AgreementWords | None = None
        self.unsupported: str | None = None
        self.last_transport: str | None = None

    def transport(self, name: str, device: torch.device) -> Transport:
        """The transport `nccl` or `gloo`; the first call makes its process group.

        All ranks make it together: a first ring call may leave some of them without messages.
        """
        if name not in self._transports:
            self._before_first()
            group = self._group
            try:
                own = f"{self._name}/ringfa3/{name}/{self._transport_generation}"
                p2p = new_group(group.ranks, group.rank, name, group.store, own, group.timeout)
                connect_ranks(p2p, device)
                self._transports[name] = P2P_TRANSPORTS[name](group, p2p)
            except RuntimeError as problem:
                hint = "; NCCL_DEBUG=INFO shows the reason" if name == "nccl" else ""
                text = f"connecting the ring over {name} failed: {first_line(problem)}{hint}"
                raise group.fail(text) from None
        self.last_transport = name
        return self._transports[name]

    def symmetric_backend(self, device: torch.device) -> SymmetricBackend | None:
        """The backend of the `symmetric` transport; None if `unsupported` says why there is none.

        The first call tries it, on all ranks together and with the same result.
        """
        if self.backend is None and self.unsupported is None:
            self._before_first()
            opened = open_backend(self._group, device)
            if isinstance(opened, str):
                self.unsupported = opened
            else:
                self.backend = opened
                group = self._group
                self.words = AgreementWords(opened.signals.agreements, group.rank, group.world)
        if self.backend is not None:
            self.last_transport = "symmetric"
        return self.backend

    def two_levels(self, hosts: tuple[int, ...], device: torch.device) -> TwoLevelTransport | str:
        """`symmetric` inside each host and `nccl` between them; or why that is not possible.

        The first call for these hosts tries it, on all ranks together and with the same result.
        """
        between = self.transport("nccl", device)
        if hosts not in self._two_levels:
            name = f"levels/{self._transport_generation}/{'.'.join(map(str, hosts))}"
            opened = open_two_levels(self._group, hosts, device, between, name)
            self._two_levels[hosts] = opened
        found = self._two_levels[hosts]
        if not isinstance(found, str):
            self.last_transport = "symmetric"
        return found

    @property
    def _copying(self) -> list[TwoLevelTransport]:
        return [x for x in list(self._two_levels.values()) if not isinstance(x, str)]

    @property
    def shared_memory(self) -> IpcMemory | None:
        """The memory of the `symmetric` transport, once that has been tried and works."""
        return None if self.backend is None else self.backend.memory

    def memory_of_levels(self, hosts: tuple[int, ...]) -> IpcMemory | None:
        """The shared memory of `two_levels`, once that has been tried and works."""
        found = self._two_levels.get(hosts)
        return None if found is None or isinstance(found, str) else found.backend.memory

    def may_use_symmetric(self, transport: str) -> bool:
        """Whether a call of CUDA tensors uses the `symmetric` transport, or has to try it first."""
        return transport in ("auto", "symmetric") and self.unsupported is None

    def completed_before(self, call: int) -> bool:
        """Whether this rank has all messages of calls before `call`."""
        backend = self.backend
        return (backend is None or backend.completed_before(call)) and all(
            transport.completed_before(call)
            for transport in (*self._transports.values(), *self._copying)
        )

    def release(self) -> None:
        """Releases streams that wait for peers: the group is lost."""
        if self.backend is not None:
            self.backend.abandon()
        for transport in self._copying:
            transport.abort()

    def abandon(self) -> None:
        """Drops the connections of a refused call; the next call connects anew."""
        self.release()
        for transport in self._transports.values():
            transport.abort()
        self._abandoned += [*self._transports.values(), *self._copying]
        self._transports, self._two_levels = {}, {}
        self._transport_generation += 1
        if self.backend is not None:
            self._abandoned.append(self.backend)
            self.backend = self.words = None

    def close(self, meet: Callable[[], bool] | None) -> None:
        """Ends threads, process groups and shared memory.

        meet: whether all ranks have called it; None: a rank has given up, or this process ends
            before its peers, so it waits for none of them
        """
        for transport in (*self._copying, *self._transports.values()):
            with suppress(RuntimeError):  # of the device, or of the driver
                transport.close(meet is None)
        for abandoned in self._abandoned:
            with suppress(RuntimeError):
                if isinstance(abandoned, SymmetricBackend):
                    abandoned.close()
                else:
                    abandoned.close(lost=True)
        if self.backend is not None:
            with suppress(RuntimeError):
                self.backend.close(meet)
        self._transports, self._abandoned, self.backend, self.words = {}, [], None, None
        self._two_levels = {}
