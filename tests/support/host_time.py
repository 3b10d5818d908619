"""Microseconds of the host for a call of `flash_attn_func`, with kernels that do nothing.

`python -m tests.support.host_time` prints the medians of both hosts, in turn: time that the
calling thread runs on the CPU. A GPU's driver adds its own time to each launch and to each
allocation.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ringfa3 import flash_attn_func, host
from ringfa3.build.host_library import ensure_host_library
from tests.support.fake_kernels import FakeKernels, compile_kernels

CALLS, ROUNDS = 200, 15


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    begin = time.thread_time()  # other processes take none of it
    for _ in range(calls):
        call()
    return (time.thread_time() - begin) / calls * 1e6


def calls() -> dict[str, Callable[[], object]]:
    """By what they do. Gradients belong to what starts calls now."""
    q, k, v = (torch.randn(1, 128, h, 64).bfloat16() for h in (16, 8, 8))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    one = torch.ones((), requires_grad=True)
    out, product = flash_attn_func(*leaves, causal=True), one * one
    assert isinstance(out, torch.Tensor)
    dout = torch.ones_like(out)

    def grad(y: torch.Tensor, x: list[torch.Tensor], dy: torch.Tensor | None = None) -> object:
        return torch.autograd.grad(y, x, dy, retain_graph=True)

    return {
        "forward": lambda: flash_attn_func(q, k, v, causal=True),
        "forward with gradients": lambda: flash_attn_func(*leaves, causal=True),
        "backward": lambda: grad(out, leaves, dout),
        "backward of one multiplication": lambda: grad(product, [one]),
    }


def main() -> None:
    torch.set_num_threads(1)
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        kernels = FakeKernels(compile_kernels(Path(folder)))
        with kernels.stands_in():
            kernels.library.fake_idle(1)
            library = host.load(ensure_host_library())
            for number in range(ROUNDS + 1):
                for name in host.HOSTS:
                    if name == "cpp":
                        host.start(library, "cpu", kernels.driver())
                        host.select(name)
                    for what, call in calls().items():
                        call()  # builds the program
                        taken = microseconds(call)
                        if number:
                            times.setdefault((what, name), []).append(taken)
                    host.stop()
    print(f"{'microseconds a call':32}" + "".join(f"{name:>10}" for name in host.HOSTS))
    for what in dict.fromkeys(what for what, _ in times):
        medians = [np.median(times[what, name]) for name in host.HOSTS]
        print(f"{what:32}" + "".join(f"{x:10.1f}" for x in medians))


if __name__ == "__main__":
    main()
