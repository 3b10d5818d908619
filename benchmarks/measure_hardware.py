"""Measures the speeds that `mode=estimate` uses, and writes them to a file for `hardware=`.

    torchrun --standalone --nproc-per-node gpu -m benchmarks.measure_hardware h100
    python train/pretrain.py mode=estimate experiment=8b_512k hardware=h100

Writes `configs/hardware/h100.yaml`; it replaces no file without `--force`. All GPUs of an otherwise
idle host measure at the same time, and the slowest one counts. They measure

* attention of one causal sequence with 32:8 heads;
* the matrix products of a block of `model=125m`, `1b` and `8b`, with those of their gradients;
* copies within the device and to pinned host memory;
* NCCL's all-gather and reduce-scatter.

Every figure is the median of the second half of `SECONDS`, at the clock that the GPU sustains. With
one process, figures that need several GPUs are defaults. Exits with 1 if a process has no GPU or no
kernel.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress

from ringfa3 import flash_attn_func
from ringfa3.kernels import dispatch
from train.checks.machine import check_hardware
from train.config import HardwareConfig
from train.model.flops import AGAIN_PER_PAIR, BACKWARD_PER_PAIR, FORWARD_PER_PAIR
from train.model.matmul import add_matmul, linear, matmul

CONFIGS = Path(__file__).absolute().parents[1] / "configs"
MODELS = ("125m", "1b", "8b")  # in the order of their widths
HEAD_DIMS = (64, 128)
HEADS, KV_HEADS = 32, 8
SEQUENCE = 65_536  # tokens
ROWS = 16_384  # tokens of a matrix product
COPIED = 2**32  # bytes, within the device
MOVED = 2**30  # bytes, to the host or between devices: about the float32 weights of a block of 8b
SECONDS = 2.0  # time of each measurement
COLLECTIVES = 40  # pairs of collectives
STEPS = len(HEAD_DIMS) + len(MODELS) + 3  # steps of the progress bar

Call: TypeAlias = Callable[[], object]
Figures: TypeAlias = dict[str, float]  # by name; the elements of a list are ``name.index``


def once(call: Call) -> float:
    """Seconds of one call on the device."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def sustained(times: Sequence[float]) -> float:
    return statistics.median(times[len(times) // 2 :])


def seconds(call: Call) -> float:
    """The sustained time of a call on the device."""
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < SECONDS or len(times) < 4:
        times.append(once(call))
    return sustained(times)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def attention_speeds(head_dim: int) -> tuple[float, float]:
    """TFLOP/s of forward and backward; the backward recomputes the scores."""
    q, dout = (random(1, SEQUENCE, HEADS, head_dim) for _ in range(2))
    k, v = (random(1, SEQUENCE, KV_HEADS, head_dim) for _ in range(2))
    each = SEQUENCE * (SEQUENCE + 1) / 2 * HEADS * head_dim / 1e12
    forward = seconds(lambda: flash_attn_func(q, k, v, causal=True))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    out = flash_attn_func(*inputs, causal=True)
    backward = seconds(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    again = BACKWARD_PER_PAIR + AGAIN_PER_PAIR
    return FORWARD_PER_PAIR * each / forward, again * each / backward


def products(model: str) -> tuple[int, list[tuple[int, int]]]:
    """The width of ``configs/model/MODEL.yaml``, and (inputs, outputs) of a block's matrices."""
    m = OmegaConf.load(CONFIGS / "model" / f"{model}.yaml")
    heads, kv_heads = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    attention = [(m.dim, heads), (m.dim, kv_heads), (m.dim, kv_heads), (heads, m.dim)]
    return m.dim, [*attention, (m.dim, m.ffn_dim), (m.dim, m.ffn_dim), (m.ffn_dim, m.dim)]


def matmul_speed(shapes: Sequence[tuple[int, int]]) -> float:
    """TFLOP/s of the trainer's products with matrices of ``shapes``, and of their gradients.

    As in the trainer, the gradients of weights are added to float32 sums.
    """
    widths = {width for shape in shapes for width in shape}
    tokens = {width: random(ROWS, width) for width in widths}
    weights = [random(outputs, inputs) for inputs, outputs in shapes]
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]

    def block() -> None:
        for (inputs, outputs), weight, total in zip(shapes, weights, sums, strict=True):
            x, dy = tokens[inputs], tokens[outputs]
            linear(x, weight)
            matmul(dy, weight)
            add_matmul(total, dy.T, x)

    flops = 3 * 2 * ROWS * sum(inputs * outputs for inputs, outputs in shapes)
    return flops / 1e12 / seconds(block)


def copy_speed() -> float:
    """1e9 bytes per second, read and written, of a copy within the device."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPIED / 1e9 / seconds(lambda: target.copy_(source))


def host_speed() -> float:
    """1e9 bytes per second between the device and pinned memory, in the slower direction."""
    device = torch.empty(MOVED, dtype=torch.uint8, device="cuda").random_()
    host = torch.empty(MOVED, dtype=torch.uint8, pin_memory=True)
    out = seconds(lambda: host.copy_(device, non_blocking=True))
    back = seconds(lambda: device.copy_(host, non_blocking=True))
    return MOVED / 1e9 / max(out, back)


def bytes_beyond_pytorch() -> int:
    """Bytes of this device that the driver counts and PyTorch's allocator does not hold."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def collective_speed(group: dist.ProcessGroup) -> float:
    """1e9 bytes per second that a rank receives, in the slower collective of a sharded engine.

    Call it on all ranks.
    """
    part = torch.randn(MOVED // 4 // group.size(), device="cuda")
    whole = part.repeat(group.size())
    gather = lambda: dist.all_gather_into_tensor(whole, part, group)  # noqa: E731
    scatter = lambda: dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group)  # noqa: E731
    # Every rank runs equally many, however long they take.
    times = [max(once(gather), once(scatter)) for _ in range(COLLECTIVES)]
    return (whole.nbytes - part.nbytes) / 1e9 / sustained(times)


def of_nccl() -> Figures:
    """The speed of collectives, and NCCL's memory for two groups of all ranks.

    A sharded engine has one such group, ring attention the other. Call it on all ranks.
    """
    before = bytes_beyond_pytorch()
    engine, ring = (dist.new_group(backend="nccl") for _ in range(2))
    dist.all_reduce(torch.ones(1, device="cuda"), group=ring)
    speed = collective_speed(engine)
    return {"nccl_gb": (bytes_beyond_pytorch() - before) / 1e9, "link_gb_s": speed}


def measure(advance: Callable[[], None]) -> Figures:
    """Measure on this rank, in ``STEPS`` steps. Call it on all ranks."""
    found = {}
    for index, head_dim in enumerate(HEAD_DIMS):
        forward, backward = attention_speeds(head_dim)
        found |= {f"forward_tflops.{index}": forward, f"backward_tflops.{index}": backward}
        advance()
    for index, model in enumerate(MODELS):
        found[f"matmul_tflops.{index}"] = matmul_speed(products(model)[1])
        advance()
    found["memory_gb_s"] = copy_speed()
    advance()
    found["host_link_gb_s"] = host_speed()
    advance()
    found["memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
    found["context_gb"] = bytes_beyond_pytorch() / 1e9
    if dist.get_world_size() > 1:
        found |= of_nccl()
    advance()
    return found


def slowest(by_rank: Sequence[Figures]) -> Figures:
    """The worst value of each figure, rounded to the worse side: largest memory, lowest speed."""
    result = {}
    for name in by_rank[0]:
        of_ranks = [figures[name] for figures in by_rank]
        steps = 100 if name.endswith("_gb") else 1  # round to 0.01 GB, speeds to integers
        if name in ("context_gb", "nccl_gb"):
            result[name] = math.ceil(max(of_ranks) * steps) / steps
        else:
            result[name] = math.floor(min(of_ranks) * steps) / steps
    return result


def hardware(name: str, figures: Figures) -> HardwareConfig:
    """``figures`` as a section of the trainer's config; other keys have their defaults."""
    lists: dict[str, list[float]] = {}
    single = {}
    for key, value in figures.items():
        of, _, index = key.partition(".")
        if index:
            lists.setdefault(of, []).append(value)
        else:
            single[of] = value
    widths = [products(model)[0] for model in MODELS]
    made = HardwareConfig(name, head_dims=list(HEAD_DIMS), widths=widths, **single, **lists)
    check_hardware(made)
    return made


def text_of(made: HardwareConfig, measured: Figures, device: str, world: int) -> str:
    """The file's text."""
    names = {key.partition(".")[0] for key in measured} | {"head_dims", "widths", "name"}
    values = OmegaConf.to_yaml(OmegaConf.structured(made))
    defaults = [field.name for field in fields(made) if field.name not in names]
    heading = (
        f"{device}, {world} of one host at once, {date.today()}, PyTorch {torch.__version__}, by "
        f"benchmarks/measure_hardware.py. The keys are explained in h200.yaml. Defaults, not "
        f"measured: {', '.join(defaults)}."
    )
    return textwrap.indent(textwrap.fill(heading, 98), "# ") + "\n" + values


def require_kernels() -> None:
    """End the process without a GPU or a kernel: the PyTorch fallback must not be timed."""
    if not torch.cuda.is_available():
        sys.exit("measure_hardware: this process has no GPU; start one process for each GPU")
    for head_dim in HEAD_DIMS:
        q = torch.empty(1, 1, head_dim, dtype=torch.bfloat16, device="cuda")
        for direction in ("forward", "backward"):
            if (reason := dispatch.fallback_reason(direction, q)) is not None:
                sys.exit(f"measure_hardware: no {direction} kernel: {reason}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", help="letters, digits, - and _; the file is NAME.yaml")
    parser.add_argument("--folder", type=Path, default=CONFIGS / "hardware")
    parser.add_argument("--force", action="store_true", help="replace the file")
    asked = parser.parse_args(arguments)
    path = asked.folder / f"{asked.name}.yaml"
    if not re.fullmatch(r"[\w-]+", asked.name):
        parser.error(f"{asked.name}: a name has letters, digits, - and _")
    if path.exists() and not asked.force:
        parser.error(f"{path} exists; choose another name, or replace it with --force")
    if not asked.folder.is_dir():
        parser.error(f"--folder {asked.folder} is not a folder")
    if torch.cuda.is_available():  # before anything opens a context on the first device
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    require_kernels()
    alone = "WORLD_SIZE" not in os.environ
    store = dist.HashStore() if alone else None
    dist.init_process_group("gloo", store=store, **({"rank": 0, "world_size": 1} if alone else {}))
    rank, world = dist.get_rank(), dist.get_world_size()
    with Progress(console=Console(stderr=True), disable=rank > 0) as progress:
        task = progress.add_task("measurements", total=STEPS)
        own = measure(lambda: progress.advance(task))
    by_rank: list[Figures] = [{} for _ in range(world)]
    dist.all_gather_object(by_rank, own)
    if rank == 0:
        figures = slowest(by_rank)
        text = text_of(hardware(asked.name, figures), figures, torch.cuda.get_device_name(), world)
        path.write_text(text)
        print(f"{text}Written to {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
