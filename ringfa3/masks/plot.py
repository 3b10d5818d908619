"""A picture of a mask: keys to the right, queries downwards. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringfa3.masks.spans import Ints, intersect, rectangles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(spans: Ints, q_tokens: int, k_tokens: int, plan: Any = None) -> Figure:
    """The spans as polygons, in one colour or in that of the rank which holds the queries.

    Raises ValueError: it is no plan of so many queries.
    """
    if plan is not None and getattr(plan, "total_tokens", None) != q_tokens:
        raise ValueError(
            f"plan={plan!r} is no plan of the mask's {q_tokens} tokens: give plan_context(mask)"
        )
    import matplotlib as mpl
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(3.2, 3.2 if plan is None else 3.6), layout="constrained")
    axes = figure.add_subplot()
    colours = [mpl.colormaps["tab10"](i) for i in range(10)]
    for rank in range(1 if plan is None else plan.world):
        mine = spans if plan is None else intersect(spans, _rows(plan.index_of(rank), k_tokens))
        colour = colours[rank % len(colours)]
        axes.add_collection(PolyCollection(polygons(mine), facecolor=colour, edgecolor="none"))
    axes.set(xlim=(0, max(k_tokens, 1)), ylim=(max(q_tokens, 1), 0), xlabel="keys")
    axes.set(ylabel="queries", aspect="equal" if q_tokens == k_tokens else "auto")
    axes.tick_params(labelsize=7)
    if plan is not None:
        shown = [Patch(color=colours[r % len(colours)], label=f"{r}") for r in range(plan.world)]
        figure.legend(handles=shown, title="rank", loc="outside upper center", ncols=8, fontsize=7)
    return figure


def _rows(tokens: Ints, k_tokens: int) -> Ints:
    """The rows of a rank as spans over all keys."""
    starts = np.flatnonzero(np.diff(tokens, prepend=-2) != 1)
    begin = tokens[starts]
    size = np.diff(np.concatenate((starts, [len(tokens)])))
    return rectangles(begin, begin + size, np.zeros_like(begin), np.full_like(begin, k_tokens))


def polygons(spans: Ints) -> list[list[tuple[int, int]]]:
    """(column, row) corners of each span, a cell being a unit square; steps become straight."""
    shapes = []
    for q0, q1, k0, k1, lo, hi in spans.tolist():
        # The band's edges leave the rectangle where column = row + lo and column = row + hi + 1.
        right = [(min(k1, max(k0, q0 + hi + 1)), q0)]
        right += [(k0, k0 - hi - 1)] if q0 < k0 - hi - 1 < q1 else []
        right += [(k1, k1 - hi - 1)] if q0 < k1 - hi - 1 < q1 else []
        right += [(min(k1, max(k0, q1 + hi)), q1)]
        left = [(min(k1, max(k0, q1 - 1 + lo)), q1)]
        left += [(k1, k1 - lo)] if q0 < k1 - lo < q1 else []
        left += [(k0, k0 - lo)] if q0 < k0 - lo < q1 else []
        left += [(min(k1, max(k0, q0 + lo)), q0)]
        shapes.append(right + left)
    return shapes
