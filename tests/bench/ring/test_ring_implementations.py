"""If this fails, a ring in the tables computes a wrong result. Rows of the ring benchmark on
processes that talk over gloo, each checked against float64."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfa3 import Mask
from ringfa3.bench.common.cases import BACKWARD, CAUSAL, FORWARD
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.comparison import measure_row
from ringfa3.bench.common.implementations import LoadError, RingFA3
from ringfa3.bench.common.problem import (
    Implementation,
    PreparedRun,
    Problem,
    UnsupportedCaseError,
    make_problem,
)
from ringfa3.bench.common.results import RingRow
from ringfa3.bench.common.timing import WallClock
from ringfa3.bench.ring import implementations, peers
from ringfa3.bench.ring.cases import RingCase, ring_case
from ringfa3.bench.ring.implementations import (
    Ring,
    SingleGpu,
    dense_ring,
    documents_of_a_rank,
    single_gpu_same_mask,
)
from ringfa3.bench.ring.peers import (
    ZIGZAG_FUNCTION,
    TorchRing,
    Ulysses,
    Zigzag,
    ring_flash_attn_functions,
)
from ringfa3.symmetric import forward_mode
from tests.bench.common.test_communicator import communicator_of
from tests.bench.common.test_implementations import operators_of_fa3
from tests.support.ranks import sacrifice

CPU = torch.device("cpu")
LIMIT_S = 60.0  # for a busy machine


def case_of(kind: str, world: int) -> RingCase:
    lengths, left = {
        "lengths": ((120,), -1),
        "documents": ((50, 1, 60, 9), -1),
        "window": ((120,), 7),
        "tree": ((120,), -1),
    }[kind]
    spans = Mask.tree([40, 30, 50], [-1, 0, 0]) if kind == "tree" else None
    case = RingCase(kind, kind, lengths, 12, 6, 32, (left, 0), packed=True, world=world)
    return replace(case, spans=spans)


def row_of(
    case: RingCase, direction: str, comm: Communicator, *implementations: Implementation
) -> RingRow:
    alone = RingFA3("alone")
    stopwatch = WallClock(comm)
    row = measure_row(case, direction, torch.bfloat16, CPU, implementations, 2, stopwatch, alone)
    assert isinstance(row, RingRow)
    return row


def every_way(group: dist.ProcessGroup) -> list[RingRow]:
    comm = communicator_of(group, 20.0)
    rows = []
    for kind in ("lengths", "documents", "window", "tree"):
        for direction in (FORWARD, BACKWARD):
            case, ring = case_of(kind, comm.world), Ring(comm)
            peer = single_gpu_same_mask(RingFA3()) if case.spans else Ulysses(comm, RingFA3())
            rows.append(row_of(case, direction, comm, ring, peer))
            assert ring.moved_by == "gloo"
    return rows


def test_right_results_have_figures_and_errors_like_those_of_one_device() -> None:
    world = 3
    first, *others = sacrifice(world, 60, every_way, limit=LIMIT_S)
    assert others == [first] * (world - 1)  # times and errors of all ranks together
    assert len(first) == 8
    for row in first:
        assert row.stopped is None, row
        assert row.flops == case_of(row.set, world).flops(row.direction)
        assert {name: m.stopped for name, m in row.comparisons.items()} == dict.fromkeys(
            row.comparisons
        )
        assert set(row.errors) == set(row.single_gpu_errors)
        ((name, found),) = row.comparisons.items()
        if row.set == "tree":
            assert (name, found.errors) == ("RingFA3 alone, same mask", {})
        else:
            assert set(row.errors) == set(found.errors)
        assert max(row.error_growth.values()) <= 1.1
        assert all(e > 0 for e in row.errors.values())


class Peer:
    """RingFA3's ring on a group of its own, spoilt on rank 1."""

    def __init__(self, comm: Communicator, how: str) -> None:
        self.comm, self.name = comm, how
        self.ring = Ring(comm)
        self.ring.name = how

    def prepare(self, problem: Problem) -> PreparedRun:
        prepared = self.ring.prepare(problem)

        def run() -> Any:
            mine = self.comm.rank == 1
            if mine and self.name == "raises":
                raise RuntimeError("a bug of a peer")
            if self.name == "hangs" and not mine:
                dist.all_reduce(torch.zeros(1), group=self.comm.process_group("hangs"))
            result = prepared.run()
            if mine and self.name == "wrong":
                result.view(-1)[3] += 1
            if mine and self.name == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        return replace(prepared, run=run)


