"""If this fails, the capture of a ring call fails on one rank and hangs the others. Ring calls over
`symmetric` that cannot be captured yet raise on all ranks, with a remedy."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from ringfa3.ring import prepare_call
from ringfa3.ring.group import RingGroup
from ringfa3.ring.prepare_call import pass_type_of
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric import self_test
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.cuda_graphs import capture_error
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, select_forward_mode
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.self_test import open_backend
from ringfa3.symmetric.stream_ops import BufferSpec
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup
from tests.support.placements import laid_out

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)  # of stand-ins
FIRST = (
    r"cannot be captured in a CUDA graph: no call of this plan with these settings has run "
    "yet: before the capture, run a call with the same"
)


def _capture_errors(group: FakeGroup) -> list[str]:
    """Before and after calls of the same pass types have run."""
    with mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=2.0):
        backend = open_backend(group, CPU)  # type: ignore[arg-type]
    assert isinstance(backend, SymmetricBackend)
    plan = laid_out([512], 2).plans[group.rank]
    q, k = torch.zeros(plan.local_tokens, 4, 64), torch.zeros(plan.local_tokens, 1, 64)
    forward = pass_type_of("forward", select_forward_mode(plan, q, k))

    def error(pass_type: str) -> str:
        return str(capture_error(backend.memory, BufferSpec(plan, pass_type, k), known=True))

    def run(pass_type: str) -> None:
        ring_pass = SymmetricRingPass(backend, plan, pass_type)
        ring_pass.start(k, k)
        ring_pass.run(lambda *_, **__: None)

    errors = [error(forward), error("backward")]
    run("gathered")
    errors += [error(forward), error("backward")]
    run("backward")
    return [*errors, error("backward")]


def test_memory_must_not_have_to_grow() -> None:
    with (
        mock.patch.dict(os.environ, {FORWARD_MODE_ENV: "gathered"}),
        mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64),
    ):
        for errors in Ranks(2).run(_capture_errors):
            assert [x == "None" for x in errors] == [False, False, True, False, True]  # type: ignore[attr-defined]
            assert "the group's shared memory is too small for it: before the capture" in errors[0]  # type: ignore[index]


class Entered:
    """`prepare_call` for CUDA tensors of one shape; the group raises every error it is given."""

    def __init__(self, opened: bool = True) -> None:
        self.backend = object.__new__(SymmetricBackend)
        self.backend.memory = mock.Mock(device=GPU)
        self.backend.memory.holds.return_value = True
        self.plan, self.asked = mock.Mock(world=2, hosts=(0, 0), kv_budget=None), []
        memory = self.backend.memory if opened else None
        self.group = mock.MagicMock(rank=0)
        connections = self.group.connections
        connections.shared_memory = memory
        connections.symmetric_backend.return_value = self.backend
        connections.may_use_symmetric.side_effect = lambda name: name in ("auto", "symmetric")
        self.group.agree.side_effect = self.agree

    def agree(self, settings: Settings, error: Exception | None) -> None:
        self.asked.append(dict(settings))
        if error is not None:
            raise error

    def call(self, captured: bool, transport: str = "auto") -> object:
        x = mock.Mock(shape=(8, 2, 64), dtype=torch.bfloat16, is_cuda=True)
        x.stride.return_value = (128, 64, 1)
        plan, settings = self.plan, mock.Mock(return_value=Settings({"q": "so"}))
        with (
            mock.patch.multiple(prepare_call, _validate=mock.Mock(), ring_settings=settings),
            mock.patch.object(prepare_call.host, "ensure"),
            mock.patch.object(prepare_call, "select_forward"),
            mock.patch.multiple(
                prepare_call, BufferSpec=mock.MagicMock(), select_forward_mode=mock.Mock()
            ),
            mock.patch.object(RingGroup, "of", return_value=self.group),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captured),
        ):
            x.device = GPU
            call = prepare_call.prepare_call(
                x, x, x, plan, 1.0, False, "native", transport, "forward"
            )
        return call.make_pass.args[0]  # type: ignore[attr-defined]


@pytest.fixture
def entered() -> Entered:
    return Entered()


def test_a_call_whose_like_has_run_is_captured(entered: Entered) -> None:
    """If all ranks capture it, on which they agree."""
    entered.call(captured=False)
    assert entered.call(captured=True) is entered.backend
    assert entered.asked == [{"q": "so"}, {"q": "so", "CUDA graph": "captured"}]


def test_the_first_call_of_its_kind_is_not_captured(entered: Entered) -> None:
    """Nor the second, if the first has raised."""
    for _ in range(2):
        with pytest.raises(ValueError, match=FIRST):
            entered.call(captured=True)
    assert entered.call(captured=False) is entered.backend
    assert entered.call(captured=True) is entered.backend


def test_the_self_test_of_a_group_is_not_captured() -> None:
    entered = Entered(opened=False)
    entered.call(captured=False)
    with pytest.raises(
        ValueError, match="no call of this group has used 'symmetric' yet: before the capture"
    ):
        entered.call(captured=True)


def test_calls_over_nccl_need_no_preparation(entered: Entered) -> None:
    entered.group.connections.transport.return_value = "nccl"
    assert entered.call(captured=True, transport="nccl") == "nccl"
    assert entered.asked == [{"q": "so"}]
