"""If this fails, the emulated tests of kernels prove nothing. The emulator's instructions: their
results, and that warps of a warpgroup multiply together."""

from __future__ import annotations

import struct

import pytest
import torch

from tests.support.emulation import EmulationError, Machine
from tests.support.ptx import kernel

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(300)]


def as_int(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


F32 = as_int
E4M3X2 = "cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2; cvt.u32.u16 %r0, %h0;"
COMPUTED = [  # values of %r1, %r2, %r3; instructions that set %r0; its expected value
    ((7, -3, 0), "add.s32 %r0, %r1, %r2;", 4),
    ((7, -3, 0), "div.s32 %r0, %r1, %r2;", -2),
    ((-7, 3, 0), "rem.s32 %r0, %r1, %r2;", -1),
    ((1 << 30, 16, 0), "mul.hi.s32 %r0, %r1, %r2;", 4),
    ((1 << 30, 16, 5), "mad.lo.s32 %r0, %r1, %r2, %r3;", 5),
    ((-8, 1, 0), "shr.s32 %r0, %r1, %r2;", -4),
    ((-8, 1, 0), "shr.u32 %r0, %r1, %r2;", 0x7FFFFFFC),
    ((5, 40, 0), "shl.b32 %r0, %r1, %r2;", 0),
    ((0b1100, 0b1010, 0), "lop3.b32 %r0, %r1, %r2, %r3, 0x3c;", 0b0110),  # a ^ b
    ((0xFF, 0, 0), "bfi.b32 %r0, %r1, %r2, 4, 8;", 0xFF0),
    ((0x80, 0, 0), "bfe.s32 %r0, %r1, 4, 4;", -8),
    ((-1, 0, 0), "bfe.u32 %r0, %r1, 28, 8;", 0xF),
    ((-1 << 31, 0, 0), "bfe.s32 %r0, %r1, 28, 8;", -8),
    ((-1, 0, 0), "bfe.s32 %r0, %r1, 4, 0;", 0),
    ((0x44332211, 0x88776655 - (1 << 32), 0), "prmt.b32 %r0, %r1, %r2, 0x6420;", 0x77553311),
    ((0x44332211, 1, 8), "shf.r.wrap.b32 %r0, %r1, %r2, %r3;", 0x01443322),
    ((3, 9, 0), "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r0, %r1, %r2, %p1;", 3),
    ((-1, 9, 0), "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r0, %r1, %r2, %p1;", 9),
    ((1, 2, 0), "@!%p8 mov.u32 %r0, %r1; @%p8 mov.u32 %r0, %r2;", 1),
    ((F32(1.5), F32(2.0), F32(1.0)), "fma.rn.ftz.f32 %r0, %r1, %r2, %r3;", F32(4.0)),
    ((F32(1.5), F32(2.0), F32(1.0)), "fma.rn.ftz.sat.f32 %r0, %r1, %r2, %r3;", F32(1.0)),
    ((F32(1.5), F32(-2.0), F32(1.0)), "fma.rn.ftz.sat.f32 %r0, %r1, %r2, %r3;", F32(0.0)),
    ((F32(float("nan")), F32(2.0), 0), "fma.rn.ftz.sat.f32 %r0, %r1, %r2, %r3;", F32(0.0)),
    ((F32(3.0), 0, 0), "ex2.approx.ftz.f32 %r0, %r1;", F32(8.0)),
    ((F32(8.0), 0, 0), "lg2.approx.ftz.f32 %r0, %r1;", F32(3.0)),
    ((F32(float("nan")), F32(2.0), 0), "max.ftz.f32 %r0, %r1, %r2;", F32(2.0)),
    ((F32(-2.7), 0, 0), "cvt.rzi.s32.f32 %r0, %r1;", -2),
    *(
        ((F32(high), F32(low), 0), E4M3X2, expected)
        for high, low, expected in (
            (17.0, 19.0, 0x585A),  # ties go to even: 16 and 20
            (15.8, -0.0, 0x5880),  # up into the next binade
            (2.0**-10, 3 * 2.0**-10, 0x0002),  # subnormal: 0 and 2^-8
            (-1000.0, float("nan"), 0xFE7F),  # saturates; NaN stays
            (float("inf"), -464.0, 0x7EFE),
        )
    ),
    ((F32(1.0), F32(-2.0), 0), "cvt.rn.bf16x2.f32 %r0, %r1, %r2;", 0x3F80C000),
    ((F32(1.0), F32(-2.0), 0), "cvt.rn.f16x2.f32 %r0, %r1, %r2;", 0x3C00C000),
    ((F32(1.00390625), 0, 0), "cvt.rn.bf16.f32 %h0, %r1; mov.b32 %r0, {%h0, %h0};", 0x3F803F80),
    # 3 x 0.5 and -1 x 0.25; then a tie, which goes to even: (1 + 2^-10)^2, (1 + 2^-7)^2
    ((0x4200BC00, 0x38003400, 0), "mul.rn.f16x2 %r0, %r1, %r2;", 0x3E00B400),
    ((0x4040BF80, 0x3F003E80, 0), "mul.rn.bf16x2 %r0, %r1, %r2;", 0x3FC0BE80),
    ((0x3C013C01, 0x3C013C01, 0), "mul.rn.f16x2 %r0, %r1, %r2;", 0x3C023C02),
    ((0x3F813F81, 0x3F813F81, 0), "mul.rn.bf16x2 %r0, %r1, %r2;", 0x3F823F82),
    ((5, 0, 0), "popc.b32 %r0, %r1;", 2),
    ((1, 2, 0), "mov.b64 %d5, {%r1, %r2}; mov.b64 {%r3, %r0}, %d5;", 2),
]


@pytest.mark.parametrize(("given", "code", "expected"), COMPUTED)
def test_instruction_results(
    emulated: Machine, given: tuple[int, int, int], code: str, expected: int
) -> None:
    emulated.settings(0)
    out = torch.zeros(1, dtype=torch.int32)
    sets = [f"mov.b32 %r{n + 1}, {value & 0xFFFFFFFF};" for n, value in enumerate(given)]
    zero = "mov.u32 %r9, 0; setp.ne.s32 %p8, %r9, 0;"
    emulated.launch(kernel("\n".join((*sets, zero, code, "st.global.u32 [%d0], %r0;"))), out)
    emulated.finish()
    assert out.item() == (expected + (1 << 31)) % (1 << 32) - (1 << 31)


# A warpgroup adds the product of A = 1 and B (16, 8) = 0.5 to an accumulator of 1.
PRODUCT = """
  mov.u32 %r1, raw;
  mov.u32 %r2, %tid.x;
  shl.b32 %r3, %r2, 4;
  add.s32 %r3, %r3, %r1;
  mov.u32 %r4, 0x3F003F00;
  setp.ge.u32 %p1, %r2, 16;
  @!%p1 st.shared.v4.u32 [%r3], {{%r4, %r4, %r4, %r4}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  mov.u32 %r5, 0x3F803F80;
  mov.f32 %f1, 0f3F800000;
  mov.f32 %f2, %f1;
  mov.f32 %f3, %f1;
  mov.f32 %f4, %f1;
  setp.eq.u32 %p2, %r5, %r5;
  shr.u32 %r6, %r1, 4;
  cvt.u64.u32 %d1, %r6;
  or.b64 %d1, %d1, 0x1000080000;
  wgmma.fence.sync.aligned;
  setp.lt.u32 %p3, %r2, {other};
  @%p3 bra ISSUE;
  {product}
  bra ISSUED;
ISSUE:
  {product}
ISSUED:
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  shl.b32 %r3, %r2, 2;
  cvt.u64.u32 %d2, %r3;
  add.s64 %d2, %d2, %d0;
  st.global.f32 [%d2], %f1;
"""
WGMMA = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, "
    "{%r5, %r5, %r5, %r5}, %d1, %p2, 1, 1, 0;"
)


def test_warps_of_a_warpgroup_issue_the_same_wgmma(emulated: Machine) -> None:
    for seed in range(4):
        out = torch.zeros(128)
        for other in (0, 128):  # the first thread that takes the other path
            emulated.settings(seed)
            code = kernel(PRODUCT.format(product=WGMMA, other=other))
            emulated.launch(code, out.zero_(), threads=128, shared=2048)
            emulated.finish()
            assert out.tolist() == [9.0] * 128
        for other in (32, 64, 96):
            code = kernel(PRODUCT.format(product=WGMMA, other=other))
            with pytest.raises(EmulationError, match="issue different wgmmas"):  # noqa: PT012
                emulated.launch(code, out, threads=128, shared=2048)
                emulated.finish()
