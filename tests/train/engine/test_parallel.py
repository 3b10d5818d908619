"""If this fails, processes of a job take the same GPU, or hang at its end. The device of a process;
``shutdown``: its barriers, and the end of the process groups."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from train.config import Config, ConfigError
from train.engine import parallel
from train.engine.parallel import ParallelLayout, choose_device, join, shutdown, sum_over_ranks


class FakeGroup:
    """A process group of one backend, not bound to a device; it records its barriers."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.devices: list[torch.device] = []

    def rank(self) -> int:
        return 0

    def barrier(self, opts: dist.BarrierOptions) -> None:
        self.devices.append(opts.device)


@pytest.fixture
def end(monkeypatch) -> list[str]:
    """Records the last actions of ``shutdown``; PyTorch sees an accelerator of type cuda."""
    done: list[str] = []

    def leave(code: int) -> None:
        done.append(f"exit {code}")
        raise SystemExit(code)

    c10d = dist.distributed_c10d
    monkeypatch.setattr(parallel.os, "_exit", leave)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    monkeypatch.setattr(c10d, "_rank_not_in_group", lambda group: False)
    monkeypatch.setattr(
        c10d, "_get_object_coll_device", lambda group: {"nccl": "cuda"}.get(group.backend, "cpu")
    )
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    return done


def layout(device: torch.device, backend: str, monkeypatch) -> tuple[ParallelLayout, list]:
    """A layout of two ranks over fake groups, and the groups; the last is the default group."""
    groups = [FakeGroup(backend), FakeGroup("gloo"), FakeGroup("gloo"), FakeGroup(backend)]
    own, host, save, default = groups
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    monkeypatch.setattr(dist, "get_backend", lambda group: (group or default).backend)
    return ParallelLayout(0, 2, 2, device, own, host, save), groups


def test_nccl_barriers_name_their_device_and_nothing_warns(end, monkeypatch):
    """PyTorch's own ``barrier`` over fake groups: without a device id it warns."""
    place, groups = layout(torch.device("cuda", 1), "nccl", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SystemExit, match="0"):
            shutdown(place, 0)
    gpu, cpu = [torch.device("cuda", 1)], [torch.device("cpu")]
    assert [group.devices for group in groups] == [gpu, cpu, cpu, gpu]
    assert end == ["destroyed", "exit 0"]


def test_gloo_barriers_stay_on_the_cpu(end, monkeypatch):
    place, groups = layout(torch.device("cpu"), "gloo", monkeypatch)
    with pytest.raises(SystemExit):
        shutdown(place, 0)
    assert [group.devices for group in groups] == [[torch.device("cpu")]] * 4
    assert end == ["destroyed", "exit 0"]


def test_a_failed_rank_does_not_wait(end, monkeypatch):
    place, groups = layout(torch.device("cuda", 0), "nccl", monkeypatch)
    closed: list[int] = []

    def close() -> None:
        closed.append(1)
        raise OSError("a full disk")

    with pytest.raises(SystemExit, match="1"):
        shutdown(place, 1, [close])
    assert closed == [1]
    assert [group.devices for group in groups] == [[]] * 4
    assert end == ["exit 1"]


@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_a_narrow_residual_stream_needs_narrow_products(precision):
    """``choose_device`` refuses it: no process group exists yet."""
    config = Config()
    config.parallel.device, config.train.precision = "cpu", precision
    config.train.residual = "bfloat16"
    with pytest.raises(ConfigError, match=r"residual=bfloat16 .* valid: train\.residual=float32"):
        choose_device(config)
    config.train.precision = "bfloat16"
    assert choose_device(config) == torch.device("cpu")


def test_numbers_go_to_a_gpu_from_pinned_memory():
    """From other memory a copy waits for the GPU. What is there already is not pinned."""
    layout = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cuda", 0))
    values, there = (mock.Mock(device=device) for device in (torch.device("cpu"), layout.device))
    pinned = values.pin_memory.return_value
    assert sum_over_ranks(layout, values) is pinned.to.return_value
    pinned.to.assert_called_once_with(layout.device, non_blocking=True)
    sum_over_ranks(layout, there)
    there.pin_memory.assert_not_called()


def test_a_job_has_a_name_where_its_launcher_is_visible(config: Config, monkeypatch) -> None:
    """Process 1 of a container has a parent without a number there."""
    cpu = torch.device("cpu")
    name = join(config.parallel, cpu).job
    assert name.split()[1] == str(os.getppid())
    assert join(config.parallel, cpu).job == name
    monkeypatch.setattr("os.getppid", lambda: 0)
    assert join(config.parallel, cpu).job == ""
