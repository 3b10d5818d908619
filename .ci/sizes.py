"""Prints how large the tree is: `python .ci/sizes.py [COMMIT]`, or `make sizes`.

A row for each room: lines of code as the formatters leave them, or words of the pages. Its columns
are COMMIT (`SINCE` if the clone has it), the working tree, and the aim.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SINCE = "155589a"
CODE = (".py", ".cu", ".cuh", ".h", ".cpp", ".sh")
# A room: beginnings of its paths, and the aim. A file counts in the room with the longest
# beginning. An aim is no reason to drop a check, a comment or a test.
ROOMS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "ringfa3/ but bench, csrc/": (("ringfa3/", "csrc/"), 20_300),
    "ringfa3/bench/": (("ringfa3/bench/",), 5_500),
    "train/": (("train/",), 10_500),
    "tests/": (("tests/",), 36_000),
    "benchmarks/": (("benchmarks/",), None),
    "examples/, .ci/": (("examples/", ".ci/"), None),
    "docs/ (words)": (("docs/",), None),
}


def tree() -> Iterator[tuple[str, str]]:
    """Paths and texts of the working tree."""
    for name in git("ls-files", "-co", "--exclude-standard").decode().splitlines():
        if name.endswith((*CODE, ".md")) and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text()


def commit(name: str) -> Iterator[tuple[str, str]]:
    """Paths and texts of a commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", name))) as archive:
        for member in archive:
            if member.name.endswith((*CODE, ".md")) and (file := archive.extractfile(member)):
                yield member.name, file.read().decode()


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=-1, check=True).stdout


def sizes(files: Iterator[tuple[str, str]]) -> dict[str, int]:
    """Lines of code of each room; the words of docs/."""
    beginnings = {path: room for room, (paths, _) in ROOMS.items() for path in paths}
    found = dict.fromkeys(ROOMS, 0)
    for name, text in files:
        path = max(filter(name.startswith, beginnings), key=len, default=None)
        if path == "docs/" and name.endswith(".md"):
            found[beginnings[path]] += len(text.split())
        elif path not in (None, "docs/") and name.endswith(CODE):
            found[beginnings[path]] += len(text.splitlines())
    return found


def table(columns: dict[str, dict[str, int]]) -> str:
    lines = [f"{'room':26}" + "".join(f"{name:>12}" for name in (*columns, "aim"))]
    for room, (_, aim) in ROOMS.items():
        values = *(counts[room] for counts in columns.values()), aim
        cells = ("" if value is None else f"{value:,}" for value in values)
        lines.append(f"{room:26}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", metavar="COMMIT", help=f"default: {SINCE}, if known")
    asked = parser.parse_args(arguments).commit
    name = asked or SINCE
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    if asked and known.returncode:
        parser.error(f"this clone has no commit {asked}")
    columns = {} if known.returncode else {name: sizes(commit(name))}
    print(table({**columns, "now": sizes(tree())}))


if __name__ == "__main__":
    main()