class Late:
    """Exchanges nothing, and fails on rank 1 while it is timed: the others are a step ahead."""

    name = "late"

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.runs = comm, 0

    def prepare(self, problem: Problem) -> PreparedRun:
        prepared = SingleGpu(RingFA3()).prepare(problem)

        def run() -> object:
            self.runs += 1
            # Three calls warm up, three estimate the time.
            if self.comm.rank == 1 and self.runs > 6:
                raise RuntimeError("a late bug")
            return prepared.run()

        return replace(prepared, run=run)


def spoilt(group: dist.ProcessGroup) -> tuple[float, RingRow, RingRow, RingRow]:
    comm = communicator_of(group, 2.0)
    case, ring = case_of("lengths", comm.world), Ring(comm)
    peers = [Peer(comm, how) for how in ("hangs", "wrong", "raises", "memory")]
    begin = time.monotonic()
    row = row_of(case, FORWARD, comm, ring, *peers, Late(comm), Ulysses(comm, RingFA3()))
    seconds = time.monotonic() - begin
    ours = row_of(case, FORWARD, comm, Peer(comm, "raises"), Ulysses(comm, RingFA3()))
    return seconds, row, ours, row_of(case, BACKWARD, comm, ring, Ulysses(comm, RingFA3()))


def test_a_peer_that_fails_or_hangs_on_one_rank_holds_up_nobody() -> None:
    (seconds, row, ours, after), (_, *others) = sacrifice(2, 60, spoilt, limit=LIMIT_S)
    assert [row, ours, after] == others
    stopped = {name: str(match.stopped) for name, match in row.comparisons.items()}
    assert stopped["hangs"].startswith("failed: ")
    assert stopped["wrong"].startswith("wrong: out ")
    assert stopped["wrong"].endswith(" (rank 1)")
    assert stopped["raises"] == "failed: a bug of a peer (rank 1)"
    assert stopped["memory"] == "out of memory (rank 1)"
    assert stopped["late"] == "failed: a late bug (rank 1)"
    assert row.comparisons["Ulysses on RingFA3"].ratio is not None
    assert seconds < 40  # alone 6: three timeouts
    assert ours.stopped == "failed: a bug of a peer (rank 1)"
    assert not ours.comparisons
    assert after.stopped is None
    assert after.comparisons["Ulysses on RingFA3"].ratio is not None


def test_baselines_have_equal_flops() -> None:
    for kind in ("lengths", "documents", "window"):
        case = case_of(kind, 1)
        problem = make_problem(case, FORWARD, torch.float32, CPU)
        single = SingleGpu(RingFA3()).prepare(problem)
        assert single.flops == pytest.approx(case.flops(FORWARD), rel=0.05)
        assert single.run().shape == (1, 120, 12, 32)
        assert single.outputs is None
        dense = dense_ring(Ring(Communicator())).prepare(problem)
        assert dense.flops == pytest.approx(case.flops(FORWARD), rel=0.05)
        assert dense.outputs is None
    four = case_of("lengths", 4)
    problem = make_problem(four, FORWARD, torch.float32, CPU)
    assert SingleGpu(RingFA3()).prepare(problem).run().shape == (1, 30, 12, 32)
    window = case_of("window", 4)
    share = single_gpu_same_mask(RingFA3()).prepare(
        make_problem(window, FORWARD, torch.float32, CPU)
    )
    assert share.run().shape == (30, 12, 32)
    assert share.flops == 4 * 12 * 32 * visible(30, window.window[0])
    tree = make_problem(case_of("tree", 4), FORWARD, torch.float32, CPU)
    whole = single_gpu_same_mask(RingFA3()).prepare(tree)
    assert whole.run().shape == (120, 12, 32)
    assert whole.flops == pytest.approx(4 * tree.case.flops(FORWARD), abs=4)


