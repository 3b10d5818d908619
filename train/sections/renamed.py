"""Settings of earlier versions: their names now, and what a missing key meant.

The command line and files reject the old names and name the new ones. Stored settings of earlier
runs are read with both.
"""

from __future__ import annotations

import copy
from typing import Any

from train.sections.data import NO_EOS

RENAMED = {
    "train.recompute": "memory.recompute",
    "train.loss_chunk": "memory.loss_chunk",
    "train.batch": "train.global_batch_size",
    "train.accumulation": "train.gradient_accumulation_steps",
    "data.piece_len": "data.max_doc_len",
}
RENAMED_VALUES = {"engine.shard=host": "engine.shard=hsdp", "memory=keep": "memory=none"}


def is_of_0_1(settings: dict[str, Any]) -> bool:
    """Whether stored ``settings``, nested dictionaries, are those of RingFA3 0.1 or before."""
    return "eos_token" not in settings["data"]


def of_this_version(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy of stored ``settings``, nested dictionaries, with the names of this version.

    Keys that earlier versions lacked get the values by which those versions acted: blocks were not
    compiled, documents had no EOS, fsdp2 reduced once per step, and a RoPE factor was Llama 3's.
    """
    settings = copy.deepcopy(settings)
    for old, new in RENAMED.items():
        (section, key), (new_section, new_key) = old.split("."), new.split(".")
        if key in settings.get(section, {}):
            settings.setdefault(new_section, {})[new_key] = settings[section].pop(key)
    for old, new in RENAMED_VALUES.items():
        (key, _, value), name = old.partition("="), new.partition("=")[2]
        section, _, key = key.partition(".")
        if settings.get(section, {}).get(key) == value:
            settings[section][key] = name
    missing: dict[str, dict[str, Any]] = {
        "train": {"compile": "none"},
        "data": {"eos_token": NO_EOS},
    }
    if settings.get("engine", {}).get("name") == "fsdp2":
        missing["engine"] = {"reduce": "step"}
    rope = settings.get("model", {}).get("rope")
    if isinstance(rope, dict) and rope.get("factor", 1.0) != 1.0:
        rope.setdefault("type", "llama3")
    return settings | {n: missing[n] | settings[n] for n in missing if n in settings}
