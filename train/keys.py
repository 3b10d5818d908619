"""The dotted keys of the config: their names, values and defaults, and the nearest to a typo."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from train.config import NAME, SOURCES, Config, SourceConfig


def schema_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections included; NAME stands for the name of a source."""
    hints = typing.get_type_hints(schema)
    keys = []
    for entry in fields(schema):
        key, field_type = prefix + entry.name, hints[entry.name]
        keys.append(key)
        if typing.get_origin(field_type) is dict:
            key, field_type = f"{key}.{NAME}", typing.get_args(field_type)[1]
            keys.append(key)
        if is_dataclass(field_type):
            keys += schema_keys(field_type, key + ".")
    return keys


def source_name(key: str) -> str:
    """The source name in a dotted key ``data.sources.<name>...``; empty for any other key."""
    prefix = f"{SOURCES}."
    return key.removeprefix(prefix).partition(".")[0] if key.startswith(prefix) else ""


def to_schema_key(key: str) -> str:
    """``key`` in the form of ``schema_keys``: NAME replaces the name of a source."""
    name = source_name(key)
    return key.replace(f"{SOURCES}.{name}", f"{SOURCES}.{NAME}", 1) if name else key


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The most similar of ``allowed``, or None if no similarity reaches ``cutoff`` (0 to 1).

    A right name in a wrong section matches; a name with transposed letters has similarity 1.
    """

    def similarity(candidate: str) -> float:
        if sorted(candidate) == sorted(name):
            return 1.0
        last, candidate_last = name.rpartition(".")[2], candidate.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        part = difflib.SequenceMatcher(None, last, candidate_last).ratio()
        return max(whole, 0.9 * part)

    best = max(allowed, key=similarity, default=None)
    return best if best is not None and similarity(best) >= cutoff else None


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def default(key: str) -> Any:
    """The default of a dotted key of ``schema_keys``."""
    config = Config()
    if source_name(key):
        config.data.sources[NAME] = SourceConfig()
    return get(config, key)


def shown(value: Any) -> Any:
    """``value`` as it is written in a config, where None is null."""
    return "null" if value is None else value


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
