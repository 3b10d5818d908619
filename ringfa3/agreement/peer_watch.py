"""Notices that the process of another rank has ended: the system closes its sockets.

A process that hangs, is stopped, compiles, or holds Python's lock keeps its sockets.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

from torch._C._distributed_c10d import Store

from ringfa3.numa import host_name

CONNECT_S = 1.0
OUTSIDE = ("192.0.2.1", 9)  # an address of documentation, to which nothing is sent


class PeerWatch:
    """Of one rank, which watches the next one of its group. One thread calls all methods.

    Its listening socket accepts no connection: that of the rank before waits there until this
    process ends.
    """

    _open: weakref.WeakSet[PeerWatch] = weakref.WeakSet()  # noqa: RUF012

    def __init__(self, store: Store, rank: int, world: int) -> None:
        """store: the group's own."""
        self._store, self.peer = store, (rank + 1) % world
        self._connection: socket.socket | None = None
        self._listener = socket.create_server(("", 0), backlog=8)
        self._open.add(self)
        address = _loopback(), _address(), self._listener.getsockname()[1]
        store.set(_address_key(rank), json.dumps(address))

    def ended(self) -> bool:
        """Whether the next rank's process has ended, or has closed its watch.

        Raises OSError: that rank cannot be reached.
        """
        if self._connection is None:
            key = _address_key(self.peer)
            if not self._store.check([key]):
                return False
            loopback, address, port = json.loads(self._store.get(key))
            to = "127.0.0.1" if loopback == _loopback() else address
            self._connection = socket.create_connection((to, port), CONNECT_S)
            self._connection.setblocking(False)
        try:
            return self._connection.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._open.discard(self)
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    @classmethod
    def close_in_child(cls) -> None:
        """A forked process, such as a data loader's, may outlive the rank."""
        for watch in list(cls._open):
            watch.close()


os.register_at_fork(after_in_child=PeerWatch.close_in_child)


def _address_key(rank: int) -> str:
    return f"ringfa3/address/{rank}"


def _loopback() -> str:
    """The same in all processes that reach each other by 127.0.0.1: a host and its network."""
    network = Path("/proc/self/ns/net")
    return f"{host_name()} {os.readlink(network) if network.exists() else ''}"


def _address() -> str:
    """By which other hosts reach this one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(OUTSIDE)
        return str(probe.getsockname()[0])
    return socket.gethostname()
