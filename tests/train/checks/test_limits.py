"""If this fails, a value outside its limits passes. Each value against the limits that the schema
states for its key."""

from __future__ import annotations

import math

import pytest
import yaml

from train.checks.limits import check_limits
from train.config import Config, ConfigError
from train.keys import get, schema, value_keys
from train.sections.data import SourceConfig
from train.sections.key import Limits

SOURCE = "data.sources.NAME"


def outside(limits: Limits, is_float: bool) -> list:
    """Values that break one limit each, for every limit that is given."""
    if limits.choices:
        return [max(limits.choices) + 1 if isinstance(limits.choices[0], int) else "something"]
    found = ["something"] if limits.words else []
    small = 1e-9 if is_float else 1
    if limits.at_least > -math.inf:
        found.append(limits.at_least - max(small, small * abs(limits.at_least)))
    if limits.at_most < math.inf:
        found.append(limits.at_most * (1 + 1e-9))
    found += [end for end in (limits.above, limits.below) if math.isfinite(end)]
    return [*found, math.nan, math.inf, -math.inf] if is_float else found


def broken() -> list:
    """(key, value) for every limit of every key."""
    cases = []
    for key in value_keys():
        limits, hint = schema()[key].limits, str(schema()[key].value_type)
        wrong = outside(limits, "float" in hint)
        if "list[" in hint:
            wrong = [[value] * (limits.length or 1) for value in wrong]
            if limits.length:
                wrong += [[limits.at_least] * (limits.length + 1), []]
            if limits.distinct:
                wrong += [[], [get(Config(), key)[0]] * 2]
        cases += [pytest.param(key, value, id=f"{key}={value}") for value in wrong]
    return cases


def put(config: Config, key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    setattr(get(config, section) if section else config, name, value)


@pytest.mark.parametrize(("key", "value"), broken())
def test_a_value_outside_its_limits_is_refused_with_one_that_works(key, value):
    """The error begins with key and value, and its last word is a value that passes."""
    config = Config()
    config.data.sources["NAME"] = SourceConfig(path="/")
    check_limits(config)
    put(config, key, value)
    with pytest.raises(ConfigError) as raised:
        check_limits(config)
    message = str(raised.value)
    assert message.startswith(f"{key}=")
    _, _, remedy = message.rpartition(f"{key}=")
    put(config, key, yaml.safe_load(remedy))
    check_limits(config)


def test_every_limit_is_tried():
    """The table above has cases: of each sort of limit at least the keys that are known here."""
    tried = {case.values[0] for case in broken()}
    assert {"train.steps", "optim.lr", "optim.betas", "needle.depths", "profile.steps"} <= tried
    assert {f"{SOURCE}.weight", "engine.stage", "train.eval_bytes", "model.windows"} <= tried
    assert len(tried) > 90


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("needle.tasks", ["singel"], "allowed are single, multi_key, variable; nearest valid: "
         "needle.tasks=[single]"),
        ("needle.tasks", [], "must have entries, each of them once; the default is needle.tasks="),
        ("needle.lengths", [64, 64], "each of them once; nearest valid: needle.lengths=[64]"),
        ("needle.lengths", [64, 1], "1 is too small; nearest valid: needle.lengths=[64, 2]"),
        ("needle.depths", [0.5, 1.5], "1.5 exceeds 1; nearest valid: needle.depths=[0.5, 1]"),
        ("optim.betas", [0.9], "must have 2 entries; nearest valid: optim.betas=[0.9, 0.9]"),
        ("optim.weight_decay", math.nan, "optim.weight_decay=nan must be finite; the default is"),
        ("train.eval_bytes", "atuo", "=atuo must be a number or auto; nearest valid: train.eval_"),
    ],
)  # fmt: skip
def test_messages(key, value, message):
    config = Config()
    put(config, key, value)
    with pytest.raises(ConfigError) as raised:
        check_limits(config)
    assert message in str(raised.value)
