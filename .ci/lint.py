"""Checks what a script can of how this project writes: `python .ci/lint.py`, part of `make check`.

Lengths of pages, sentences and files, sizes of packages, docstrings, and words that are out in
pages, in texts of errors and in public names. `.ci/words.toml` holds the limits, the words and the
exceptions.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
RULES: dict[str, Any] = tomllib.loads((ROOT / ".ci" / "words.toml").read_text())
CODE_SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp"}
CPP_NAMES = r"\b(?:struct|class)\s+(\w+)|CUTE_DEVICE[^;({]*?(\w+)\("
SUFFIXES = {*CODE_SUFFIXES, ".md", ".yaml"}


class Finding(NamedTuple):
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    findings = list(packages(files))
    for name in files:
        if Path(name).suffix not in SUFFIXES:
            continue
        text = (ROOT / name).read_text()
        for number, line in enumerate(text.splitlines(), 1):
            findings += out(name, number, line, "everywhere")
        if name.endswith(".md"):
            findings += page(name, text)
        elif Path(name).suffix in CODE_SUFFIXES:
            findings += code(name, text)
    for finding in findings:
        print(finding)
    print(f"{len(files)} files, {len(findings)} findings")
    return bool(findings)


# Pages


def page(name: str, text: str) -> Iterator[Finding]:
    limits = RULES["pages"]
    lines = len(text.splitlines())
    if lines > limits["lines"].get(name, lines):
        yield Finding(name, lines, f"{lines} lines; at most {limits['lines'][name]}")
    paragraphs = list(prose(text))
    words = sum(len(p.split()) for _, p in paragraphs)
    if words > limits["words"] and name not in limits["longer"]:
        yield Finding(name, 1, f"{words} words; at most {limits['words']}")
    if name in RULES["sentences"]["skip"]:
        return
    for line, paragraph in paragraphs:
        for sentence in re.split(
            r"(?<=[.!?])\s+(?=[\"'(*_]*[A-Z0-9`])|(?<=:)\s+(?=\* )", paragraph
        ):
            count = len(sentence.split())
            if count > RULES["sentences"]["words"]:
                start = " ".join(sentence.split()[:6])
                yield Finding(name, line, f"a sentence of {count} words: {start} ...")
            yield from out(name, line, sentence, "openings")
        yield from out(name, line, paragraph, "docs")
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("|"):
            yield from out(name, number, plain(line), "docs")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items with the lines where they start: no code, table, heading or tag.
    Inline code is one word, a link its text."""
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    start, held = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        heading = re.match(r"#+ (.+)", line)
        item = re.match(r"\s*([*-]|\d+\.) ", line)
        apart = not line.strip() or heading or line.lstrip().startswith(("|", "<", "!["))
        code = re.match(r" {4,}\S", line) and not held
        if (apart or item or code) and held:
            yield start, plain(" ".join(held))
            held = []
        if not (apart or code):
            start = start if held else number
            held.append(line[item.end() :] if item else line.strip())


def plain(paragraph: str) -> str:
    paragraph = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return re.sub(r"`[^`]+`", "CODE", paragraph)


# Code


def code(name: str, text: str) -> Iterator[Finding]:
    lines = len(text.splitlines())
    if lines > RULES["files"]["lines"]:
        yield Finding(name, lines, f"{lines} lines; at most {RULES['files']['lines']}")
    if not name.endswith(".py"):
        if not name.startswith("csrc/host/"):
            for match in re.finditer(CPP_NAMES, text):
                words = (match[1] or match[2]).replace("_", " ")
                yield from out(name, text[: match.start()].count("\n") + 1, words, "names")
        return
    tree = ast.parse(text)
    if tree.body and ast.get_docstring(tree) is None:
        yield Finding(name, 1, "no docstring that says what the module is")
    if not name.startswith(("ringfa3/", "train/", "benchmarks/")):
        return
    for line, said in texts(tree):
        yield from out(name, line, said, "errors")
    for line, identifier in identifiers(tree):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", identifier).replace("_", " ")
        yield from out(name, line, words, "names")


def packages(files: list[str]) -> Iterator[Finding]:
    """Folders of code with too many modules."""
    limits = RULES["packages"]
    paths = [Path(name) for name in files if name.split("/")[0] in limits["roots"]]
    code = [p for p in paths if p.suffix in CODE_SUFFIXES and not p.name.startswith("__")]
    for folder, modules in Counter(path.parent for path in code).items():
        if modules > limits["modules"]:
            yield Finding(str(folder), 1, f"{modules} modules; at most {limits['modules']}")


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Constant texts of several words, with their lines: all but docstrings may reach a user."""
    statements = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # docstrings are among them
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in statements:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, parameters and attributes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def out(name: str, line: int, text: str, where: str) -> Iterator[Finding]:
    """The words in a text that are out there, but for allowed phrases."""
    for rule in RULES["out"]:
        if where not in rule["where"]:
            continue
        rest = text
        for phrase in rule.get("allowed", []):
            rest = re.sub(phrase, "", rest, flags=re.IGNORECASE)
        begin = r"^[\"'(*_]*" if where == "openings" else r"\b"
        flags = 0 if where == "openings" else re.IGNORECASE
        if found := re.search(rf"{begin}({rule['word']})\b", rest, flags):
            yield Finding(name, line, f"'{found[0]}': write {rule['instead']}")


if __name__ == "__main__":
    sys.exit(main())
