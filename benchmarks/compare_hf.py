"""Compares errors of Hugging Face models under RingFA3 and under transformers' own attention.

    [torchrun --standalone --nproc-per-node N] -m benchmarks.compare_hf [--shape llama-1b ...]
        [--fa3 LIBRARY]

A model with random weights computes on packed documents in bfloat16: with RingFA3 over all ranks,
with transformers' attention on one device. Eager attention ignores the borders of packed documents,
so it gets one document at a time. The reference is transformers' attention in float32, document by
document. All weights are bfloat16 numbers. Gradients of documents and of ranks are summed in
float32 and rounded once more. The model with transformers' attention recomputes its layers in the
backward, because the mask of packed documents has an entry for each pair of tokens.

Prints a line for each shape:

* the error of all gradients, |g - g_ref| / |g_ref|, of RingFA3 and of transformers; their ratio;
* tokens per second of RingFA3's forward and backward, over all ranks, the median of `--steps`.

With `--fa3`, on several GPUs and for shapes without sinks, it measures ring-flash-attn too
(`ring_flash_attn`). Its steps alternate with RingFA3's. The ratio of tokens per second is
RingFA3's over its own, the median of pairs. The number of ranks must then divide `--tokens`.

Exits with 1 unless each error, RingFA3's and ring-flash-attn's, is at most 1.1 times that of
transformers' attention. On a CPU this measures no kernel, but the PyTorch fallback.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringfa3.hf
from benchmarks.compare_trainers import ring_flash_attn
from examples.hf_cp import loss_of, shifted_labels, summed_gradients
from ringfa3 import ContextPlan, plan_context
from ringfa3.bench.common.cases import documents
from ringfa3.bench.common.fa3 import Fa3Ops
from ringfa3.bench.common.implementations import LoadError

LARGEST_RATIO = 1.1
LOSS_TOKENS = 4096  # of a chunk of the loss
SHORTEST = 64  # tokens of a document; the last one may be shorter

Gradients: TypeAlias = dict[str, torch.Tensor]  # float32, by parameter


@dataclass(frozen=True)
class Shape:
    """A model, and the attention of transformers that it is compared with.

    config     a config class of transformers, and its arguments
    attention  an attention of transformers that supports the model
    packs      whether that attention supports packed documents
    longest    largest document in tokens, which bounds the memory of that attention
    """

    config: tuple[str, dict[str, Any]]
    attention: str
    packs: bool
    longest: int

    def model(self, attention: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The same random weights on every rank, under every attention and in every dtype."""
        name, arguments = self.config
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, name)(**arguments),
                attn_implementation=attention,
                experts_implementation="eager",
            )
        trained: nn.Module = model.to(torch.bfloat16).to(dtype).train()
        return trained


SHAPES = {
    "llama-1b": Shape(
        (
            "LlamaConfig",
            {
                "vocab_size": 128256,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": True,
            },
        ),
        "sdpa",
        packs=True,
        longest=8192,
    ),
    "gpt-oss-block": Shape(
        (
            "GptOssConfig",
            {
                "vocab_size": 32768,
                "num_hidden_layers": 1,
                "num_local_experts": 32,
                "layer_types": ["sliding_attention"],
            },
        ),
        "eager",  # the only one of transformers with sinks
        packs=False,
        longest=4096,
    ),
}


@dataclass(frozen=True)
class Peer:
    """The figures of ring-flash-attn.

    name     its name, with the number of KV heads that it gathers at a time
    error    of its gradients, relative to the reference
    seconds  of a forward and backward on the slowest rank
    speed    RingFA3's tokens per second over its own, the median of pairs
    """

    name: str
    error: float
    seconds: float
    speed: float


@dataclass(frozen=True)
class Figures:
    """Errors of gradients, and the time of a step.

    ours, theirs  relative to the reference
    seconds       of a forward and backward on the slowest rank
    peers         other rings, if they were asked for
    """

    ours: float
    theirs: float
    seconds: float
    peers: list[Peer] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def right(self) -> bool:
        """No error exceeds LARGEST_RATIO times theirs; none is NaN."""
        errors = [self.ours, *(peer.error for peer in self.peers)]
        return all(error / self.theirs <= LARGEST_RATIO for error in errors)


