"""The state of a program that PyTorch gives to every call, and calls that must not depend on it.

    python -m tests.support.ambient [--device cuda] [--state STATE]

runs each call under a state and outside of it, for `compute-sanitizer`, and compares their bits.
Under torchrun the ranks share the calls of the ring.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ringfa3 import flash_attn_func, flash_attn_varlen_func, plan_context, ring_attn_func
from train.config import Config, MemoryConfig, ModelConfig
from train.data.batches import Batch, make_batch
from train.data.samples import Sample
from train.model.transformer import build_model

Results = dict[str, torch.Tensor]
Call = Callable[[], Results]


class _Unchanged(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """PyTorch also fills every new tensor with NaN or the largest number, which is its default."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = fill


STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": deterministic,
    "warn only": lambda: deterministic(warn_only=True),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "function mode": _Unchanged,
}


def differences(found: Results, wanted: Results) -> list[str]:
    """The names of results that differ in dtype, device or any bit. Without gradients, which some
    states switch off, the others must be there."""
    missing = {x for x in wanted if x not in found and not x.startswith("d ")}
    return sorted(missing) + [
        name
        for name, x in found.items()
        if (x.dtype, x.device) != (wanted[name].dtype, wanted[name].device)
        or not torch.equal(_bytes(x), _bytes(wanted[name]))
    ]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def attention_calls(device: str, seed: int) -> dict[str, Call]:
    """Forward and backward on one device, of lengths that depend on the seed, and 8 bits."""
    dtype = torch.bfloat16
    tokens, keys = 150 + seed, 170 + seed
    cu = [0, 40, 41, tokens]
    q, k, v, dout = _drawn(device, dtype, seed, (tokens, 4), (tokens, 2), (tokens, 2), (tokens, 4))
    batch = _drawn(device, dtype, seed, (2, tokens, 4), (2, keys, 2), (2, keys, 2), (2, tokens, 4))
    sink = torch.linspace(-1, 1, 4, dtype=torch.float32, device=device)

    def packed() -> Results:
        leaves = _leaves(q, k, v, sink)
        out = flash_attn_varlen_func(
            *leaves[:3], cu, cu, causal=True, deterministic=True, return_lse=True, sink=leaves[3]
        )
        return _results(("out", "lse"), out, ("q", "k", "v", "sink"), leaves, dout)

    def batched() -> Results:
        leaves = _leaves(*batch[:3])
        out = flash_attn_func(
            *leaves, causal=True, window_size=(50, -1), deterministic=True, return_lse=True
        )
        return _results(("out", "lse"), out, ("q", "k", "v"), leaves, batch[3])

    def in_8_bits(precision: str) -> Results:
        leaves = _leaves(q, k, v)
        out = flash_attn_varlen_func(
            *leaves, cu, cu, deterministic=True, return_lse=True, precision=precision
        )
        return _results(("out", "lse"), out, ("q", "k", "v"), leaves, dout)

    return {
        "packed": packed,
        "batched": batched,
        "fp8": lambda: in_8_bits("fp8"),
        "int8": lambda: in_8_bits("int8"),
    }


def ring_calls(
    device: str, seed: int, group: dist.ProcessGroup | None = None, transport: str = "auto"
) -> dict[str, Call]:
    """A ring's forward and backward with plan, shard and unshard, and a forward in 8 bits."""
    total = 210 + seed
    dtype = torch.bfloat16
    q, k, v, dout = _drawn(device, dtype, seed, (total, 4), (total, 2), (total, 2), (total, 4))

    def ring(precision: str) -> Results:
        plan = plan_context([0, 100, 101, total], group)
        leaves = _leaves(*(plan.shard(x) for x in (q, k, v)))
        out = ring_attn_func(
            *leaves,
            plan,
            deterministic=True,
            return_lse=True,
            precision=precision,
            transport=transport if precision == "native" else "auto",
        )
        found = _results(("out", "lse"), out, ("q", "k", "v"), leaves, plan.shard(dout))
        whole = {f"{name} of all": plan.unshard(found[name]) for name in ("out", "d q", "d v")
                 if name in found}  # fmt: skip
        return found | whole | {"positions": plan.positions, "index": plan.token_index}

    return {"ring": lambda: ring("native"), "fp8 ring": lambda: ring("fp8")}


