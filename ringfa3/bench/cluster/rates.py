"""What the time model knows of the hardware: the one file to change after a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overhead:
    """Seconds of a forward, or of a backward, that do not depend on the number of scores.

    Of the GPU:
    call     each call
    launch   each launch after the first
    tile     128 rows of one query head, for each launch that attends with them; in a backward 128
             keys, for each query head
    Of the host that starts the call:
    host          each call
    host_launch   each launch after the first
    host_message  each message to or from the rank
    """

    call: float = 0.0
    launch: float = 0.0
    tile: float = 0.0
    host: float = 0.0
    host_launch: float = 0.0
    host_message: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Speeds of one GPU and its links.

    forward, backward  FLOP/s of attention, over whole tiles of scores
    nvlink, nic        bytes a second into a GPU, and as many out of it at the same time
    message            seconds that a link spends on a message, whatever its size
    overheads          of a forward and a backward; by default unknown, so none
    """

    forward: float
    backward: float
    nvlink: float
    nic: float
    message: float
    overheads: tuple[Overhead, Overhead] = (Overhead(), Overhead())


# TFLOP/s of RingFA3's kernels, forward and backward, by their head dim: medians on one H200.
TFLOPS = {64: (583, 560), 128: (743, 625), 256: (699, 536)}
# The result file, set, label and mask of each of these figures. A test compares them.
MEASURED = {
    64: ("attention/nvidia-h200-2026-11-23-bf16-paper", "paper", "16k", "causal"),
    128: ("attention/nvidia-h200-2026-11-23-bf16-gqa", "gqa", "64k", "causal"),
    256: ("attention/nvidia-h200-2026-11-23-bf16-paper", "paper", "16k", "causal"),
}
# Without a result file. Copy engines move blocks of 16 to 128 MiB between two H200 at 330 to 370
# GB/s. The other two are guesses: a network card of 400 Gbit/s for each GPU at 90% of its rate, and
# the cost of one message of a group call of NCCL.
NVLINK_GB_S = 330.0
NIC_GB_S = 45.0
MESSAGE_US = 3.0


def kernel_head_dim(head_dim: int) -> int:
    """The head dim of the kernel that computes heads of `head_dim`, up to 256."""
    return min(d for d in TFLOPS if d >= head_dim)
