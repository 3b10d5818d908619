"""The dotted keys of the config: names, values, descriptions, and the nearest to a typo."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from train.config import NAME, SOURCES, Config
from train.sections.data import SourceConfig
from train.sections.key import REQUIRED, Limits, limits_of, meanings

SOURCE = f"{SOURCES}.{NAME}"


@dataclass(frozen=True)
class SchemaKey:
    """A key of the schema; ``value_type`` is the dataclass of a section, or the type of a value."""

    value_type: Any
    limits: Limits
    meaning: str

    @property
    def is_section(self) -> bool:
        """Whether the key has keys of its own and no value."""
        return is_dataclass(self.value_type)


@functools.cache
def schema(section: type = Config, prefix: str = "") -> dict[str, SchemaKey]:
    """Every dotted key, sections included; NAME stands for the name of a source of text."""
    hints, keys = typing.get_type_hints(section), {}
    for entry in fields(section):
        key, hint = prefix + entry.name, hints[entry.name]
        is_mapping = typing.get_origin(hint) is dict
        keys[key] = SchemaKey(hint, limits_of(entry), meanings(section).get(entry.name, ""))
        if is_mapping:
            key, hint = f"{key}.{NAME}", typing.get_args(hint)[1]
        if is_dataclass(hint):
            keys[key] = SchemaKey(hint, Limits(), hint.__doc__.strip())
            keys |= schema(hint, key + ".")
    return keys


def schema_keys() -> list[str]:
    """The names of all keys of ``schema``."""
    return list(schema())


def value_keys() -> list[str]:
    """The keys that have values."""
    return [key for key, entry in schema().items() if not entry.is_section]


def values(config: Config) -> Iterator[tuple[str, Any, SchemaKey]]:
    """Each key of ``config`` with its value; those of a source have the source's name."""
    for key in value_keys():
        if key.startswith(f"{SOURCE}."):
            own = key.removeprefix(f"{SOURCE}.")
            for name, source in config.data.sources.items():
                yield f"{SOURCES}.{name}.{own}", getattr(source, own), schema()[key]
        else:
            yield key, get(config, key), schema()[key]


def source_name(key: str) -> str:
    """The source name in a dotted key ``data.sources.<name>...``; empty for any other key."""
    prefix = f"{SOURCES}."
    return key.removeprefix(prefix).partition(".")[0] if key.startswith(prefix) else ""


def to_schema_key(key: str) -> str:
    """``key`` in the form of ``schema_keys``: NAME replaces the name of a source."""
    name = source_name(key)
    return key.replace(f"{SOURCES}.{name}", SOURCE, 1) if name else key


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


def shown(value: Any) -> str:
    """``value`` as it is written in a config: null, true, [1, 2]."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def describe_values(key: str) -> str:
    """``(type with limits, default: value)``."""
    return f"({describe_type(schema()[key])}, default: {describe_default(key)})"


def describe_type(entry: SchemaKey) -> str:
    """The values that a key may have, for example ``list of int >= 1 | null``."""
    hint, limits = entry.value_type, entry.limits
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    names = []
    for option in options:
        if option is type(None):
            names.append("null")
        elif typing.get_origin(option) is list:
            amount = "" if limits.length is None else f"{limits.length} "
            (inner,) = typing.get_args(option)
            names.append(f"list of {amount}{describe_type(SchemaKey(inner, limits, ''))}")
        elif typing.get_origin(option) is dict:
            names.append("NAME: source")
        elif limits.choices:
            names.append(" | ".join(map(str, limits.choices)))
        elif option is str and limits.words:
            names.append(" | ".join(limits.words))
        else:
            names.append(option.__name__ + describe_range(limits))
    return " | ".join(names)


def describe_range(limits: Limits) -> str:
    """The bounds of a number, for example `` >= 0 and < 1``; empty without any."""
    bounds = {">=": limits.at_least, ">": limits.above, "<=": limits.at_most, "<": limits.below}
    given = [f"{sign} {bound:.3g}" for sign, bound in bounds.items() if abs(bound) != float("inf")]
    return f" {' and '.join(given)}" if given else ""


def describe_default(key: str) -> str:
    """The default of a key as it is written in a config, or why it has none."""
    value, text = default(key), schema()[key].limits.shown
    if text is not None:
        return text
    if value == REQUIRED:
        return "none"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return shown(value) if value not in ("", {}) else "empty"


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
