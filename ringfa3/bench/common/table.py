"""What the terminal's tables of both benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from ringfa3.bench.common.results import Comparison, Results, Row

SMOKE = "SMOKE RUN on the CPU with the PyTorch fallback: no figure here is that of a kernel"
HOST_BOUND = (
    "* the host takes longer to start a call than the device to run it; these are device times"
)


def caption(results: Results, rows: Sequence[Row]) -> str | None:
    bound = any(any(c.host_bound) for row in rows for c in row.comparisons.values())
    lines = ([SMOKE] if results.smoke else []) + ([HOST_BOUND] if bound else [])
    return "\n".join(lines) or None


def ratio(comparison: Comparison) -> str:
    """The ratio with its interval: green where A is faster, yellow where B is."""
    if comparison.ratio is None or comparison.interval is None:
        return "–"
    low, high = comparison.interval
    colour = "green" if low > 1 else "yellow" if high < 1 else "default"
    return f"[{colour}]{comparison.ratio:.3f}[/{colour}] " + escape(f"[{low:.3f}, {high:.3f}]")


def stopped(comparison: Comparison | None) -> str:
    """Why there are no figures."""
    reason = comparison.stopped or "" if comparison else ""
    colour = "red" if reason.startswith(("wrong", "failed")) else "dim"
    return f"[{colour}]{escape(reason)}[/{colour}]"


def figure(tflops: float | None, mark: str = "") -> str:
    """At least three digits."""
    if tflops is None:
        return "–"
    return f"{tflops:.0f}{mark}" if tflops >= 100 else f"{tflops:.3g}{mark}"
