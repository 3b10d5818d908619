"""Keys and values of earlier versions, and their names now.

The command line and files reject the old names and name the new ones. Stored settings of earlier
runs are read with both.
"""

from __future__ import annotations

import copy
from typing import Any

RENAMED = {
    "train.recompute": "memory.recompute",
    "train.loss_chunk": "memory.loss_chunk",
    "train.batch": "train.global_batch_size",
    "train.accumulation": "train.gradient_accumulation_steps",
    "data.piece_len": "data.max_doc_len",
}
RENAMED_VALUES = {"engine.shard=host": "engine.shard=hsdp", "memory=keep": "memory=none"}


def with_new_names(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy of stored ``settings``, nested dictionaries, with the names of this version."""
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
    return settings