@pytest.mark.parametrize(
    ("world", "lengths", "expected"),
    [
        (4, (1,) * 8 + (4, 4, 2, 2, 2, 2, 8), (4, 4)),  # 20 pairs, where a rank's mean is 19
        (2, (9, 3, 4), (8,)),  # 36, and 30.5
        (1, (3, 4, 9), (3, 4, 9)),
    ],
)
def test_one_gpu_takes_documents_with_the_tokens_and_work_of_a_rank(
    world: int, lengths: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert documents_of_a_rank(ring_case("any", "any", lengths, world)) == expected


def test_a_ring_may_ask_for_a_select_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable is set during its calls only."""
    asked: list[str | None] = []

    def call(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        asked.append(os.environ.get(forward_mode.FORWARD_MODE_ENV))
        return q

    monkeypatch.setattr(implementations, "ring_attn_func", call)
    monkeypatch.delenv(forward_mode.FORWARD_MODE_ENV, raising=False)
    problem = make_problem(case_of("lengths", 1), FORWARD, torch.float32, CPU)
    rings = [
        Ring(Communicator(), "symmetric", kind) for kind in (None, *forward_mode.FORWARD_MODES)
    ]
    assert [ring.name for ring in rings] == [
        "RingFA3 symmetric", "RingFA3 symmetric gathered", "RingFA3 symmetric hops",
    ]  # fmt: skip
    for before in (None, "hops"):
        if before is not None:
            monkeypatch.setenv(forward_mode.FORWARD_MODE_ENV, before)
        for ring in rings:
            ring.prepare(problem).run()
            assert os.environ.get(forward_mode.FORWARD_MODE_ENV) == before
    assert asked == [None, "gathered", "hops", "hops", "gathered", "hops"]


def visible(tokens: int, left: int) -> int:
    """Pairs of a causal window over one sequence."""
    return sum(min(row, left) + 1 for row in range(tokens))


def unused(*_: object) -> object:
    raise AssertionError("only the layout is needed")


def test_what_a_peer_does_not_do_is_refused() -> None:
    third, fifth = Communicator(0, 3), Communicator(0, 5)
    with pytest.raises(UnsupportedCaseError, match="no packed documents"):
        Zigzag(third, unused).rows(case_of("documents", 3))
    with pytest.raises(UnsupportedCaseError, match="no window"):
        Zigzag(third, unused).rows(case_of("window", 3))
    with pytest.raises(UnsupportedCaseError, match="120 tokens are not a multiple of 14"):
        Zigzag(Communicator(0, 7), unused).rows(case_of("lengths", 7))
    with pytest.raises(UnsupportedCaseError, match="6 KV heads on 5 ranks"):
        Ulysses(fifth, RingFA3()).rows(case_of("lengths", 5))
    with pytest.raises(UnsupportedCaseError, match="needs a GPU"):
        TorchRing(third).rows(case_of("lengths", 3))


def test_a_zigzag_is_the_layout_of_the_plan() -> None:
    for rank in range(4):
        case = RingCase("lengths", "", (64,), 4, 4, 16, CAUSAL, packed=True, world=4)
        rows = Zigzag(Communicator(rank, 4), unused).rows(case)
        begin, end = rank * 8, (7 - rank) * 8
        assert rows.tolist() == [*range(begin, begin + 8), *range(end, end + 8)]


PACKAGE = '''
import torch
import torch.distributed as dist
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward


class Attention(torch.autograd.Function):
    """Of a whole sequence on one rank."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        scale = q.shape[-1] ** -0.5
        out, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        saved = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in saved[:3]]
        scale = saved[0].shape[-1] ** -0.5
        _flash_attn_backward(dout, *saved, *grads, 0.0, scale, True)
        return *grads, None


def zigzag_ring_flash_attn_func(q, k, v, causal, group):
    assert group is None
    return Attention.apply(q, k, v, causal)
'''


@pytest.fixture
def operators() -> Iterator[None]:
    with operators_of_fa3():
        yield


def test_ring_flash_attn_runs_on_the_operators_of_fa3(
    operators: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of its structure, whose __init__ cannot be imported, stands in for it."""
    monkeypatch.setattr(peers, "PACKAGE", "zigzag_of_this_test")
    monkeypatch.syspath_prepend(tmp_path)
    assert ring_flash_attn_functions(*ZIGZAG_FUNCTION) is None
    folder = tmp_path / "zigzag_of_this_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("import transformers_that_are_not_there")
    (folder / "zigzag_ring_flash_attn.py").write_text("import flash_attn.something_else")
    with pytest.raises(LoadError, match="ring-flash-attn cannot be imported: No module named"):
        ring_flash_attn_functions(*ZIGZAG_FUNCTION)
    path = folder / "zigzag_ring_flash_attn.py"
    path.write_text(PACKAGE)
    os.utime(path, (1, 1))  # not of the same second as the bytecode of the one before
    before = dict(sys.modules)
    functions = ring_flash_attn_functions(*ZIGZAG_FUNCTION)
    assert functions is not None
    assert {n for n in sys.modules if n not in before} == set()
    zigzag = Zigzag(Communicator(), *functions)
    for direction in (FORWARD, BACKWARD):
        row = row_of(case_of("lengths", 1), direction, Communicator(), Ring(Communicator()), zigzag)
        assert row.comparisons[zigzag.name].stopped is None
        assert row.comparisons[zigzag.name].errors == row.errors


def test_without_the_operators_ring_flash_attn_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PACKAGE", "zigzag_of_that_test")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "zigzag_of_that_test").mkdir()
    (tmp_path / "zigzag_of_that_test" / "__init__.py").write_text("")
    with pytest.raises(LoadError, match=r"not there as torch\.ops\.flash_attn_3"):
        ring_flash_attn_functions(*ZIGZAG_FUNCTION)
