"""The check of each value against the limits of its key, which the schema states."""

from __future__ import annotations

import math
from typing import Any

from train.config import Config, ConfigError
from train.keys import default, nearest, shown, to_schema_key, values
from train.recipe import recipe_of
from train.sections.key import Limits
from train.sections.renamed import RENAMED_VALUES


def check_limits(config: Config) -> None:
    """Raise ``ConfigError`` for the first value outside the limits of its key."""
    for key, value, entry in values(config):
        if value is None or isinstance(value, dict):  # the sources have keys of their own
            continue
        if new := RENAMED_VALUES.get(f"{key}={value}"):
            raise ConfigError(f"{key}={value}: its name is {new} now")
        problem = _problem(value, entry.limits)
        if problem is None:
            continue
        valid, remedy = _nearest(value, entry.limits), "nearest valid: "
        if valid is None:
            valid, remedy = default(to_schema_key(key)), "the default is "
        if key == "optim.lr":  # the schema has that of the smallest models
            valid = recipe_of(config.model.block_parameters()).lr
        raise ConfigError(f"{key}={shown(value)}{problem}; {remedy}{key}={shown(valid)}")


def _problem(value: Any, limits: Limits) -> str | None:
    """What is wrong with a value, or None."""
    if isinstance(value, list):
        if limits.length not in (None, len(value)):
            return f" must have {limits.length} entries"
        if limits.distinct and (not value or len(set(value)) < len(value)):
            return " must have entries, each of them once"
        found = ((entry, _problem(entry, limits)) for entry in value)
        return next((f": {shown(entry)}{problem}" for entry, problem in found if problem), None)
    if limits.choices:
        allowed = ", ".join(map(str, limits.choices))
        return None if value in limits.choices else f": allowed are {allowed}"
    if isinstance(value, str):
        valid = not limits.words or value in limits.words
        return None if valid else f" must be a number or {' or '.join(limits.words)}"
    if not math.isfinite(value):
        return " must be finite"
    if value < limits.at_least:
        return " is too small"
    if value > limits.at_most:
        return f" exceeds {limits.at_most}"
    if value <= limits.above:
        return f" must be above {limits.above}"
    return f" must be below {limits.below}" if value >= limits.below else None


def _nearest(value: Any, limits: Limits) -> Any:
    """The nearest value that can work; None where none is nearest."""
    if isinstance(value, list):
        best = [_nearest(entry, limits) for entry in value]
        if not best or None in best:
            return None
        if limits.length is not None:
            best = (best + best[-1:] * limits.length)[: limits.length]
        return list(dict.fromkeys(best)) if limits.distinct else best
    if limits.choices and isinstance(limits.choices[0], int):
        return min(limits.choices, key=lambda choice: abs(choice - value))
    if limits.choices or isinstance(value, str):
        allowed = limits.choices or limits.words
        return nearest(value, allowed) or allowed[0] if allowed else value
    if not math.isfinite(value) or value <= limits.above or value >= limits.below:
        return None
    return min(max(value, limits.at_least), limits.at_most)
