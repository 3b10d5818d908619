"""If this fails, the reported memory is wrong. The memory in a line of metrics."""

from __future__ import annotations

from unittest import mock

import torch

from train.log.metrics import device_memory, peak_memory


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
