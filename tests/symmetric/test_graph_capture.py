"""Ring calls over `symmetric` that cannot be captured yet: refused on all ranks, with a remedy."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from ringfa3.ring import prepare_call
from ringfa3.ring.group import RingGroup, Settings
from ringfa3.symmetric import backend, graph_capture
from ringfa3.symmetric.backend import CudaMachine, open_machine
from ringfa3.symmetric.forward_mode import FORWARD
from ringfa3.symmetric.ring_pass import Course
from tests.support.fake_cuda import FakeGroup, Ranks
from tests.support.placements import laid_out

CPU = torch.device("cpu")
FIRST = (
    r"cannot be captured in a CUDA graph yet, it is the first of its kind: run a call of the same"
)


def _refusals(group: FakeGroup) -> list[str]:
    """Before and after such calls have run."""
    with mock.patch.multiple(backend, TRIAL_TOKENS=8, TRIAL_S=2.0):
        machine = open_machine(group, CPU)  # type: ignore[arg-type]
    assert isinstance(machine, CudaMachine)
    plan = laid_out([512], 2).plans[group.rank]
    q, k = torch.zeros(plan.local_tokens, 4, 64), torch.zeros(plan.local_tokens, 1, 64)

    def said(direction: str) -> str:
        return str(graph_capture.refusal(machine, plan, direction, q, k, known=True))

    found = [said("forward"), said("backward")]
    Course(machine, plan, "gathered", k, k).run(lambda *_: None)
    found += [said("forward"), said("backward")]
    Course(machine, plan, "backward", k, k).run(lambda *_: None)
    return [*found, said("backward")]


def test_memory_must_not_have_to_grow() -> None:
    with (
        mock.patch.dict(os.environ, {FORWARD: "gathered"}),
        mock.patch("ringfa3.symmetric.ipc_memory.ALIGNMENT", 64),
    ):
        for found in Ranks(2).run(_refusals):
            assert [x == "None" for x in found] == [False, False, True, False, True]  # type: ignore[attr-defined]
            assert "the group's memory would have to grow: run a call" in found[0]  # type: ignore[index]


class Entered:
    """`admission.enter` for CUDA tensors of one shape; the group takes all errors as agreed on."""

    def __init__(self, opened: bool = True) -> None:
        self.machine = object.__new__(CudaMachine)
        self.machine.arena = mock.Mock()
        self.machine.arena.holds.return_value = True
        self.plan, self.asked = mock.Mock(world=2), []
        self.group = mock.Mock(rank=0, opened=self.machine if opened else None)
        self.group.machine.return_value = self.machine
        self.group.may_pull.side_effect = lambda name: name in ("auto", "symmetric")
        self.group.agree.side_effect = self.agree

    def agree(self, settings: Settings, error: Exception | None) -> None:
        self.asked.append(dict(settings))
        if error is not None:
            raise error

    def call(self, captured: bool, transport: str = "auto") -> object:
        x = mock.Mock(shape=(8, 2, 64), dtype=torch.bfloat16, is_cuda=True)
        x.stride.return_value = (128, 64, 1)
        plan, settings = self.plan, mock.Mock(return_value={"q": "so"})
        with (
            mock.patch.multiple(prepare_call, _check=mock.Mock(), _settings=settings),
            mock.patch.object(prepare_call, "select_forward"),
            mock.patch.multiple(graph_capture, Cargo=mock.MagicMock(), kind_of_forward=mock.Mock()),
            mock.patch.object(RingGroup, "of", return_value=self.group),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captured),
        ):
            x.device = CPU
            return prepare_call.enter(x, x, x, plan, 1.0, False, "native", transport, "forward")


@pytest.fixture
def entered() -> Entered:
    return Entered()


def test_a_call_whose_like_has_run_is_captured(entered: Entered) -> None:
    """If all ranks capture it: what they agree on says so."""
    entered.call(captured=False)
    assert entered.call(captured=True) is entered.machine
    assert entered.asked == [{"q": "so"}, {"q": "so", "CUDA graph": "captured"}]


def test_the_first_call_of_its_kind_is_not_captured(entered: Entered) -> None:
    """Nor the second, if the first was refused."""
    for _ in range(2):
        with pytest.raises(ValueError, match=FIRST):
            entered.call(captured=True)
    assert entered.call(captured=False) is entered.machine
    assert entered.call(captured=True) is entered.machine


def test_a_groups_trial_is_not_captured() -> None:
    entered = Entered(opened=False)
    entered.call(captured=False)
    with pytest.raises(ValueError, match="the group has not tried the transport yet: run a call"):
        entered.call(captured=True)


def test_calls_over_nccl_are_no_matter_of_ours(entered: Entered) -> None:
    entered.group.transport.return_value = "nccl"
    assert entered.call(captured=True, transport="nccl") == "nccl"
    assert entered.asked == [{"q": "so"}]
