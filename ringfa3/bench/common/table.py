"""Results of attention on one device as tables on the terminal, and what all tables share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from ringfa3.bench.common.results import Match, Results, Row

SMOKE = "SMOKE RUN on the CPU by the executor: no figure here says anything about a kernel"
HOST_BOUND = (
    "* the host takes longer to start a call than the device to run it; these are device times"
)


def attention_tables(results: Results) -> Iterator[Table]:
    """One table for each direction and line-up."""
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in results.rows:
        together.setdefault((row.direction, *row.lineup), []).append(row)
    for (direction, first, *peers), rows in together.items():
        table = Table(
            title=f"{direction}, {rows[0].dtype}, TFLOP/s; ratio above 1: {first} is faster",
            caption=caption(results, rows),
            caption_style="bold red" if results.smoke else "dim",
        )
        for column in ("set", "mask", "tokens", "heads", "d"):
            table.add_column(column, justify="left" if column in ("set", "mask") else "right")
        table.add_column(first, justify="right", style="bold")
        for peer in peers:
            table.add_column(peer, justify="right")
            table.add_column("ratio [95% interval]", justify="right")
        block = None
        for row in rows:
            here = (row.set, row.head_dim, row.mask if row.set != "masks" else "")
            if block not in (None, here):
                table.add_section()
            block = here
            table.add_row(*_cells(row, peers))
        yield table


def caption(results: Results, rows: Sequence[Row]) -> str | None:
    bound = any(any(m.host_bound) for row in rows for m in row.matches.values())
    said = ([SMOKE] if results.smoke else []) + ([HOST_BOUND] if bound else [])
    return "\n".join(said) or None


def _cells(row: Row, peers: list[str]) -> list[str]:
    label = f"  = {row.label}" if row.beside else row.label
    cells = [row.set, row.mask, label, f"{row.heads}:{row.kv_heads}", str(row.head_dim)]
    if row.stopped:
        return [*cells, f"[red]{escape(row.stopped)}[/red]"]
    bound = "*" if row.head and row.head.host_bound[0] else ""
    cells.append(figure(row.tflops(row.first), bound))
    for peer in peers:
        cells += _match(row.matches.get(peer, Match(stopped="not measured")))
    return cells


def _match(match: Match) -> tuple[str, str]:
    if match.tflops is None:
        return "–", stopped(match)
    return figure(match.tflops[1], "*" if match.host_bound[1] else ""), ratio(match)


def ratio(match: Match) -> str:
    """The ratio with its interval: green where A is faster, yellow where B is."""
    if match.ratio is None or match.interval is None:
        return "–"
    low, high = match.interval
    colour = "green" if low > 1 else "yellow" if high < 1 else "default"
    return f"[{colour}]{match.ratio:.3f}[/{colour}] " + escape(f"[{low:.3f}, {high:.3f}]")


def stopped(match: Match | None) -> str:
    """Why there are no figures."""
    said = match.stopped or "" if match else ""
    colour = "red" if said.startswith(("wrong", "failed")) else "dim"
    return f"[{colour}]{escape(said)}[/{colour}]"


def figure(tflops: float | None, mark: str = "") -> str:
    """Three digits or more."""
    if tflops is None:
        return "–"
    return f"{tflops:.0f}{mark}" if tflops >= 100 else f"{tflops:.3g}{mark}"
