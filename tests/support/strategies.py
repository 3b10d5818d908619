"""Hypothesis strategies: small, awkward documents, windows, layouts and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from ringfa3.planning.context_plan import ContextPlan, plan_context
from tests.support.dense import band, cumulative

lengths = st.lists(
    st.one_of(st.sampled_from([0, 1, 2, 16, 17]), st.integers(0, 120)), min_size=0, max_size=6
)
windows = st.tuples(st.sampled_from([-1, 0, 1, 3, 20]), st.sampled_from([-1, 0, 2, 30]))
layouts = st.sampled_from(["zigzag", "contiguous"])
tiles = st.sampled_from([4, 8, 12, 16])


@dataclass(frozen=True)
class Case:
    """A call: document lengths, CP group, layout and mask."""

    lengths: list[int]
    world: int
    layout: str
    causal: bool
    window: tuple[int, int]

    @property
    def band(self) -> tuple[int, int]:
        return band(self.causal, self.window)

    def plan(self, rank: int) -> ContextPlan:
        place = (rank, self.world)
        return plan_context(cumulative(self.lengths), place, self.layout, self.causal, self.window)

    def plans(self) -> list[ContextPlan]:
        return [self.plan(r) for r in range(self.world)]


cases = st.builds(Case, lengths, st.integers(1, 5), layouts, st.booleans(), windows)


def key_tokens(plans: list[ContextPlan], rank: int, hop: int) -> np.ndarray:
    """The global token of each K/V row of a block, up to the last that `rank` sees at `hop`."""
    owner = plans[(rank - hop) % len(plans)]
    tokens = owner.token_index.numpy()
    if hop == 0:
        return tokens
    return tokens[owner.kv_exchange.published][: owner.kv_exchange.visible[owner.rank, hop, 1]]