def measure(
    shape: Shape,
    tokens: int,
    steps: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    with_peers: bool = False,
) -> Figures:
    """The figures of a shape over `group`; None means the default group, or this process alone."""
    ringfa3.hf.register()
    lengths = documents(random.Random(1), tokens, min(SHORTEST, tokens), shape.longest)
    cumulative = [0, *itertools.accumulate(lengths)]
    vocabulary = shape.config[1]["vocab_size"]
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)

    def theirs_in(dtype: torch.dtype, packed: bool) -> Gradients:
        model = shape.model(shape.attention, dtype, device)
        return gradients_of(model, ids, lengths, packed)

    reference = theirs_in(torch.float32, packed=False)
    theirs = distance(theirs_in(torch.bfloat16, shape.packs), reference)

    def prepare(attention: str, plan: ContextPlan) -> tuple[float, Callable[[], None]]:
        """The error of a model under `attention`, and its step."""
        model = shape.model(attention, torch.bfloat16, device)

        def called(ringfa3_plan: ContextPlan, **given: Any) -> Any:
            """A peer got its plan in `register`, and must not get RingFA3's argument."""
            ours = {"ringfa3_plan": ringfa3_plan} if attention == "ringfa3" else {}
            return model(**given, **ours)

        def step() -> None:
            model.zero_grad()
            loss_of(called, ids, plan).backward()

        step()
        return distance(rounded(summed_gradients(model, plan), model), reference), step

    plan = plan_context(cumulative, group)
    ours, our_step = prepare("ringfa3", plan)
    peers = []
    for kv_heads in (1, None) if with_peers else ():
        contiguous = plan_context(cumulative, group, layout="contiguous")
        ring_flash_attn.register(contiguous, device, kv_heads)
        error, step = prepare(ring_flash_attn.NAME, contiguous)
        pairs = [
            (slowest(our_step, device, plan.group), slowest(step, device, plan.group))
            for _ in range(steps)
        ]
        peers.append(
            Peer(
                f"ring-flash-attn, {kv_heads or 'all'} KV heads at a time",
                error,
                statistics.median(theirs for _, theirs in pairs),
                statistics.median(theirs / ours for ours, theirs in pairs),
            )
        )
    seconds = [slowest(our_step, device, plan.group) for _ in range(steps)]
    return Figures(ours, theirs, statistics.median(seconds), peers)


def gradients_of(
    model: nn.Module, ids: torch.Tensor, lengths: Sequence[int], packed: bool
) -> Gradients:
    """Gradients of the mean loss of all tokens on one device.

    All documents are in one call if `packed`, otherwise one by one.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    bounds = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
    positions = torch.cat([torch.arange(length) for length in lengths]).to(ids.device)
    labels = shifted_labels(ids, lengths)
    for begin, end in [(0, len(ids))] if packed else bounds:
        logits = model(
            ids[None, begin:end], position_ids=positions[None, begin:end], use_cache=False
        ).logits[0]
        total = total_loss(logits, labels[begin:end])
        (total / (labels != -100).sum()).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:  # an expert may have no token
                sums[name] += p.grad
        model.zero_grad()
    return rounded(sums, model)


def total_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the tokens' losses of (tokens, vocabulary) logits.

    In chunks that the backward recomputes: logits of 32k tokens in float32 and their gradient would
    not fit into 80 GB.
    """
    chunks = zip(logits.split(LOSS_TOKENS), labels.split(LOSS_TOKENS), strict=True)
    losses = [checkpoint(_chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum()


def _chunk_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def rounded(sums: Gradients, model: nn.Module) -> Gradients:
    """Sums, rounded to the dtype of the model: the gradients that an optimiser would read."""
    return {name: sums[name].to(p.dtype).float() for name, p in model.named_parameters()}


def distance(found: Gradients, reference: Gradients) -> float:
    """The norm of the difference of all gradients, over the norm of the reference."""
    pairs = [(found[name], reference[name]) for name in reference]
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([b.norm() for _, b in pairs]).norm())


def slowest(
    step: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Seconds of a step on the slowest rank of a group; all ranks start together."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if group is not None:
        dist.barrier(group)
    wait()
    begin = time.perf_counter()
    step()
    wait()
    seconds = torch.tensor(time.perf_counter() - begin, device=device)
    if group is not None:
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return float(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32768, help="of all documents together")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--fa3", type=Path, help="a library with FlashAttention-3's operators")
    args = parser.parse_args(arguments)
    for name, least in (("tokens", 2), ("steps", 1)):  # the last token of a document has no label
        if (given := getattr(args, name)) < least:
            parser.error(f"--{name} {given}: it must be at least {least}")
    started = dist.is_torchelastic_launched()
    world = int(os.environ["WORLD_SIZE"]) if started else 1
    if args.fa3 is not None and args.tokens % world:
        parser.error(
            f"--tokens {args.tokens}: with --fa3 it must be a multiple of the {world} ranks"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if started:
        dist.init_process_group()
    console = Console(quiet=started and dist.get_rank() > 0, markup=False, highlight=False)
    if args.fa3 is not None:
        if device.type == "cpu" or world == 1:
            parser.error(f"--fa3 {args.fa3}: it needs several GPUs, under torchrun")
        try:
            Fa3Ops(args.fa3)  # loads it
            ring_flash_attn.functions()
        except (ImportError, LoadError) as problem:
            parser.error(f"--fa3: {problem}")
    right = []
    for name in args.shape:
        peers = args.fa3 is not None and SHAPES[name].packs  # ring-flash-attn has no sinks
        with console.status(f"{name}: gradients of transformers, then of RingFA3"):
            found = measure(SHAPES[name], args.tokens, args.steps, device, with_peers=peers)
        right.append(found.right)
        console.print(
            f"{name}, {args.tokens:,} tokens, {world} x {device.type}: error {found.ours:.3%}, "
            f"{SHAPES[name].attention}'s {found.theirs:.3%}, ratio {found.ratio:.3f}; "
            f"{args.tokens / found.seconds:,.0f} tokens/s",
            soft_wrap=True,
        )
        for peer in found.peers:
            console.print(
                f"{name}, {peer.name}: error {peer.error:.3%}; "
                f"{args.tokens / peer.seconds:,.0f} tokens/s, RingFA3's over it {peer.speed:.3f}",
                soft_wrap=True,
            )
    if started:
        dist.barrier()  # no rank leaves while another still uses the group
        dist.destroy_process_group()
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