def model_calls(device: str, seed: int) -> dict[str, Call]:
    """The trainer's model, built, trained and asked for a token."""
    config = Config()
    config.model = ModelConfig(dim=32, ffn_dim=48, n_layers=2, n_heads=4, n_kv_heads=2)
    config.model.vocab_size, config.train.precision = 96, "bfloat16"
    config.memory = MemoryConfig(recompute="attention-saving", mlp_chunk=16)
    config.train.deterministic = True
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(
        0, 96, (50 + seed,), generator=generator, dtype=torch.int64, device="cpu"
    ).numpy()

    def train() -> Results:
        with torch.random.fork_rng([]):  # nn.Linear draws weights, which ours replace
            model = build_model(config, 96, torch.device(device))
        batch: Batch = make_batch(Sample(tokens, tokens, [0, 20, len(tokens)]), None, "zigzag")
        losses = model(batch.to(torch.device(device)))
        found = {"losses": losses.detach(), "hits": model.hits(batch.to(torch.device(device)))}
        if losses.requires_grad:
            losses.sum().backward()
        grads = {f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found | {n: p.detach() for n, p in model.named_parameters()} | grads

    return {"trainer": train}


def _drawn(
    device: str, dtype: torch.dtype, seed: int, *shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        x = torch.randn((*shape, 64), generator=generator, dtype=torch.float32, device="cpu")
        made.append(x.to(device, dtype))
    return made


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    with_gradients = torch.is_grad_enabled()
    return [x.detach().clone().requires_grad_(with_gradients) for x in tensors]


def _results(
    names: tuple[str, ...],
    outputs: Any,
    inputs: tuple[str, ...],
    leaves: list[torch.Tensor],
    dout: torch.Tensor,
) -> Results:
    found = dict(zip(names, (x.detach() for x in outputs), strict=True))
    if torch.is_grad_enabled():
        grads = torch.autograd.grad(outputs[0], leaves, dout)
        found |= {f"d {name}": x for name, x in zip(inputs, grads, strict=True)}
    return found


def hf_calls(device: str, seed: int) -> dict[str, Call]:
    """A model of transformers, which the caller has made, on padded rows and packed documents."""
    from tests.support.hf_models import shared_model, tokens

    model = copy.deepcopy(shared_model("gpt-oss", "ringfa3")).to(device)
    ids = tokens(2, 13 + seed).to(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = torch.cat([torch.arange(n, device=device) for n in (7, 6 + seed)])[None]

    def run(rows: torch.Tensor, **inputs: torch.Tensor) -> Results:
        model.zero_grad()
        logits = model(rows, use_cache=False, **inputs).logits
        if logits.requires_grad:
            logits.square().sum().backward()
        grads = {f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach()} | grads

    return {
        "padded model": lambda: run(ids, attention_mask=mask),
        "packed model": lambda: run(ids[:1], position_ids=positions),
    }


def check(calls: dict[str, Call], state: str, state_first: bool, times: int = 3) -> list[str]:
    """Runs the calls under a state, outside of it and under it again; with `state_first` False
    outside first. Each `times` times: the host library records the second and replays the third.

    Returns the calls and results that differ; "random numbers" if one drew some.
    """
    wanted: dict[str, Results] = {}
    found: list[tuple[str, Results]] = []

    def inside() -> None:
        for _ in range(times):
            with STATES[state]():
                found.extend((name, call()) for name, call in calls.items())

    before = torch.get_rng_state()
    if state_first:
        inside()
    for _ in range(times):
        wanted = {name: call() for name, call in calls.items()}
        found.extend(wanted.items())
    inside()
    unequal = [f"{name}: {x}" for name, got in found for x in differences(got, wanted[name])]
    drawn = not torch.equal(before, torch.get_rng_state())
    return unequal + ["random numbers"] * drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--state", default="bfloat16", choices=STATES)
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    group = None
    if dist.is_torchelastic_launched():
        if arguments.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        group = dist.group.WORLD
    calls = attention_calls(arguments.device, 0) | ring_calls(arguments.device, 0, group)
    unequal = check(calls, arguments.state, state_first=True)
    print("\n".join(unequal) or f"equal bits under {arguments.state}: {', '.join(calls)}")
    if group is not None:
        dist.destroy_process_group()
    if unequal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
