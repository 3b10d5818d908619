"""The memory in a line of metrics, and the losses on the console."""

from __future__ import annotations

import math
from unittest import mock

import torch
from rich.console import Console

from train.log.metrics import StepProgress, device_memory, peak_memory


def test_both_losses_stand_side_by_side_in_nats_per_byte(capsys):
    """That of training is a mean of the last steps, without one that was skipped."""
    with StepProgress(Console(width=200), steps=60) as progress:
        for step in range(1, 31):
            loss = math.nan if step == 25 else 3.0 - step / 20
            record = {"step": step, "loss": 7.0, "nats_per_byte": loss, "tokens_per_s": 4321.0}
            progress.update(record)
        progress.validated(30, 1.9, 123_456)
        progress.update(record | {"step": 60})
    first, validation, last = capsys.readouterr().out.splitlines()
    assert first == "step 1/60  nats per byte: train 2.950  4,321 tokens/s"
    recent = 3.0 - (sum(range(11, 31)) - 25) / 19 / 20
    assert validation == (
        f"step 30/60  nats per byte: train {recent:.3f}, held out 1.900 (123,456 bytes)"
    )
    recent = 3.0 - (sum(range(12, 31)) - 25 + 30) / 19 / 20
    expected = f"nats per byte: train {recent:.3f}, held out 1.900 at step 30  4,321 tokens/s"
    assert last == f"step 60/60  {expected}"


def test_device_memory_is_what_the_driver_counts_at_the_peak():
    """On a GPU all but what the driver calls free, with what PyTorch has given back since its peak;
    on the CPU the process's peak."""
    with mock.patch.multiple(
        torch.cuda,
        mem_get_info=mock.Mock(return_value=(30, 100)),
        max_memory_reserved=mock.Mock(return_value=60),
        memory_reserved=mock.Mock(return_value=48),
    ):
        assert device_memory(torch.device("cuda", 3)) == 82
        torch.cuda.mem_get_info.return_value = 5, 100  # of another allocator
        assert device_memory(torch.device("cuda", 3)) == 100
        torch.cuda.mem_get_info.return_value = 30, 100
        torch.cuda.mem_get_info.assert_called_with(torch.device("cuda", 3))
    assert device_memory(torch.device("cpu")) == peak_memory(torch.device("cpu"))
