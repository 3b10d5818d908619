"""If this fails, rings over several hosts send more between hosts than documented. Two network
namespaces as two hosts: the link between them counts the bytes that cross."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ringfa3 import plan_context
from tests.support.link_rank import HEAD_DIM, HEADS, TOKENS
from tests.support.ranks import free_port

ADDRESSES = "10.213.57.1", "10.213.57.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """(namespace, interface) of two namespaces that a link of 1 Gbit/s connects."""
    names = [f"ringfa3-{os.getpid()}-{n}" for n in range(2)]
    links = [f"rfa{n}" for n in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [("name", link, "netns", name) for link, name in zip(links, names, strict=True)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            for each in (link, "lo"):
                ip("-n", name, "link", "set", each, "up")
            limit = ("rate", "1gbit", "burst", "1mb", "latency", "50ms")
            inside = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf"]
            subprocess.run([*inside, *limit], check=True, capture_output=True)
        yield list(zip(names, links, strict=True))
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"no network namespaces: {problem.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.soak
@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="needs iproute2")
def test_each_row_crosses_the_link_once(hosts: list[tuple[str, str]]) -> None:
    """Bytes of the link each way, forward and backward, within 2% of what the plan says: headers
    and the store come on top. Without two levels, the rows of each reader."""
    port, processes = free_port(), []
    for rank in range(4):
        namespace, link = hosts[rank // 2]
        command: list[Any] = [sys.executable, "-m", "tests.support.link_rank", rank, 4]
        command = ["ip", "netns", "exec", namespace, *command, ADDRESSES[0], port, link]
        given = {**os.environ, "GLOO_SOCKET_IFNAME": link, "CUDA_VISIBLE_DEVICES": ""}
        processes.append(
            subprocess.Popen([str(x) for x in command], env=given, stdout=subprocess.PIPE)
        )
    try:
        counts = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    row = 2 * HEADS * HEAD_DIM * 4
    plans = [plan_context(TOKENS, (rank, 4), hosts=2) for rank in range(4)]
    once = plans[0].by_messages().between_hosts
    direct = np.zeros((2, 2), int)
    for owner, hop, begin, end in plans[0].kv_exchange.runs():
        direct[owner // 2, (owner + hop) % 4 // 2] += end - begin
    for host in range(2):
        for n, rows in enumerate((direct, once)):
            predicted = row * (2 * rows[host, 1 - host] + rows[1 - host, host])
            assert counts[2 * host][n] == pytest.approx(predicted, rel=0.02)
    assert (direct > 1.4 * once)[~np.eye(2, dtype=bool)].any()
