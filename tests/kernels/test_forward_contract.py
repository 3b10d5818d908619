"""If this fails, a forward reads K/V before they arrive, or writes outside its rows. Arrival flags,
CTAs, counters, masks and stores of the forward, emulated at head dim 128."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from ringfa3 import plan_context
from ringfa3.build.units import VARIANTS, Unit
from ringfa3.kernels import forward, launch, reference
from ringfa3.planning.tile_schedule import FIRST, LAST, Tiling
from ringfa3.planning.tiling import plan_local
from tests.support.emulation import PROCESSORS, Machine, machine, unit
from tests.support.launches import leave_sms

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(600)]

D = 128
UNIT = unit("forward", torch.empty(0, 1, D, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def cpu() -> Iterator[Machine]:
    with machine() as emulated:
        launch._entry(UNIT, "forward")  # compiled before a test counts seconds
        yield emulated


@dataclass
class Problem:
    """Random inputs of packed sequences of (queries, keys) tokens."""

    lengths: list[tuple[int, int]]
    window: tuple[int, int] = (-1, -1)
    heads: int = 2
    kv_heads: int = 1

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        nq, nk = (np.array(n) for n in zip(*self.lengths, strict=True))
        self.rows, keys = int(nq.sum()), int(nk.sum())
        self.tiling = plan_local(nq, nk, *self.window).forward(UNIT.tile_m)[0]
        self.q = torch.randn(self.rows, self.heads, D).bfloat16()
        self.k, self.v = (torch.randn(keys, self.kv_heads, D).bfloat16() for _ in range(2))

    def run(
        self, tiling: Tiling | None = None, unit: Unit | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the kernel, into outputs full of NaN."""
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full((self.heads, self.rows), torch.nan)
        inputs = (self.q, self.k, self.v, tiling or self.tiling, D**-0.5)
        forward.attend(unit or UNIT, *inputs, out, torch.empty(0), lse, **options)
        return out, lse

    def check(self, out: torch.Tensor, lse: torch.Tensor, rows: slice = slice(None)) -> None:
        """Compares `rows` with float64; bfloat16 rounds P and O to 2^-9."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        ref, ref_lse = torch.empty_like(q), torch.empty(lse.shape, dtype=torch.float64)
        reference.attend(q, k, v, self.tiling, D**-0.5, ref, ref[:0], ref_lse)
        torch.testing.assert_close(out[rows].double(), ref[rows], atol=6e-3, rtol=8e-3)
        torch.testing.assert_close(lse[:, rows].double(), ref_lse[:, rows], atol=1e-4, rtol=0)


OWN_SOURCES = ("without-specialisation", "three-stages")  # variants of more than a flag
THREE = [(200, 300), (70, 150), (130, 170)]  # sequences, of a span each


def waiting(tiling: Tiling, numbers: list[int]) -> Tiling:
    """The tiling, its spans waiting for these arrival flags."""
    spans = tiling.spans.copy()
    spans["arrival"] = numbers
    return Tiling(tiling.size, tiling.tiles, spans, tiling.earlier)


def test_keys_are_read_when_their_word_is_set(cpu: Machine) -> None:
    """A second thread writes K and V and then the word, while the kernel waits."""
    problem = Problem(THREE)
    cpu.settings(seed=1, deadlock_s=30)
    words = torch.zeros(3, dtype=torch.int32)
    late = [(x, x.clone()) for x in (problem.k, problem.v)]
    for x, _ in late:
        x[300:] = torch.nan

    def copies() -> None:
        for number, rows in ((2, slice(450, None)), (1, slice(300, 450))):
            time.sleep(0.3)
            for x, kept in late:
                x[rows] = kept[rows]
            words[number] = 1

    thread = threading.Thread(target=copies)
    thread.start()
    found = problem.run(waiting(problem.tiling, [0, 1, 2]), arrivals=words)
    assert words.tolist() == [0, 1, 1], "the kernel did not wait"
    thread.join()
    problem.check(*found)


@pytest.mark.parametrize("rank", range(3))
def test_a_gathered_plan_reads_each_block_behind_its_word(cpu: Machine, rank: int) -> None:
    """Blocks arrive one by one while the kernel runs; its tiles see several of them."""
    lengths, world = np.array([300, 1, 450]), 3
    plans = [plan_context([0, *np.cumsum(lengths).tolist()], (r, world)) for r in range(world)]
    plan = plans[rank]
    cpu.settings(seed=rank, deadlock_s=30)
    torch.manual_seed(rank)
    q, k, v = (torch.randn(751, h, D).bfloat16() for h in (2, 1, 1))
    first, rows = plan.kv_exchange.gathered_layout(rank)
    buffer = torch.full((rows, 2, 1, D), torch.nan, dtype=torch.bfloat16)  # K and V of a row
    buffer[: plan.local_tokens] = plan.shard(torch.stack((k, v), 1))
    words = torch.zeros(world, dtype=torch.int32)

    def copies() -> None:
        for hop in range(1, world):
            time.sleep(0.3)
            owner = plans[(rank - hop) % world]
            begin, end = plan.kv_exchange.visible[owner.rank, hop]
            leaving = owner.shard(torch.stack((k, v), 1))[owner.kv_exchange.published]
            buffer[first[hop] + begin : first[hop] + end] = leaving[begin:end]
            words[hop] = 1

    (tiling,) = plan.gathered.forward(UNIT.tile_m)
    out, lse = torch.full((plan.local_tokens, 2, D), torch.nan), torch.empty(2, plan.local_tokens)
    out = out.bfloat16()
    thread = threading.Thread(target=copies)
    thread.start()
    inputs = (plan.shard(q), *buffer.unbind(1), tiling, D**-0.5, out, torch.empty(0), lse)
    forward.attend(UNIT, *inputs, arrivals=words)
    thread.join()
    assert int(tiling.tiles["num_spans"].max()) > 1
    whole = plan_local(lengths, lengths, -1, 0).forward(UNIT.tile_m)[0]
    ref, ref_lse = torch.empty(q.shape, dtype=torch.float64), torch.empty(2, 751).double()
    exact = (x.double() for x in (q, k, v))
    reference.attend(*exact, whole, D**-0.5, ref, ref[:0], ref_lse)
    torch.testing.assert_close(out.double(), plan.shard(ref), atol=6e-3, rtol=8e-3)
    torch.testing.assert_close(lse.double(), plan.shard(ref_lse, 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (None, "arrivals is missing"),
        (torch.zeros(2, dtype=torch.int32), r"torch.int32 \(2,\) on cpu: 3 to 32 flags"),
        (torch.zeros(33, dtype=torch.int32), "3 to 32 flags are allowed"),
        (torch.zeros(3), "must be contiguous int32"),
        (torch.zeros(6, dtype=torch.int32)[::2], "must be contiguous int32"),
    ],
)
def test_arrival_words_that_do_not_fit_raise(
    cpu: Machine, words: torch.Tensor | None, said: str
) -> None:
    problem = Problem(THREE)
    with pytest.raises(ValueError, match=said):
        problem.run(waiting(problem.tiling, [0, 1, 2]), arrivals=words)


@pytest.mark.parametrize("free", [0, 1, PROCESSORS - 1])
def test_any_number_of_ctas_is_right(
    cpu: Machine, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """All, all but one, and a single CTA that takes every tile."""
    problem = Problem(THREE, window=(-1, 0))
    entry, ctas = launch._entry(UNIT, "forward"), []

    def noted(args: bytes, stream: int) -> int:
        ctas.append(forward.ForwardArgs.from_buffer_copy(args).num_ctas)
        return entry(args, stream)

    monkeypatch.setattr(launch, "_entry", lambda *_: noted)
    cpu.settings(seed=free)
    with leave_sms(free):
        problem.check(*problem.run())
    assert ctas == [PROCESSORS - free]


def test_a_launch_resets_its_counter(cpu: Machine) -> None:
    """To zero, for the next launch on the stream; more tiles than CTAs, some without keys."""
    problem = Problem([(200, 300), (150, 0), (1, 150)])
    cpu.settings(seed=4)
    for _ in range(3):
        problem.check(*problem.run())
        assert [counter.item() for counter in forward.counters.of_streams.values()] == [0]


@pytest.mark.parametrize(
    "window", [(0, 0), (1, -1), (30, 30), (-1, 0), (33, 64), (127, 1)], ids=str
)
def test_masks_are_exact(cpu: Machine, window: tuple[int, int]) -> None:
    """Bands that begin and end at every bit of a mask word; sequences that end inside a block."""
    problem = Problem([(190, 190), (64, 157), (150, 131)], window)
    cpu.settings(seed=5)
    problem.check(*problem.run())


@pytest.mark.parametrize("keys", [(100, 80), (80, 100)], ids=str)
def test_hops_merge_rows_without_keys(cpu: Machine, keys: tuple[int, int]) -> None:
    """Rows without keys at one hop or at both; a row that is NaN at one hop stays NaN."""
    problem = Problem([(200, 100)], heads=1)
    problem.q[110] = torch.nan  # which sees nothing of 80 keys
    cpu.settings(seed=6)
    found = torch.full_like(problem.q, torch.nan), torch.full((256, 1, D), torch.nan)  # padded rows
    expected = [torch.full(problem.q.shape, torch.nan, dtype=torch.float64) for _ in range(2)]
    lse = torch.full((1, 200), torch.nan)
    expected_lse = lse.double()
    for hop, n in enumerate(keys):
        hidden = plan_local(np.array([200]), np.array([n]), -1, 0).forward(UNIT.tile_m)[0]
        tiles = hidden.tiles.copy()
        tiles["flags"] = (FIRST, LAST)[hop]
        tiling = Tiling(UNIT.tile_m, tiles, hidden.spans, hidden.earlier)
        inputs = problem.q, problem.k[:n], problem.v[:n]
        forward.attend(UNIT, *inputs, tiling, D**-0.5, *found, lse)
        reference.attend(*(x.double() for x in inputs), tiling, D**-0.5, *expected, expected_lse)
    assert expected_lse[0, 110].isnan()
    assert (expected_lse[0, :100] == -torch.inf).all()
    close = partial(torch.testing.assert_close, equal_nan=True)
    close(found[0].double(), expected[0], atol=6e-3, rtol=8e-3)
    close(lse.double(), expected_lse, atol=1e-4, rtol=0)


def test_tiles_store_their_rows_only(cpu: Machine) -> None:
    """Documents of any length; neighbouring rows keep their NaN."""
    lengths = [(200, 130), (17, 129), (16, 128), (1, 128), (130, 128)]
    problem = Problem(lengths)
    bounds = list(accumulate((n for n, _ in lengths), initial=0))
    for begin, end in pairwise(bounds):
        tiles = problem.tiling.tiles
        mine = tiles[(tiles["row0"] >= begin) & (tiles["row0"] < end)]
        tiling = Tiling(UNIT.tile_m, mine, problem.tiling.spans, problem.tiling.earlier)
        cpu.settings(seed=begin)
        out, lse = problem.run(tiling)
        problem.check(out, lse, slice(begin, end))
        for beside in (slice(0, begin), slice(end, None)):
            assert out[beside].isnan().all()
            assert lse[:, beside].isnan().all()


@pytest.mark.parametrize(
    "dims", [128, *(pytest.param(d, marks=pytest.mark.soak) for d in (64, 256))]
)
@pytest.mark.parametrize(
    "variant",
    [
        name if name in OWN_SOURCES else pytest.param(name, marks=pytest.mark.soak)
        for name in VARIANTS
    ],
)
def test_variants_of_the_ablation_are_exact(
    cpu: Machine, monkeypatch: pytest.MonkeyPatch, variant: str, dims: int
) -> None:
    """Full, causal and windows; tiles without keys, many spans; random orders; one CTA or all."""
    monkeypatch.setitem(globals(), "D", dims)
    whole = unit("forward", torch.empty(0, 1, dims, dtype=torch.bfloat16))
    monkeypatch.setitem(globals(), "UNIT", whole)
    without = whole.as_variant(variant)
    shapes = [(300, 300)], [(190, 30), (1, 1), (64, 157), (3, 0), (150, 131)], [(1, 700)] * 5
    for number, (lengths, window) in enumerate(product(shapes, [(-1, -1), (-1, 0), (33, 64)])):
        problem = Problem(lengths, window, heads=3 - number % 2)
        cpu.settings(seed=number, async_chance=(0.0, 0.02, 0.3, 1.0)[number % 4])
        for free in (0, PROCESSORS - 1):
            with leave_sms(free):
                problem.check(*problem.run(unit=without))


def test_a_variant_waits_for_words(cpu: Machine) -> None:
    """Words that are set let it continue."""
    problem = Problem(THREE)
    without = UNIT.as_variant("without-specialisation")
    tiling = waiting(problem.tiling, [1, 0, 2])
    cpu.settings(seed=9)
    words = torch.tensor([0, 1, 1], dtype=torch.int32)
    problem.check(*problem.run(tiling, without, arrivals=words))
