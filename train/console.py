"""The console: on a terminal, lines break at spaces; in a file they do not break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console


class LineConsole(Console):
    """A rich console that prints text as it is given: no markup, no highlighting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; a long line of text breaks at spaces on a terminal, and elsewhere never.

        A terminal itself would break it inside of words.
        """
        if all(isinstance(item, str) for item in objects):
            options.setdefault("soft_wrap", not self.is_terminal)
        super().print(*objects, **options)


def in_lines(parts: Sequence[str], width: int) -> list[str]:
    """``parts`` next to each other, in as few lines of ``width`` columns; none is broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines
