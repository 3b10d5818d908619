"""If this fails, launches on side streams race with each other. Launches on streams that share a
handle, and raw captures beside uploads: `pytest -m gpu`."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_varlen_func
from ringfa3.kernels import dispatch, forward
from ringfa3.planning.tiling import plan_local

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PER_THREAD = 2  # cudaStreamPerThread: the handle of each thread's own default stream
SECOND = 2_000_000_000  # cycles, about


class Launches:
    """Forward launches of more tiles than CTAs, each into an output of its own.

    Outputs are made beforehand: PyTorch's allocator, too, tells streams apart by their handles.
    """

    def __init__(self, count: int) -> None:
        lengths, heads = np.array([1700, 2300]), 16
        tokens = int(lengths.sum())
        self.q, self.k, self.v = (
            torch.randn(tokens, heads, 128, device="cuda").bfloat16() for _ in range(3)
        )
        unit = dispatch.unit_for("forward", self.q)
        assert unit is not None
        self.unit = unit
        self.tiling = plan_local(lengths, lengths, -1, 0).forward(unit.tile_m)[0]
        self.outs = [torch.full_like(self.q, torch.nan) for _ in range(count)]
        self.lses = [torch.full((heads, tokens), torch.nan, device="cuda") for _ in range(count)]
        self.expected = torch.empty_like(self.q)
        self.attend(self.expected, self.lses[0].clone())
        torch.cuda.synchronize()

    def attend(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        inputs = self.q, self.k, self.v, self.tiling, 0.1
        forward.attend(self.unit, *inputs, out, lse[:0], lse)

    def check(self) -> None:
        """A skipped tile leaves NaN; every output has the bits of the first."""
        torch.cuda.synchronize()
        wrong = [n for n, x in enumerate(self.outs) if not torch.equal(x, self.expected)]
        assert not wrong, f"{len(wrong)} of {len(self.outs)} outputs are wrong, first {wrong[0]}"


def test_threads_with_a_default_stream_each_count_their_tiles_apart() -> None:
    """Two threads, 200 launches each, on streams of one handle that run at the same time."""
    launches = Launches(400)
    start = threading.Barrier(2)

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
            start.wait()
            for n in range(first, 400, 2):
                launches.attend(launches.outs[n], launches.lses[n])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches.check()


def test_streams_that_inherit_a_handle_count_their_tiles_apart() -> None:
    """100 streams, each destroyed while its launch runs; the driver reuses their handles."""
    launches, cudart = Launches(100), torch.cuda.cudart()
    handles = []
    for out, lse in zip(launches.outs, launches.lses, strict=True):
        handle = ctypes.c_ulonglong(0)
        assert cudart.cudaStreamCreate(ctypes.addressof(handle)) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            launches.attend(out, lse)
        assert cudart.cudaStreamDestroy(handle.value) == 0
        handles.append(handle.value)
    launches.check()
    print(f"{len(set(handles))} handles of {len(handles)} streams")


def test_a_raw_capture_waits_for_the_upload_of_another_stream() -> None:
    """The upload stands behind a second of sleep; unlike `torch.cuda.graph`, `capture_begin` does
    not synchronise the device. The replay has the bits of the eager call."""
    q, k, v = (torch.randn(2000, 4, 128, device="cuda").bfloat16() for _ in range(3))
    flash_attn_varlen_func(q, k, v, [0, 2000], [0, 2000])  # loads the kernel
    cu = [0, 311, 2000]
    eager, capturing = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(eager):
        torch.cuda._sleep(SECOND)
        expected = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capturing):
        graph.capture_begin()
        captured = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
        graph.capture_end()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
