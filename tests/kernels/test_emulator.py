"""If this fails, faults of kernels pass the emulated tests. The emulator: copies, clusters,
launches, and the errors of kernels that it reports."""

from __future__ import annotations

import pytest
import torch

from tests.support.emulation import EmulationError, Machine
from tests.support.ptx import kernel

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(300)]


def test_diverged_lanes_reconverge(emulated: Machine) -> None:
    """Odd lanes take one branch, even ones the other; then all of them sum over the warp."""
    code = """
      mov.u32 %r1, %laneid;
      and.b32 %r2, %r1, 1;
      setp.eq.s32 %p1, %r2, 0;
      @%p1 bra EVEN;
      mov.u32 %r3, 100;
      bra MEET;
    EVEN:
      mov.u32 %r3, 1;
    MEET:
      shfl.sync.bfly.b32 %r4|%p2, %r3, 1, 31, -1;
      add.s32 %r3, %r3, %r4;
      cvt.u64.u32 %d2, %r1;
      shl.b64 %d2, %d2, 2;
      add.s64 %d3, %d0, %d2;
      st.global.u32 [%d3], %r3;
    """
    for seed in range(5):
        emulated.settings(seed)
        out = torch.zeros(32, dtype=torch.int32)
        emulated.launch(kernel(code), out)
        emulated.finish()
        assert out.tolist() == [101] * 32


STORE = """
  mov.u32 %r1, raw;
  mov.u32 %r2, %laneid;
  setp.ne.s32 %p1, %r2, 0;
  @%p1 bra END;
  mov.u32 %r3, 7;
  st.shared.v4.u32 [%r1], {{%r3, %r3, %r3, %r3}};
  {fence}
  cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;
  cp.async.bulk.commit_group;
  {wait}
END:
"""
FENCE, WAIT = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"
LOAD = """
  mov.u32 %r1, raw;
  mov.u32 %r2, %laneid;
  setp.ne.s32 %p1, %r2, 0;
  @%p1 bra END;
  add.s32 %r3, %r1, 1024;
  mbarrier.init.shared::cta.b64 [%r3], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {bytes};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 16, [%r3];
AGAIN:
  {wait}
  ld.shared.u32 %r4, [%r1];
  st.global.u32 [%d1], %r4;
LAST:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
  @!%p2 bra LAST;
END:
"""
ARRIVED = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0; @!%p2 bra AGAIN;"


def test_bulk_copies(emulated: Machine) -> None:
    for async_chance in (0.0, 1.0):
        emulated.settings(0, async_chance)
        out = torch.zeros(4, dtype=torch.int32)
        emulated.launch(kernel(STORE.format(fence=FENCE, wait=WAIT)), out, shared=2048)
        emulated.finish()
        assert out.tolist() == [7] * 4
        given, got = torch.tensor([3, 4, 5, 6]), torch.zeros(2, dtype=torch.int32)
        code = LOAD.format(wait=ARRIVED, bytes=16)
        emulated.launch(kernel(code, 2), given.int(), got, shared=2048)
        emulated.finish()
        assert got[0] == 3


# Warp 0 writes shared memory, warp 1 copies it to global memory.
HANDOVER = """
  mov.u32 %r1, raw;
  mov.u32 %r2, %tid.x;
  setp.ge.u32 %p1, %r2, 32;
  @%p1 bra OTHER;
  mov.u32 %r3, 7;
  st.shared.v4.u32 [%r1], {{%r3, %r3, %r3, %r3}};
  bar.arrive 1, 64;
  bra END;
OTHER:
  {first}
  {second}
  setp.ne.u32 %p1, %r2, 32;
  @%p1 bra END;
  cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:
"""
MEET = "bar.sync 1, 64;"


