"""The plots of attention on one GPU: one for each set."""

from __future__ import annotations

from collections.abc import Iterator

from ringfa3.bench.common.cases import short
from ringfa3.bench.common.plot import COLOURS, Grid, Panel, Series, heads_label
from ringfa3.bench.common.results import Row


def attention_figures(rows: list[Row]) -> Iterator[tuple[str, Grid]]:
    for name in dict.fromkeys(row.set for row in rows):
        here = [row for row in rows if row.set == name and not row.untimed]
        if not here:
            continue
        yield name, masks_grid(here) if name == "masks" else shapes_grid(here)


def shapes_grid(rows: list[Row]) -> Grid:
    """A line for each mask, a column for each head dim; masks across for a single head dim."""
    masks = list(dict.fromkeys(row.mask for row in rows))
    dims = list(dict.fromkeys(row.head_dim for row in rows))
    grid = [[_panel(rows, mask, d) for d in dims] for mask in masks]
    return [[line[0] for line in grid]] if len(dims) == 1 else grid


def _panel(rows: list[Row], mask: str, d: int) -> Panel:
    here = [row for row in rows if row.mask == mask and row.head_dim == d]
    heads = {heads_label(row) for row in here}
    groups = [short(row.lengths[0]) for row in here if row.lengths]
    if len(set(groups)) < len(here) or any(row.keys for row in here):
        groups = [row.label for row in here]
        if here and here[0].scores:
            groups = [x.replace(" ", "\n").replace("sigma\n", "σ ") for x in groups]
    return Panel(
        ", ".join([mask, f"head dim {d}", *(heads if len(heads) == 1 else ())]),
        groups,
        [
            Series(name, name, colour, "", list(here))
            for name, colour in zip(rows[0].implementations, COLOURS, strict=False)
        ],
        "scores" if here and here[0].scores else "sequence length",
    )


def masks_grid(rows: list[Row]) -> Grid:
    """A group for each mask: all implementations on it, then on its causal sequence."""
    masked: list[Row | None] = [row for row in rows if row.equal_flops_of is None]
    causal = {row.equal_flops_of: row for row in rows}
    equal_flops = [causal.get(row.label) for row in masked if row]
    named = list(zip(rows[0].implementations, COLOURS, strict=False))
    series = [
        *(Series(name, name, colour, "", masked) for name, colour in named),
        *(
            Series(name, f"{name}, causal of equal FLOPs", colour, "///", equal_flops)
            for name, colour in named
        ),
    ]
    shown = [s for s in series if any(row and row.tflops(s.name) for row in s.rows)]
    first = next(row for row in masked if row)
    tokens = short(sum(first.lengths))
    title = f"{tokens} tokens, head dim {first.head_dim}, {heads_label(first)}"
    groups = [row.label.replace(" of ", "\nof ") for row in masked if row]
    return [[Panel(title, groups, shown, "mask")]]
