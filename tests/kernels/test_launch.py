"""If this fails, tensors with unusual strides give wrong results or no error. Tensors that TMA can
address, and copies of those that it cannot; errors of launches."""

from __future__ import annotations

import pytest
import torch

from ringfa3.build.units import UNITS
from ringfa3.kernels import launch
from ringfa3.kernels.streams import CurrentStream


@pytest.mark.parametrize("tokens", [1, 5])
def test_what_does_not_begin_on_16_bytes_is_copied(tokens: int) -> None:
    """Though it is contiguous; so is one token of any stride."""
    room = torch.randn(2, tokens * 2 * 64 + 1).bfloat16()
    for x in (room.view(-1)[1:-1], room[1, :-1]):
        x = x[-tokens * 128 :].view(tokens, 2, 64)
        assert x.is_contiguous()
        assert launch.tma_fields(x) is None
        copy, fields = launch.tma_addressable(x)
        assert fields == launch.tma_fields(copy) == launch.tensor3(copy)
        assert torch.equal(copy, x)
    assert launch.tma_addressable(copy)[0] is copy


@pytest.mark.parametrize(
    ("status", "ends"), [(719, "719"), (35, r"35 \(.* driver is too old .* 580 or later\)")]
)
def test_a_refused_launch_gives_the_error_and_a_known_remedy(
    monkeypatch: pytest.MonkeyPatch, status: int, ends: str
) -> None:
    monkeypatch.setattr(launch, "_entry", lambda *_: lambda *_: status)
    stream = CurrentStream(torch.device("cpu"), 0, False, 0)
    with pytest.raises(RuntimeError, match=f"launched: CUDA error {ends}$"):
        launch.launch(UNITS[0], "forward", b"", stream)
