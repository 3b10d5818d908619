"""A block with its MLP whole and in chunks, against calls on its last rows and sums in float32.

The block computes as in the trainer: bfloat16 products under autocast, float32 weights, one
document. It may be so long that nothing else computes all of it: then the last rows, to which the
largest offsets belong, are compared with calls on these rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ringfa3 import flash_attn_func, plan_context
from train.config import ModelConfig
from train.model import matmul
from train.model.initialise import initialise
from train.model.rope import Rotation, rope_frequencies, rotation
from train.model.transformer import Block

ROUNDED = 2**-8  # the largest relative error of a number that is rounded to bfloat16


@dataclass
class Outcome:
    """What a forward and backward leaves, and how far it is from calls on fewer rows.

    ``out``, ``mlp`` (the MLP's output) and ``dx`` are the last rows. ``sums`` are the gradients of
    the matrices that ``matmul.linear_backward`` computes, in float32 from the same factors.
    ``errors`` are relative norms.
    """

    out: Tensor
    mlp: Tensor
    dx: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def difference(x: Tensor, reference: Tensor) -> float:
    """Relative norm of the difference; NaN if either has one."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).norm() / reference.norm())


def make_block(model: ModelConfig, device: torch.device) -> Block:
    """The first block of a model of one layer, with the trainer's initial weights."""
    block = Block(model)
    initialise(block, model, seed=0, prefix="blocks.0.")
    return block.to(device)


def run(
    block: Block,
    turns: Rotation,
    x: Tensor,
    dout: Tensor,
    chunk: int | None,
    rows: int,
    few: int,
) -> Outcome:
    """Forward and backward of one document ``x`` (T, D), with the MLP whole or in chunks.

    References of ``errors``, all of the same rounded inputs: for ``attention`` and the last rows of
    its dq, dk and dv a call of ``flash_attn_func`` with the last ``rows`` queries and all keys, for
    ``mlp`` the MLP of the last ``rows`` alone, for a matrix's gradient the sum over ``few`` tokens
    at a time in float32. No earlier query sees the last keys.
    """
    block.mlp.chunk = chunk
    plan = plan_context(len(x))
    found: dict[str, Any] = {"sums": {}, "errors": {}}
    names = {p.data_ptr(): name for name, p in block.named_parameters()}
    product = matmul.linear_backward

    def attended(_: Any, qkv: tuple[Tensor, ...], out: Tensor) -> None:
        leaves = [tensor.detach() for tensor in qkv]
        leaves[0] = leaves[0][-rows:]
        q, k, v = (leaf.requires_grad_()[None] for leaf in leaves)
        alone = flash_attn_func(q, k, v, causal=True)[0]
        found["errors"]["attention"] = difference(out[-rows:], alone)
        expected: dict[str, Tensor] = {}

        def differentiate(dout: Tensor) -> None:
            gradients = torch.autograd.grad(alone, leaves, dout[-rows:])
            expected.update(zip(("dq", "dk", "dv"), gradients, strict=True))

        def check(name: str, gradient: Tensor) -> None:
            found["errors"][name] = difference(gradient[-rows:], expected.pop(name)[-rows:])

        out.register_hook(differentiate)
        for name, tensor in zip(("dq", "dk", "dv"), qkv, strict=True):
            tensor.register_hook(partial(check, name))

    @torch.no_grad()
    def hidden(_: Any, given: tuple[Tensor], out: Tensor) -> None:
        found["mlp"] = out[-rows:].clone()
        found["errors"]["mlp"] = difference(out[-rows:], block.mlp.forward(given[0][-rows:]))

    def multiplied(dy: Tensor, given: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        dx, dweight = product(dy, given, weight)
        total = torch.zeros_like(weight, dtype=torch.float32)
        for one, other in zip(dy.split(few), given.split(few), strict=True):
            total += one.float().T @ other.float()
        name = names[weight.data_ptr()]
        found["sums"][name] = total
        found["errors"][name] = difference(dweight, total)
        return dx, dweight

    hooks = [
        block.attention.attend.register_forward_hook(attended),
        block.mlp.register_forward_hook(hidden),
    ]
    x = x.detach().requires_grad_()
    with mock.patch.object(matmul, "linear_backward", multiplied):
        with torch.autocast(x.device.type, torch.bfloat16):
            out = block(x, turns, plan)
        found["out"] = out.detach()[-rows:].clone()
        out.backward(dout)
    for hook in hooks:
        hook.remove()
    assert x.grad is not None
    assert found["errors"].keys() >= {"attention", "dq", "dk", "dv", "mlp"}
    found["dx"] = x.grad[-rows:].clone()
    found["gradients"] = {name: p.grad for name, p in block.named_parameters()}
    block.zero_grad(set_to_none=True)
    return Outcome(**found)


def compare(
    model: ModelConfig, tokens: int, chunk: int, rows: int, device: torch.device
) -> dict[str, float]:
    """Runs the block with its MLP in chunks and whole; ``AssertionError`` if one is wrong.

    Differences are relative norms. Allowed is ``ROUNDED`` where the result alone is rounded: each
    matrix's gradient against the sum in float32, and the gradients of the chunked MLP against the
    sums of the whole one. Two calculations with one or two roundings each may differ by twice as
    much, and by four times what has passed through attention's backward, where roundings add up.
    Returns all differences.
    """
    torch.manual_seed(0)
    block = make_block(model, device)
    x, dout = (
        torch.randn(tokens, model.dim, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    frequencies = rope_frequencies(model.resolved_head_dim(), model.rope)
    turns = rotation(torch.arange(tokens, device=device), frequencies)
    chunked = run(block, turns, x, dout, chunk, rows, chunk)
    chunked.sums.clear()
    whole = run(block, turns, x, dout, None, rows, chunk)
    assert len(whole.sums) == sum(p.dim() == 2 for p in block.parameters())
    found, limits = {}, {}
    for kind, outcome in (("chunked", chunked), ("whole", whole)):
        for name, error in outcome.errors.items():
            found[f"{kind}: {name}"] = error
            limits[f"{kind}: {name}"] = ROUNDED * (1 if name in block.state_dict() else 2)
    for name in ("out", "mlp", "dx", *whole.gradients):
        key, through = f"chunked and whole: {name}", name == "dx" or name.startswith("attention")
        given, reference = (
            one.gradients.get(name, getattr(one, name, None)) for one in (chunked, whole)
        )
        found[key], limits[key] = difference(given, reference), ROUNDED * (4 if through else 2)
    for name in ("mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"):
        key = f"chunked and sum: {name}"
        found[key] = difference(chunked.gradients[name], whole.sums[name])
        limits[key] = ROUNDED
    wrong = {name: error for name, error in found.items() if not error <= limits[name]}
    assert not wrong, f"{tokens} tokens: {wrong}"
    return found