def test_a_fence_covers_writes_that_its_warp_has_acquired(emulated: Machine) -> None:
    """The reader's fence counts after the barrier with the writer, but not before it."""
    for seed in range(5):
        emulated.settings(seed)
        out = torch.zeros(4, dtype=torch.int32)
        code = kernel(HANDOVER.format(first=MEET, second=FENCE))
        emulated.launch(code, out, threads=64, shared=2048)
        emulated.finish()
        assert out.tolist() == [7] * 4
        code = kernel(HANDOVER.format(first=FENCE, second=MEET))
        with pytest.raises(EmulationError, match=r"without fence\.proxy\.async"):  # noqa: PT012
            emulated.launch(code, out, threads=64, shared=2048)
            emulated.finish()


# CTA 0 copies 16 bytes and sends a word to CTA 1, which waits for both and writes what came.
CLUSTER = """
  mov.u32 %r1, raw;
  mov.u32 %r2, %cluster_ctarank;
  add.s32 %r3, %r1, 1024;
  mov.u32 %r4, %laneid;
  setp.ne.s32 %p1, %r4, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r3], 2;
READY:
  {meet}
  @%p1 bra END;
  setp.ne.s32 %p2, %r2, 0;
  @%p2 bra SECOND;
  mov.u32 %r5, 7;
  st.shared.v4.u32 [%r1], {{%r5, %r5, %r5, %r5}};
  {fence}
  mov.u32 %r6, 1;
  add.s32 %r10, %r1, 64;
  add.s32 %r11, %r1, 128;
  mapa.shared::cluster.u32 %r7, %r10, %r6;
  mapa.shared::cluster.u32 %r8, %r11, %r6;
  mapa.shared::cluster.u32 %r9, %r3, %r6;
  mbarrier.arrive.shared::cluster.b64 _, [%r9];
  cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r1], 16, [%r9];
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%r8], 9, [%r9];
  bra END;
SECOND:
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 20;
AGAIN:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;
  @!%p3 bra AGAIN;
  ld.shared.u32 %r5, [%r1+76];
  ld.shared.u32 %r6, [%r1+128];
  st.global.v2.u32 [%d0], {{%r5, %r6}};
END:
  {last}
"""
MEET_CLUSTER = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


def test_ctas_of_a_cluster_write_each_others_shared_memory(emulated: Machine) -> None:
    """Two clusters, one of which is resident: their CTAs run together."""
    code = kernel(CLUSTER.format(meet=MEET_CLUSTER, fence=FENCE, last=MEET_CLUSTER))
    for seed in range(4):
        emulated.settings(seed, (0.0, 0.1, 0.5, 1.0)[seed], resident_ctas=1)
        out = torch.zeros(2, dtype=torch.int32)
        emulated.launch(code, out, ctas=4, shared=2048, cluster=2)
        emulated.finish()
        assert out.tolist() == [7, 9]


WRONG_CLUSTERS = [  # parts of CLUSTER, CTAs, a part of the error
    ({"fence": ""}, 2, "a bulk copy touches shared memory .* without fence"),
    ({"last": ""}, 2, "ended before a bulk load"),
    ({"meet": "bra END;"}, 3, "a part of a cluster"),
]


@pytest.mark.parametrize(("parts", "ctas", "error"), WRONG_CLUSTERS)
def test_errors_of_a_cluster_are_reported(
    emulated: Machine, parts: dict[str, str], ctas: int, error: str
) -> None:
    code = CLUSTER.format(**{"meet": MEET_CLUSTER, "fence": FENCE, "last": MEET_CLUSTER, **parts})
    emulated.settings(0, async_chance=0.0, deadlock_s=0.2)
    with pytest.raises(EmulationError, match=error):  # noqa: PT012
        emulated.launch(
            kernel(code), torch.zeros(2, dtype=torch.int32), ctas=ctas, shared=2048, cluster=2
        )
        emulated.finish()


