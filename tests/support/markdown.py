"""The pages of the documentation, and the blocks, commands, links and names in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "train/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of every fenced block, in their order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def commands(page: Path) -> Iterator[list[str]]:
    """Words of the lines in shell blocks, comments left out, continued lines joined."""
    for language, content in blocks(page):
        if language == "bash":
            for line in content.replace("\\\n", " ").splitlines():
                if words := shlex.split(line.partition(" <")[0], comments=True):
                    yield words


def links(page: Path) -> list[str]:
    """Targets of links and pictures that are no addresses of the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Fragments by which the headings of a page can be linked."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def code_spans(page: Path) -> list[str]:
    """What stands in backticks, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))
