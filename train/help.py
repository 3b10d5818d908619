"""``--help``: each key with its type, default and meaning; ``--help SECTION`` or ``--help KEY``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.config import GROUPS, ConfigError
from train.keys import describe_values, nearest, schema, to_schema_key

CONFIGS = Path(__file__).parents[1] / "configs"
HEADER = """\
Trains a GQA transformer with ring attention.

  python train/pretrain.py experiment=demo                      one process
  torchrun --standalone --nproc-per-node 2 train/pretrain.py \\
    experiment=demo parallel.cp=2                               two that share each sample
  python train/pretrain.py data=text data.path=/path/to/text    your own text
  python train/pretrain.py mode=check model=125m                check the config only
  python train/pretrain.py -m optim.lr=1e-3,3e-3 train.seed=0,1 sweep: a run for each pair
  python train/pretrain.py mode=generate run.dir=runs/demo      write text with a run's model
  python train/pretrain.py mode=eval run.dir=runs/demo          its loss by position
  python train/pretrain.py mode=export run.dir=runs/demo \\
    export.dir=FOLDER                                           a folder for transformers

--help SECTION and --help KEY print a part; --cfg job prints the values that a command sets.
"""


def help_text(selected: Sequence[str], width: int) -> str:
    """The help on the ``selected`` sections and keys, or on all, in lines of ``width`` columns.

    Raises ``ConfigError`` for a section or key that does not exist.
    """
    if not selected:
        groups = (f"  {group}: {', '.join(options(group))}" for group in GROUPS)
        head = [HEADER, "Groups (group=option):", *groups, "", "Keys (key=value):"]
        return "\n".join([*head, *_lines(list(schema()), width)])
    keys: list[str] = []
    for name in (to_schema_key(text.partition("=")[0]) for text in selected):
        found = [key for key in schema() if key == name or key.startswith(f"{name}.")]
        if not found:
            best = nearest(name, schema(), cutoff=0)
            raise ConfigError(f"--help {name}: no such section or key; the nearest is {best}")
        keys += found
    return "\n".join(_lines(keys, width))


def options(group: str) -> list[str]:
    """The options of a group, for example those of ``model``."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _lines(keys: Sequence[str], width: int) -> Iterator[str]:
    for key in keys:
        entry = schema()[key]
        if entry.is_section:
            yield from ("", *_wrapped(f"{key}: {entry.meaning}", width), "")
        else:
            yield from _wrapped(f"{key} {describe_values(key)}", width, "  ", "    ")
            yield from _wrapped(entry.meaning, width, "      ", "      ")


def _wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, **whole)