WRONG = [  # a kernel, a part of its error
    (STORE.format(fence="", wait=WAIT), "without fence.proxy.async"),
    (STORE.format(fence=FENCE, wait=""), "ended before a bulk store"),
    (LOAD.format(wait=ARRIVED, bytes=32).replace("%d1", "%d0"), "deadlock"),
    ("ld.global.u32 %r1, [%d0+64];", "no tensor's"),
    ("ld.global.u32 %r1, [%d0+2];", "not a multiple of 4"),
    ("mov.u32 %r1, 1000000; st.shared.u32 [%r1], %r1;", "shared memory has no"),
    ("mov.u32 %r1, raw; mbarrier.init.shared::cta.b64 [%r1], 1; "
     "mbarrier.arrive.shared::cta.b64 _, [%r1], 2;", "more arrivals"),
    ("bar.sync 1, 64;", "deadlock"),
    ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, 3;", "not a member of its own mask"),
    ("cvt.rzi.f32.f32 %f1, %f2;", "cvt.rzi"),
    ("cvt.sat.u8.s32 %h1, %r2;", "cvt.sat"),
    ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "error"), WRONG)
def test_errors_of_a_kernel_are_reported(emulated: Machine, code: str, error: str) -> None:
    emulated.settings(0, async_chance=0.0, deadlock_s=0.2)
    with pytest.raises(EmulationError, match=error):  # noqa: PT012  # the launch reports some
        emulated.launch(kernel(code), torch.zeros(8, dtype=torch.int32), shared=2048)
        emulated.finish()


def test_some_seed_reveals_a_missing_wait(emulated: Machine) -> None:
    """The kernel reads data before the mbarrier of its copy flips."""
    correct = set()
    for seed in range(20):
        emulated.settings(seed, async_chance=0.3)
        given, got = torch.full((4,), 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        emulated.launch(kernel(LOAD.format(wait="", bytes=16), 2), given, got, shared=2048)
        emulated.finish()
        correct.add(got[0].item() == 3)
    assert False in correct


@pytest.mark.parametrize("waits", [True, False])
def test_a_dependent_launch_must_wait_for_the_previous_one(emulated: Machine, waits: bool) -> None:
    """The second launch copies the value of the first only if it waits for it."""
    first = """
      griddepcontrol.launch_dependents;
      mov.u32 %r1, 0;
    SLOWLY:
      add.s32 %r1, %r1, 1;
      setp.lt.s32 %p1, %r1, 5000;
      @%p1 bra SLOWLY;
      st.global.u32 [%d0], 7;
    """
    second = "griddepcontrol.wait;" if waits else ""
    second += "ld.global.u32 %r1, [%d0]; st.global.u32 [%d0+4], %r1;"
    emulated.settings(0)
    out = torch.zeros(2, dtype=torch.int32)
    emulated.launch(kernel(first), out)
    emulated.launch(kernel(second), out, programmatic=True)
    emulated.finish()
    assert out.tolist() == [7, 7 if waits else 0]


@pytest.mark.parametrize("resident", [1, 2])
def test_a_cta_beyond_the_resident_ones_starts_when_another_ends(
    emulated: Machine, resident: int
) -> None:
    """CTA 0 waits for a word that CTA 1 writes. With one resident CTA this is a deadlock."""
    code = """
      mov.u32 %r1, %ctaid.x;
      setp.ne.u32 %p1, %r1, 0;
      @%p1 bra WRITE;
    AGAIN:
      ld.acquire.gpu.global.u32 %r2, [%d0+4];
      setp.eq.u32 %p2, %r2, 0;
      @%p2 bra AGAIN;
    WRITE:
      mul.wide.u32 %d1, %r1, 4;
      add.s64 %d1, %d0, %d1;
      st.global.u32 [%d1], 7;
    """
    emulated.settings(0, deadlock_s=0.2, resident_ctas=resident)
    out = torch.zeros(3, dtype=torch.int32)
    emulated.launch(kernel(code), out, ctas=3)
    if resident == 1:
        with pytest.raises(EmulationError, match="deadlock"):
            emulated.finish()
        assert out.tolist() == [0, 0, 0]
    else:
        emulated.finish()
        assert out.tolist() == [7, 7, 7]
