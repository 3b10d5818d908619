"""If this fails, a ring runs over a slower transport than it could, or over one that cannot work.
The transport that `prepare_call` chooses for CUDA tensors, without a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ringfa3.kernels.dispatch import log_once
from ringfa3.ring import prepare_call
from ringfa3.ring.group import RingGroup
from ringfa3.ring.levels.two_level_pass import TwoLevelPass
from ringfa3.ring.levels.two_levels import TwoLevelTransport
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric.backend import SymmetricBackend


def _transport_of(
    transport: str,
    possible: bool,
    memory: object = None,
    hosts: tuple[int, ...] = (0, 0),
    kv_budget: int | None = None,
    captures: bool = False,
) -> object:
    """The transport that `prepare_call` chooses for tensors on cuda:1."""
    group = mock.MagicMock(rank=0)
    connections = group.connections
    connections.shared_memory = connections.memory_of_levels.return_value = memory
    connections.unsupported = "rank 1: no CUDA driver"
    levels = object.__new__(TwoLevelTransport)
    connections.two_levels.return_value = levels if possible else connections.unsupported
    connections.transport.side_effect = lambda name, _: name
    backend = object.__new__(SymmetricBackend)
    connections.symmetric_backend.return_value = backend if possible else None
    connections.may_use_symmetric.side_effect = lambda name: name in ("auto", "symmetric")

    def agree(_: object, error: Exception | None) -> None:
        if error is not None:
            raise error

    group.agree.side_effect = agree
    x = mock.Mock(shape=(8, 2, 64), dtype=torch.bfloat16, is_cuda=True)
    x.device = torch.device("cuda", 1)
    plan = mock.Mock(world=len(hosts), kv_budget=kv_budget, hosts=hosts)
    with (
        mock.patch.multiple(
            prepare_call,
            _validate=mock.Mock(),
            ring_settings=mock.Mock(return_value=Settings()),
            select_forward_mode=mock.Mock(),
        ),
        mock.patch.object(prepare_call.host, "ensure"),
        mock.patch.object(prepare_call, "select_forward"),
        mock.patch.object(RingGroup, "of", return_value=group),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captures),
    ):
        call = prepare_call.prepare_call(x, x, x, plan, 1.0, False, "native", transport, "forward")
    (used,) = call.make_pass.args  # type: ignore[attr-defined]
    if used is levels:
        assert call.make_pass.func is TwoLevelPass  # type: ignore[attr-defined]
        return "two levels"
    return "symmetric" if used is backend else used


def test_auto_is_symmetric_where_that_is_possible(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is not, the first rank prints why, once."""
    log_once.cache_clear()
    assert _transport_of("auto", possible=True) == "symmetric"
    assert _transport_of("auto", possible=False) == "nccl"
    assert _transport_of("auto", possible=False) == "nccl"
    line = "ringfa3: using transport nccl; symmetric is not available: rank 1: no CUDA driver\n"
    assert capsys.readouterr().err == line
    assert _transport_of("nccl", possible=True) == "nccl"
    assert _transport_of("symmetric", possible=True) == "symmetric"
    with pytest.raises(
        ValueError, match=r"not possible here \(rank 1: no CUDA driver\): use 'nccl'"
    ):
        _transport_of("symmetric", possible=False)


def test_symmetric_by_name_copies_inside_hosts() -> None:
    """On several hosts, of which each has several ranks."""
    hosts = (0, 1, 0, 1, 1)
    assert _transport_of("symmetric", possible=True, hosts=hosts) == "two levels"
    assert _transport_of("auto", possible=False, hosts=hosts) == "nccl"
    assert _transport_of("nccl", possible=True, hosts=hosts) == "nccl"
    for others in ((0, 1, 2), (0, 0, 1), (0, 0)):
        assert _transport_of("symmetric", possible=True, hosts=others) == "symmetric"
    there = mock.Mock(device=torch.device("cuda", 0))
    for refused, text in (
        ({"possible": False}, r"not possible here \(rank 1: no CUDA driver\): use 'nccl'"),
        ({"kv_budget": 9}, r"kv_budget=9 with transport='symmetric' on several hosts: .*'nccl'"),
        ({"captures": True}, r"cannot be captured in a CUDA graph: use 'nccl'"),
        ({"memory": there}, r"q is on cuda:1; .* runs on cuda:0: give tensors"),
    ):
        with pytest.raises(ValueError, match=text):
            _transport_of("symmetric", **{"possible": True, **refused}, hosts=hosts)  # type: ignore[arg-type]


def test_a_group_over_peers_memory_has_one_device() -> None:
    """Streams and memory are those of the first call. Over NCCL the device may change."""
    there, here = (mock.Mock(device=torch.device("cuda", i)) for i in range(2))
    for transport in ("auto", "symmetric"):
        with pytest.raises(ValueError, match=r"q is on cuda:1; .* runs on cuda:0: give tensors"):
            _transport_of(transport, possible=True, memory=there)
        assert _transport_of(transport, possible=True, memory=here) == "symmetric"
    assert _transport_of("nccl", possible=True, memory=there) == "nccl"
