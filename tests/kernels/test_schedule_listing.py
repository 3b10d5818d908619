"""If this fails, calls on one GPU launch other steps than they need. Schedules of calls of one
rank, as `Schedule.text` lists them, and what builds none."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ringfa3 import plan_context
from ringfa3.kernels.symbolic import ScheduleError
from ringfa3.pass_interface import LocalPass
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.prepare_call import PreparedCall
from ringfa3.schedules import host_code
from ringfa3.schedules.schedule import Schedule, build
from tests.support.fake_kernels import FakeKernels

TOKENS, SCALE = 200, 0.125

FORWARD = """\
b0 = bfloat16[200, 4, 64]
b1 = float32[4, 200]
launch forward of forward-d64-bf16-short: q.data=in0 k.data=in1 v.data=in2 out.data=b0 lse=b1
return b0[200, 4, 64]
return b1[4, 200]"""

# Few tiles are split over the SMs: their units add into b3 and b4, the float32 dK and dV.
BACKWARD = """\
b0 = float32[73730]
launch preprocess of backward-d64-bf16: out.data=in5 dout.data=in0 lse=in6 padded.statistics=b0
    padded.dq=b0+32768 words=b0+294912
b1 = bfloat16[200, 2, 64]
b2 = bfloat16[200, 2, 64]
b3 = float32[200, 2, 64]
b4 = float32[200, 2, 64]
zero b3[200, 2, 64]
zero b4[200, 2, 64]
launch backward of backward-d64-bf16: q.data=in2 dout.data=in0 k.data=in3 v.data=in4 dk.data=b3
    dv.data=b4 padded.statistics=b0 padded.dq=b0+32768 counter=b0+294912
copy b1[200, 2, 64] <- b3[200, 2, 64]
copy b2[200, 2, 64] <- b4[200, 2, 64]
b5 = bfloat16[200, 4, 64]
launch postprocess of backward-d64-bf16: dq.data=b5 padded.statistics=b0 padded.dq=b0+32768
return b5[200, 4, 64]
return b1[200, 2, 64]
return b2[200, 2, 64]"""


def inputs() -> list[torch.Tensor]:
    """q, k, v, dout, out and LSE."""
    made = [torch.randn(TOKENS, heads, 64).bfloat16() for heads in (4, 2, 2, 4, 4)]
    return [*made, torch.randn(4, TOKENS)]


def prepared(pass_type: str) -> tuple[PreparedCall, LocalPass]:
    plan: ContextPlan = plan_context(TOKENS, (0, 1))
    return PreparedCall(plan, pass_type, LocalPass), LocalPass(plan, pass_type)


def forward(*given: torch.Tensor | None) -> Schedule:
    return build(given, partial(host_code.forward_hops, SCALE, *prepared("forward")))


def backward(*given: torch.Tensor | None) -> Schedule:
    return build(given, partial(host_code.gradients, SCALE, False, *prepared("backward")))


def test_a_forward(fake_kernels: FakeKernels) -> None:
    q, k, v, *_ = inputs()
    assert forward(q, k, v, None).text() == FORWARD


def test_a_backward(fake_kernels: FakeKernels) -> None:
    q, k, v, dout, out, lse = inputs()
    assert backward(dout, None, q, k, v, out, lse, None).text() == BACKWARD


def test_an_input_that_tma_cannot_address_is_copied_first(fake_kernels: FakeKernels) -> None:
    q, k, v, *_ = inputs()
    shifted = torch.cat((q.new_zeros(1), q.flatten()))[1:].view(q.shape)
    lines = forward(shifted, k, v, None).text().splitlines()
    assert "copy b2[200, 4, 64] <- in0[200, 4, 64]" in lines
    assert any(line.startswith("launch forward") and "q.data=b2 " in line for line in lines)


def test_the_fallback_has_no_schedule() -> None:
    """Without fake kernels PyTorch computes."""
    q, k, v, *_ = inputs()
    with pytest.raises(ScheduleError, match="it "):
        forward(q, k, v, None)
