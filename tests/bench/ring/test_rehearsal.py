"""If this fails, a rehearsal of a large ring hangs, or measures another ring. The rehearsal of a
ring on two GPUs, on a fake CUDA: which GPU is which peer; calls end."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringfa3.bench import __main__ as bench
from ringfa3.bench.common.timing import Call, Paired
from ringfa3.bench.ring import rehearsal
from ringfa3.bench.ring.rehearsal import MirroredSignals, RehearsalGroup
from ringfa3.pass_interface import HopTensors
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.stream_ops import Purpose, Signal
from tests.support.fake_cuda import FakeGroup, Ranks
from tests.support.placements import laid_out

CPU = torch.device("cpu")


def _rehearsal_group(group: FakeGroup, plays: int, ranks: int) -> RehearsalGroup:
    return RehearsalGroup(group.rank, plays, ranks, 60.0, group.gather)  # type: ignore[arg-type]


def _calls(group: FakeGroup, plays: int, ranks: int) -> list[str]:
    """Errors of calls in both directions whose kernels compare the K/V that they receive."""
    rehearsal_group = _rehearsal_group(group, plays, ranks)
    backend = rehearsal_group.backend(CPU)
    plan = laid_out([8 * ranks], ranks).plans[plays]
    wrong: list[str] = []
    hops = 0
    for number, direction in enumerate(("forward", "backward", "forward", "backward") * 2):
        keys = 1000.0 * number + 100 * torch.arange(2).view(2, 1, 1, 1)  # of each side
        keys = keys + torch.arange(plan.local_tokens).view(-1, 1, 1)
        mine, other = keys[group.rank], keys[1 - group.rank]

        def attend(hop: int, given: HopTensors) -> None:
            nonlocal hops
            for x in (given.dk, given.dv):
                if x is not None:
                    x.fill_(1)
            if hop == 0:
                return
            hops += 1
            begin, end = plan.kv_exchange.visible[(plays - hop) % ranks, hop].tolist()
            leaving = other[plan.kv_exchange.published][begin:end]  # noqa: B023
            there = [x[begin:][: len(leaving)] for x in (given.k, given.v)]
            if not (torch.equal(there[0], leaving) and torch.equal(there[1], -leaving)):
                wrong.append(f"call {number}, hop {hop}")  # noqa: B023

        ring_pass = SymmetricRingPass(backend, plan, direction)
        ring_pass.start(mine, -mine)
        ring_pass.run(attend)
    group.gather("")
    if backend.signals._received.any():  # type: ignore[attr-defined]
        wrong.append("a signal was not consumed")
    return (
        wrong
        + [rehearsal_group.failure] * (rehearsal_group.failure is not None)
        + ["no hop"] * (not hops)
    )


@pytest.mark.parametrize(("ranks", "plays"), [(2, 0), (2, 1), (3, 1), (4, 0), (4, 1), (4, 3)])
def test_calls_end_and_receive_the_other_gpus_block(ranks: int, plays: int) -> None:
    two = Ranks(2, seed=ranks + plays)
    assert two.run(lambda group: _calls(group, plays, ranks)) == [[], []]


def _addresses(group: FakeGroup) -> dict[Signal, int]:
    rehearsal_group = _rehearsal_group(group, 1, 4)
    signals = MirroredSignals(rehearsal_group, 1, 4, rehearsal_group.gather)
    begin = signals._address
    return {
        Signal(a, b, purpose, 0): signals.address(Signal(a, b, purpose, 0)) - begin
        for a, b, purpose in itertools.product(range(4), range(4), Purpose)
        if 1 in (a, b) and a != b
    }


def test_a_signal_that_one_gpu_sets_is_one_that_the_other_awaits() -> None:
    first, second = Ranks(2).run(_addresses)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    for word, at in first.items():
        if word.sender == 1:
            taken = Signal((2 - word.receiver) % 4, 1, word.purpose, 0)
            assert second[taken] == at
    assert len(set(first.values())) == len(first)


def test_a_rehearsal_writes_a_row_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both GPUs from end to end, on a fake device and clock: the ring takes twice as long as one
    GPU."""
    sides: dict[int, FakeGroup] = {}
    timed: list[int] = []

    def here() -> FakeGroup:
        return sides[threading.get_ident()]

    def by_the_clock(ring: Call, alone: Call, pairs: int, _: object) -> Paired:
        for call in (ring, alone, ring):
            call()
        timed.append(here().rank)
        return Paired([2.0] * pairs, [1.0] * pairs, calls=1, host=(0.0, 0.0))

    stand_ins = {
        "job_ranks": lambda: (here().rank, 2, 0),
        "join_job": lambda *_: None,
        "Communicator": lambda *_: SimpleNamespace(all_gather_object=here().gather),
        "CudaStopwatch": lambda _: None,
        "fallback_reason": lambda *_: None,
        "unsupported_reason": lambda: None,
        "bind_to_numa_node": lambda _: None,
        "paired": by_the_clock,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(rehearsal, name, stand_in)
    monkeypatch.setattr(rehearsal.machine, "find_device", lambda *_: CPU)
    options = rehearsal.Options(
        ranks=3, plays=1, tokens=[64, 128], direction="both", dtype="bf16", pairs=10, timeout=60.0,
        out=tmp_path,
    )  # fmt: skip

    def side(group: FakeGroup) -> int:
        sides[threading.get_ident()] = group
        return rehearsal.rehearse(options)

    assert Ranks(2).run(side) == [0, 0]
    assert sorted(timed) == [0] * 4 + [1] * 4
    written = json.loads((tmp_path / "rehearsal.json").read_text())
    assert written["settings"]["ranks"] == 3
    cases = list(itertools.product((64, 128), ("forward", "backward")))
    assert [(row["tokens"], row["direction"]) for row in written["rows"]] == cases
    for row in written["rows"]:
        whole = 3 * row["tokens"]
        products = {"forward": 2, "backward": 5}[row["direction"]]
        flops = products * 2 * 32 * 128 * whole * (whole + 1) / 2 / 3
        assert row["share"] == 0.5
        assert row["tflops"] == pytest.approx(flops / 2.0 / 1e12)
    assert len(capsys.readouterr().out.splitlines()) == len(cases)


def test_it_needs_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["rehearsal"]) == 2
    assert "rank 1 of 4 on 1 processes: give 2 processes" in capsys.readouterr().err
