"""What a field of the schema has besides its type and default: limits, and a meaning."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
from dataclasses import Field, dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, its value and what to do.

    ``found_by_all`` is true if every process of the host raises the error: one of them prints it.
    """

    found_by_all = True


REQUIRED = "???"  # as a default: no value yet; OmegaConf's MISSING
BY_SIZE = "by the size of the model"  # as ``Limits.shown``


@dataclass(frozen=True)
class Limits:
    """The values of a key that can work; for a list, those of its entries.

    ``words`` may stand where a number is expected. A list has exactly ``length`` entries, and is
    neither empty nor repeats one if ``distinct``. ``shown`` replaces the default in documentation.
    """

    choices: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    length: int | None = None
    distinct: bool = False
    shown: str | None = None


def key(default: Any, **limits: Any) -> Any:
    """A field with a default and ``Limits``."""
    metadata = {"limits": Limits(**limits)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def limits_of(entry: Field[Any]) -> Limits:
    """The limits of a field."""
    return entry.metadata.get("limits", Limits())


@functools.cache
def meanings(schema: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, by the name of the field."""
    (tree,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        entry.target.id: " ".join(below.value.value.split())
        for entry, below in itertools.pairwise(tree.body)
        if isinstance(entry, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
