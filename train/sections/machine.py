"""``parallel``, ``engine`` and ``hardware``: what a run computes on."""

from __future__ import annotations

from dataclasses import dataclass

from train.sections.key import key

ALL = "all"  # as parallel.cp: every process of the job


@dataclass
class ParallelConfig:
    """The processes: their groups, transport, device and threads."""

    cp: int | str = key(1, at_least=1, words=(ALL,))
    """size of a CP group: processes that share samples by ring attention (context parallelism). It
    must divide the number of processes; the quotient is the data-parallel size. With all, the whole
    job is one CP group, whatever its number of processes"""
    layout: str = key("zigzag", choices=("zigzag", "contiguous"))
    """how a sample is sharded over the ranks of its CP group"""
    transport: str = key("auto", choices=("auto", "gloo", "nccl", "symmetric"))
    """the transport of K and V between ranks"""
    kv_budget: int | None = key(None, at_least=1)
    """the most rows of other ranks' K and V, a row for each token, that a rank holds at once in
    training. It must be at least 3 times a rank's tokens, 7 times where a CP group spans hosts of
    several ranks, and more if it has unequally many on them. With parallel.transport=nccl or gloo
    more rows mean fewer launches of attention; over symmetric all K and V are gathered only if they
    fit. null: no limit of its own"""
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """auto is cuda if every process of the host has a GPU"""
    timeout_s: float = key(600.0, above=0)
    """seconds after which a collective fails if a peer has not joined it. It must exceed the
    longest step, and the longest difference in start-up time between hosts"""
    threads: int | None = key(None, at_least=1)
    """CPU threads of a process; null is OMP_NUM_THREADS if that is above 1 (torchrun sets 1 by
    default), else this process's share of the host's cores"""
    numa: bool = True
    """bind each process to the cores of its GPU's NUMA node"""


@dataclass
class EngineConfig:
    """How the model is sharded or replicated over the ranks."""

    name: str = key("ddp", choices=("ddp", "fsdp2", "deepspeed"))
    """the engine; choose it with engine=NAME"""
    shard: str | None = key(None, choices=("all", "hsdp"))
    """sharding over all ranks, or hybrid sharding (HSDP). The latter shards over the ranks of each
    host and replicates over hosts: more memory, less traffic between hosts"""
    reduce: str | None = key(None, choices=("micro", "step"))
    """under gradient accumulation, micro reduces the gradients of every micro-batch, and a rank
    keeps its shard of their sum. step reduces once and moves less, but a rank keeps whole float32
    gradients from the first micro-batch to the last: 4 bytes for each weight"""
    stage: int | None = key(None, choices=(1, 2, 3))
    """stage of ZeRO"""
    offload: str | None = key(None, choices=("none", "optimizer", "all"))
    """what is offloaded to host memory: the optimiser state, whose update then runs on the CPU, or
    with stage 3 also the weights"""


@dataclass
class HardwareConfig:
    """Memory and speeds of a GPU: MFU counts against peak_tflops, predictions use all."""

    name: str = "h200"
    """the device; choose it with hardware=NAME"""
    memory_gb: float = key(150.7, above=0)
    """memory of a device, in 1e9 bytes, as its driver counts it"""
    host_gb: float | None = key(None, above=0)
    """memory of a host, in 1e9 bytes; null means this machine's memory, or the limit of its
    container if that is less"""
    context_gb: float = key(0.9, at_least=0)
    """memory of the CUDA context, libraries and kernels, in 1e9 bytes"""
    nccl_gb: float = key(2.1, at_least=0)
    """memory of NCCL if there are several ranks, in 1e9 bytes"""
    peak_tflops: float = key(989.0, above=0)
    """peak of bfloat16 matrix products without sparsity, TFLOP/s"""
    head_dims: list[int] = key([64, 128], at_least=1, distinct=True)
    """the head dims for the next two lists"""
    forward_tflops: list[float] = key([600.0, 743.0], above=0)
    """attention forward, TFLOP/s: long causal sequences of 32:8 heads, bfloat16"""
    backward_tflops: list[float] = key([585.0, 625.0], above=0)
    """attention backward, TFLOP/s, with the scores that it computes again"""
    widths: list[int] = key([768, 2048, 4096], at_least=1, distinct=True)
    """the values of model.dim for the next list. Between two of them, figures are interpolated;
    above the largest, its figure is used; below the smallest, a step has no predicted time"""
    matmul_tflops: list[float] = key([610.0, 665.0, 720.0], above=0)
    """matrix products of a model, TFLOP/s"""
    elementwise_bytes: float = key(780.0, at_least=0)
    """bytes that norms, RoPE, activations, casts and sums of a block read and write per token and
    channel of the residual stream, forward and backward"""
    compiled_bytes: float = key(300.0, at_least=0)
    """the same with train.compile=block"""
    memory_gb_s: float = key(4300.0, above=0)
    """device memory, 1e9 bytes a second, read and written"""
    link_gb_s: float = key(248.0, above=0)
    """NCCL's all-gather and reduce-scatter over NVLink, 1e9 bytes a second"""
    network_gb_s: float = key(50.0, above=0)
    """between hosts, for each device, 1e9 bytes a second"""
    host_link_gb_s: float = key(50.0, above=0)
    """between a device and pinned host memory, 1e9 bytes a second, in one direction"""
