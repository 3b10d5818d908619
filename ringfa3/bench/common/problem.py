"""The tensors of a case, and the results that implementations give for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ringfa3.bench.common.cases import FORWARD, Case

Outputs = dict[str, torch.Tensor]  # "out", or "dq", "dk", "dv", each (tokens, heads, head_dim)


class RefusalError(Exception):
    """An implementation does not do this case; the message says why."""


@dataclass(frozen=True)
class Problem:
    """A case with its tensors, standard normal: never zeros, on which a GPU draws less power.

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
    """The same tensors on every device of a kind."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = (case.tokens,) if case.packed else (len(case.lengths), case.lengths[0])
    keys = tokens if case.packed else (len(case.lengths), case.key_lengths[0])

    def normal(tokens: tuple[int, ...], heads: int) -> torch.Tensor:
        shape = (*tokens, heads, case.head_dim)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    q = normal(tokens, case.heads)
    k, v = (normal(keys, case.kv_heads) for _ in range(2))
    dout = normal(tokens, case.heads) if direction != FORWARD else q.new_empty(0)
    return Problem(case, direction, q, k, v, dout)


@dataclass(frozen=True)
class Attempt:
    """One implementation, ready for one problem.

    run      computes once and returns what it computed, in any form
    outputs  that, as `Outputs`; None where another problem is computed, for its speed alone
    rows     (n,) the problem's tokens that the outputs are of, in order; None for all of them
    flops    of `run`, where they are not those of the problem
    close    gives back what was held for it
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs] | None
    rows: torch.Tensor | None = None
    flops: int | None = None
    close: Callable[[], None] = lambda: None

    def results(self) -> Outputs:
        """Of a run."""
        assert self.outputs is not None
        return self.outputs(self.run())


class Contestant(Protocol):
    """An implementation of attention. `name` heads its column."""

    name: str

    def prepare(self, problem: Problem) -> Attempt:
        """Raises `RefusalError` for what it does not do."""


def flat(names: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> Outputs:
    """Batches (b, s, h, d) as (t, h, d)."""
    return {
        name: x.flatten(0, 1) if x.dim() == 4 else x for name, x in zip(names, tensors, strict=True)
    }


GRADIENTS = ("dq", "dk", "dv")


def differentiated(problem: Problem, forward: Callable[..., torch.Tensor]) -> Attempt:
    """Autograd's backward of `forward(q, k, v)` alone: the forward has run beforehand."""
    inputs = tuple(x.detach().requires_grad_() for x in problem.inputs)
    out = forward(*inputs)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, inputs, problem.dout, retain_graph=True)

    return Attempt(run, lambda grads: flat(GRADIENTS, grads))
