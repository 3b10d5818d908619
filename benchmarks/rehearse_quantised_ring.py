"""Simulates forwards of 8-bit rings on one GPU: their error and time, relative to one GPU's.

    python -m benchmarks.rehearse_quantised_ring [--worlds 2 4] [--tokens 131072] [--pairs 10]

The ranks of a ring are threads that share the GPU, so their kernels run one after the other, and
messages are copies in its memory. The time is that of all kernels and copies of a call,
quantisation included, with queued calls. It does not include links. Calls are causal and zigzag,
with 32 query and 8 KV heads of head dim 128, in bfloat16.

Prints a line for each precision and world:

* the root-mean-square error against float32, on FlashAttention-3's distribution with outliers, over
  that of one GPU;
* the time of one GPU's call over the total time of all ranks, median of pairs and quartiles. It is
  1 if a ring of as many GPUs loses nothing except to its links.

"native" is the ring in bfloat16 by messages. On a CPU this measures no kernel, but the PyTorch
fallback.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ringfa3 import flash_attn_func, plan_context
from ringfa3.bench.common.scores import SCORES
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import quantised_forward
from ringfa3.ring.op import run_forward
from ringfa3.ring.p2p import Exchange, Message
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.ring.prepare_call import PreparedCall

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PRECISIONS = ("native", "int8", "fp8")
SECONDS = 60.0  # a rank waits so long for a message
QUEUED = 3  # calls of a timing, so that the host runs ahead of the device

Tensors = Sequence[torch.Tensor]  # q, k, v
Mail = defaultdict[tuple[int, int, int], "queue.Queue[torch.Tensor]"]  # by sender, receiver, tag


class Received:
    """An exchange that is complete."""

    def wait(self) -> None:
        """Return at once."""


class ThreadTransport:
    """A `Transport` between threads that compute on one stream."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self.mail = rank, mail

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        for m in sends:  # a copy: the sender fills its buffer again before the receiver reads it
            self.mail[self.rank, m.peer, m.tag].put(m.tensor.clone())
        for m in receives:
            m.tensor.copy_(self.mail[m.peer, self.rank, m.tag].get(timeout=SECONDS))
        return Received()

    def close(self) -> None:
        """Do nothing: the transport has no resources."""


class Ring:
    """Plans of all ranks of a causal sequence, and their tokens of q, k and v."""

    def __init__(self, world: int, qkv: Tensors) -> None:
        tokens = len(qkv[0])
        self.plans = [plan_context(tokens, (rank, world)) for rank in range(world)]
        self.local = [[plan.shard(x) for x in qkv] for plan in self.plans]

    def forward(self, precision: str) -> list[torch.Tensor]:
        """The output of each rank."""
        mail: Mail = defaultdict(queue.Queue)
        outs: dict[int, torch.Tensor] = {}

        def work(plan: ContextPlan, qkv: Tensors) -> None:
            transport = ThreadTransport(plan.rank, mail)
            scale = HEAD_DIM**-0.5
            if precision == "native":
                call = PreparedCall(plan, "forward", partial(P2PRingPass, transport))
                outs[plan.rank], _ = run_forward(*qkv, scale, call)
            else:
                outs[plan.rank], *_ = quantised_forward.run_quantised_forward(
                    *qkv, plan, scale, precision, transport
                )

        pairs = zip(self.plans, self.local, strict=True)
        threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(outs) < len(threads):
            raise RuntimeError("a rank has failed: its error is printed above")
        return [outs[rank] for rank in range(len(threads))]

    def gathered(self, outs: Tensors) -> torch.Tensor:
        """All tokens' rows, in order."""
        whole = torch.empty(sum(map(len, outs)), *outs[0].shape[1:], device=outs[0].device)
        for plan, out in zip(self.plans, outs, strict=True):
            whole[plan.token_index.to(out.device)] = out.float()
        return whole


def inputs(tokens: int, device: torch.device, scores: str = "") -> list[torch.Tensor]:
    """q, k, v (tokens, heads, 128) bfloat16, N(0,1) or a distribution of `SCORES`."""
    generator = torch.Generator(device).manual_seed(0)
    heads = HEADS, KV_HEADS, KV_HEADS
    made = [torch.randn(tokens, h, HEAD_DIM, device=device, generator=generator) for h in heads]
    if scores:
        SCORES[scores](*made, generator)
    return [x.bfloat16() for x in made]


def exact_output(qkv: Tensors) -> torch.Tensor:
    """The output of PyTorch's attention in float32, without TF32."""
    q, k, v = (x.float().transpose(0, 1)[None] for x in qkv)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def one_device(qkv: Tensors, precision: str = "native") -> torch.Tensor:
    out = flash_attn_func(*(x[None] for x in qkv), causal=True, precision=precision)
    assert isinstance(out, torch.Tensor)
    return out[0]


def error_ratio(qkv: Tensors, exact: torch.Tensor, precision: str, ring: Ring) -> float:
    """RMSE of a ring over that of one device."""
    found = ring.gathered(ring.forward(precision)), one_device(qkv, precision).float()
    of_ring, of_one = ((x - exact).square().mean().sqrt().item() for x in found)
    return of_ring / of_one


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of `QUEUED` calls, until the device has finished their work."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(QUEUED):
        call()
    wait()
    return time.perf_counter() - begin


def time_ratios(qkv: Tensors, precision: str, ring: Ring, pairs: int) -> list[float]:
    """One device's time over that of all ranks, pair by pair."""
    device = qkv[0].device
    calls = partial(one_device, qkv, precision), partial(ring.forward, precision)
    for call in 2 * calls:
        call()
    times = [[seconds(call, device) for call in calls] for _ in range(pairs)]
    return [one / ranks for one, ranks in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--tokens", type=int, default=131072, help="for times")
    parser.add_argument("--error-tokens", type=int, default=8192, help="for errors")
    parser.add_argument("--pairs", type=int, default=10)
    asked = parser.parse_args()
    for name, least in (("pairs", 2), ("tokens", 1), ("error_tokens", 1)):
        if getattr(asked, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(asked, name)}: it must be at least {least}")
    if min(asked.worlds) < 2:
        parser.error(f"--worlds {min(asked.worlds)}: a ring has at least 2 ranks")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(highlight=False, soft_wrap=True)
    outliers, normal = inputs(asked.error_tokens, device, "outliers"), inputs(asked.tokens, device)
    exact = exact_output(outliers)
    rows = [(precision, world) for precision in asked.precision for world in asked.worlds]
    progress = track(rows, "rehearsing", console=Console(stderr=True), transient=True)
    for precision, world in progress:
        error = error_ratio(outliers, exact, precision, Ring(world, outliers))
        ratios = time_ratios(normal, precision, Ring(world, normal), asked.pairs)
        low, middle, high = statistics.quantiles(ratios, n=4)
        console.print(
            f"{precision}, {world} ranks: error {error:.4f} of one GPU's at "
            f"{asked.error_tokens} tokens; time {middle:.3f} [{low:.3f}, {high:.3f}] "
            f"at {asked.tokens}"
        )


if __name__ == "__main__":
    main()
