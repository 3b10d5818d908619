"""Random masks with their dense form, made cell by cell with numpy."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ringfa3.masks.mask import Mask
from ringfa3.planning.context_plan import ContextPlan, plan_context


class Endless:
    """Items without an end, as FlexAttention's BlockMask has them: whoever iterates fails."""

    def __getitem__(self, index: int) -> int:
        assert index < 9, "read on and on"
        return index


Dense = npt.NDArray[np.bool_]
Span = tuple[int, int, int, int, int, int]


def dense_span(span: Span, q_tokens: int, k_tokens: int) -> Dense:
    """(q_tokens, k_tokens) bool, from the definition of a span."""
    q0, q1, k0, k1, lo, hi = span
    r, c = np.arange(q_tokens)[:, None], np.arange(k_tokens)[None]
    inside = (q0 <= r) & (r < q1) & (k0 <= c) & (c < k1)
    return inside & (lo <= (c - k0) - (r - q0)) & ((c - k0) - (r - q0) <= hi)


@dataclass(frozen=True)
class Union:
    """Spans joined, intersected and removed one after the other."""

    q_tokens: int
    k_tokens: int
    steps: list[tuple[str, Span]]

    def dense(self) -> Dense:
        allowed = np.zeros((self.q_tokens, self.k_tokens), bool)
        for operation, span in self.steps:
            cells = dense_span(span, self.q_tokens, self.k_tokens)
            allowed = allowed & cells if operation == "&" else allowed | cells
        return allowed

    def mask(self) -> Mask:
        mask = Mask([], self.q_tokens, self.k_tokens)
        for operation, span in self.steps:
            other = Mask([span], self.q_tokens, self.k_tokens)
            mask = mask & other if operation == "&" else mask | other
        return mask


@st.composite
def spans(draw: st.DrawFn, q_tokens: int, k_tokens: int) -> Span:
    q0, q1 = sorted((draw(st.integers(0, q_tokens)), draw(st.integers(0, q_tokens))))
    k0, k1 = sorted((draw(st.integers(0, k_tokens)), draw(st.integers(0, k_tokens))))
    diagonals = st.one_of(st.just(-q_tokens), st.just(k_tokens), st.integers(-q_tokens, k_tokens))
    lo, hi = sorted((draw(diagonals), draw(diagonals)))
    return q0, q1, k0, k1, lo, hi


@st.composite
def unions(draw: st.DrawFn, most: int = 60, cross: bool = True) -> Union:
    """Up to 6 spans of up to `most` tokens; sometimes keys are other tokens."""
    q_tokens = draw(st.integers(0, most))
    k_tokens = draw(st.integers(0, most)) if cross and draw(st.booleans()) else q_tokens
    operations = st.sampled_from("|||&")
    steps = st.tuples(operations, spans(q_tokens, k_tokens))
    return Union(q_tokens, k_tokens, draw(st.lists(steps, max_size=6)))


def random_union(rng: random.Random, most: int, cross: bool) -> Union:
    """As `unions`, for ranks, which draw the same from generators of one seed."""
    q_tokens = rng.randint(0, most)
    k_tokens = rng.randint(0, most) if cross else q_tokens
    steps = []
    for _ in range(rng.randint(0, 6)):
        rows = sorted(rng.choices(range(q_tokens + 1), k=2))
        columns = sorted(rng.choices(range(k_tokens + 1), k=2))
        ends = (-q_tokens, k_tokens)
        band = sorted(rng.choice([*ends, rng.randint(*ends)]) for _ in ends)
        steps.append((rng.choice("|||&"), (*rows, *columns, *band)))
    return Union(q_tokens, k_tokens, steps)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MaskCase:
    """As `strategies.Case`: the plans of a mask on all ranks."""

    union: Union
    world: int

    def plans(self) -> list[ContextPlan]:
        mask = self.union.mask()
        return [plan_context(mask, (rank, self.world)) for rank in range(self.world)]


mask_cases = st.builds(MaskCase, unions(40), st.integers(1, 4))
