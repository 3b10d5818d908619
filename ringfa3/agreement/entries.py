"""Entries of an agreement: what each rank writes, and what all ranks conclude from them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ringfa3.errors import first_line

ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class Settings(dict[str, str]):
    """What must be equal on all ranks of a call: arguments' names and values. Never changed."""

    @cached_property
    def key(self) -> str:
        return json.dumps(self, sort_keys=True)

    @cached_property
    def digest(self) -> int:
        return zlib.crc32(self.key.encode())


class AgreementSnapshot(NamedTuple):
    """What ranks agreed on for a call; calls like it begin without a new agreement.

    settings       of that call
    cache_version  of the group's `Agreements` then
    """

    settings: Settings
    cache_version: int


def described(error: Exception | None) -> list[str] | None:
    """(key of `ERRORS`, text) of a rank's error, as a list; None for no error."""
    if error is None:
        return None
    name = type(error).__name__
    if name in ERRORS:
        return [name, str(error)]
    builtin = "TypeError" if isinstance(error, TypeError) else "ValueError"
    return [builtin, f"{name}: {first_line(error)}"]


def check_entries(ranks: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises the first error of an entry, or ValueError for the first setting that differs."""
    _raise_on_error(ranks, entries)
    _raise_on_difference(ranks, entries)


def _raise_on_error(ranks: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises the error of the first of `ranks` whose entry has one, under that rank's number."""
    wrong = [(r, e["error"]) for r, e in zip(ranks, entries, strict=True) if e["error"]]
    if wrong:
        rank, (name, text) = wrong[0]
        others = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
        raise ERRORS[name](f"rank {rank}: {text}{others}")


def _raise_on_difference(ranks: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for the first setting that differs over `ranks`, with all its values.

    Settings that only some ranks have come last.
    """
    maps: list[Mapping[str, object]] = [entry["settings"] for entry in entries]
    everywhere = [name for name in maps[0] if all(name in m for m in maps)]
    for name in [*everywhere, *sorted(set().union(*maps) - set(everywhere))]:
        values: dict[str, list[int]] = {}
        for rank, settings in zip(ranks, maps, strict=True):
            values.setdefault(str(settings.get(name, "missing")), []).append(rank)
        if len(values) > 1:
            groups = sorted(values.items(), key=lambda item: len(item[1]))
            text = "; ".join(f"rank {listed(ranks)}: {value}" for value, ranks in groups)
            raise ValueError(f"{name} differs between the ranks of the CP group: {text}")


def listed(ranks: Sequence[int]) -> str:
    """Numbers of ranks, for a message."""
    return ", ".join(map(str, ranks))
