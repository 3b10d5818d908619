"""The tensors of a case, and the interface that every implementation of attention has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ringfa3.bench.common.cases import FORWARD, FULL, Case
from ringfa3.bench.common.scores import SCORES

Outputs = dict[str, torch.Tensor]  # "out", or "dq", "dk", "dv", each (tokens, heads, columns)
GRADIENTS = ("dq", "dk", "dv")


class UnsupportedCaseError(Exception):
    """An implementation does not support this case; the message says why."""


def check_sdpa_mask(case: Case) -> None:
    """Raises UnsupportedCaseError: scaled_dot_product_attention's `is_causal` is not that mask."""
    if case.packed:
        raise UnsupportedCaseError("no packed documents")
    if not case.causal and case.window != FULL:
        raise UnsupportedCaseError("no window")
    if case.causal and case.keys:
        raise UnsupportedCaseError("aligns at the top left")


@dataclass(frozen=True)
class Problem:
    """A case with its tensors, standard normal unless `case.scores` says otherwise: on zeros a GPU
    draws less power.

    q, dout: (b, s, h, d); k, v: (b, s_k, h_kv, d); packed cases (t, h, d).
    """

    case: Case
    direction: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def inputs(self) -> Iterator[torch.Tensor]:
        return iter((self.q, self.k, self.v))


def make_problem(
    case: Case,
    direction: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Problem:
    """The same tensors on every device of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = (case.tokens,) if case.packed else (len(case.lengths), case.lengths[0])
    keys = tokens if case.packed else (len(case.lengths), case.key_lengths[0])

    def normal(tokens: tuple[int, ...], heads: int, columns: int) -> torch.Tensor:
        shape = (*tokens, heads, columns)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    d, d_v = case.head_dim, case.v_dim or case.head_dim
    q = normal(tokens, case.heads, d)
    k, v = (normal(keys, case.kv_heads, columns) for columns in (d, d_v))
    if case.scores is not None:
        SCORES[case.scores](q, k, v, generator)
    dout = normal(tokens, case.heads, d_v) if direction != FORWARD else q.new_empty(0)
    return Problem(case, direction, q, k, v, dout)


@dataclass(frozen=True)
class PreparedRun:
    """One implementation, ready to compute one problem.

    run      computes once; returns the implementation's own result
    outputs  converts that result to `Outputs`; None for a call that is only timed, on another
             problem
    rows     (n,) the problem's tokens that `outputs` has, in order; None: all of them
    flops    of `run`, where they differ from the problem's
    rms      what the rms of its errors may be, over that of the reference; None: the bound of
             `AccuracyCheck` counts
    close    releases what `prepare` has acquired
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs] | None
    rows: torch.Tensor | None = None
    flops: int | None = None
    rms: float | None = None
    close: Callable[[], None] = lambda: None

    def results(self) -> Outputs:
        """Run once, and return the outputs."""
        assert self.outputs is not None
        return self.outputs(self.run())


class Implementation(Protocol):
    """An implementation of attention. `name` heads its column."""

    name: str

    def prepare(self, problem: Problem) -> PreparedRun:
        """Raises `UnsupportedCaseError`."""


def flat(names: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> Outputs:
    """Batches (b, s, h, d) as (t, h, d)."""
    return {
        name: x.flatten(0, 1) if x.dim() == 4 else x for name, x in zip(names, tensors, strict=True)
    }


def prepare_backward(problem: Problem, forward: Callable[..., torch.Tensor]) -> PreparedRun:
    """Autograd's backward of `forward(q, k, v)` alone: the forward runs here, once."""
    inputs = tuple(x.detach().requires_grad_() for x in problem.inputs)
    out = forward(*inputs)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, inputs, problem.dout, retain_graph=True)

    return PreparedRun(run, lambda grads: flat(GRADIENTS, grads))


def prepare_forward(problem: Problem, forward: Callable[..., torch.Tensor]) -> PreparedRun:
    """`forward(q, k, v)` of the problem's inputs."""
    inputs = tuple(problem.inputs)
    return PreparedRun(lambda: forward(*inputs), lambda out: flat(("out",), (out.detach(),)))
