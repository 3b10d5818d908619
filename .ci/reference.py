"""Writes what the schema in `train/sections/` says about each key: `python .ci/reference.py`.

To `docs/reference.md`, and to the comments above the keys in `configs/`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from train.config import GROUPS  # noqa: E402
from train.help import options  # noqa: E402
from train.keys import (  # noqa: E402
    SchemaKey,
    describe_default,
    describe_type,
    describe_values,
    schema,
    value_keys,
)

# The files of `configs/` that explain the keys of a section; the other files of a group refer to
# them.
EXPLAINING = {
    "config.yaml": "",
    "model/tiny.yaml": "model.",
    "data/stdlib.yaml": "data.",
    "optim/adamw.yaml": "optim.",
    "engine/ddp.yaml": "engine.",
    "engine/fsdp2.yaml": "engine.",
    "engine/deepspeed.yaml": "engine.",
    "memory/none.yaml": "memory.",
    "hardware/h200.yaml": "hardware.",
}
WIDTH = 100


def main() -> None:
    """Rewrite all files."""
    (ROOT / "docs" / "reference.md").write_text(page())
    for name, prefix in EXPLAINING.items():
        file = ROOT / "configs" / name
        file.write_text(commented(file.read_text(), prefix))


def commented(text: str, prefix: str) -> str:
    """A file of settings, ``text``, with a comment above each key.

    ``prefix`` is the section of its keys, with a dot at its end. The comment of a key begins with
    a parenthesis; comments before it stay.
    """
    lines: list[str] = []
    above: list[str] = []  # comments since the last line that is none
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line)
            continue
        if match := re.match(r"( *)(\w+):", line):
            parents = [parent for parent in parents if parent[0] < len(match[1])]
            parents.append((len(match[1]), match[2]))
            key = prefix + ".".join(name for _, name in parents)
            if key in value_keys():
                starts = [n for n, old in enumerate(above) if old.lstrip().startswith("# (")]
                above = above[: starts[0] if starts else None] + comment(key, match[1])
        lines += [*above, line]
        above = []
    return "\n".join(lines) + "\n"


def comment(key: str, indent: str) -> list[str]:
    """The lines of a comment on a key."""
    text = f"{describe_values(key)}: {schema()[key].meaning}"
    return [f"{indent}# {line}" for line in wrapped(text, "", WIDTH - len(indent) - 2)]


def wrapped(text: str, indent: str, width: int = WIDTH) -> list[str]:
    """The lines of a text; ``indent`` precedes all but the first."""
    hyphens = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=indent, **hyphens)


def page() -> str:
    """The reference of all keys."""
    lines = [
        "# Settings",
        "",
        "<!-- python .ci/reference.py writes this page from train/sections/. -->",
        "",
        "`key=value` sets a key, `group=option` a group: the options of a group are files in",
        "`configs/`, and may set other values than the defaults here. "
        "`python train/pretrain.py --help data`",
        "prints the same for a section.",
        "",
        *(f"* `{group}=`: {', '.join(f'`{name}`' for name in options(group))}" for group in GROUPS),
        "",
        "## mode",
        "",
    ]
    for key, entry in schema().items():
        if entry.is_section:
            lines += ["", f"## {key}", "", *wrapped(entry.meaning.replace("``", "`"), "")]
            lines += [""]
        else:
            default = f"default: `{describe_default(key)}`"
            text = f"* `{key}` (`{describe_type(entry)}`, {default}): {markdown(entry)}"
            lines += wrapped(text, "  ")
    return "\n".join(lines) + "\n"


def markdown(entry: SchemaKey) -> str:
    """A meaning with its special characters escaped, and values as code that begin a sentence."""
    words = {"null", "true", "false", *map(str, entry.limits.choices), *entry.limits.words}
    escaped = re.sub(r"([*<|\[\]])", r"\\\1", entry.meaning)
    return re.sub(
        r"(^|\. )([\w-]+)", lambda m: f"{m[1]}`{m[2]}`" if m[2] in words else m[0], escaped
    )


if __name__ == "__main__":
    main()
