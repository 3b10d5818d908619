"""What a line of metrics says about memory."""

from __future__ import annotations

from unittest import mock

import torch

from train.log.metrics import memory_in_use, peak_memory


def test_memory_in_use_is_what_the_driver_counts():
    """On a GPU all but what the driver calls free; on the CPU the process's peak."""
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(30, 100)) as asked:
        assert memory_in_use(torch.device("cuda", 3)) == 70
    asked.assert_called_once_with(torch.device("cuda", 3))
    assert memory_in_use(torch.device("cpu")) == peak_memory(torch.device("cpu"))
