"""What a run keeps of the folder that it started from, for the folder that it is exported to."""

from __future__ import annotations

import shutil
from pathlib import Path

from train.hf.architecture import CONFIG

# Settings beside the weights. The tokenizer itself is the run's.
FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def keep_origin(origin: Path | None, kept: Path) -> None:
    """Copy the settings in ``origin``, if any, to the folder ``kept``, which it clears."""
    shutil.rmtree(kept, ignore_errors=True)
    found = [origin / name for name in FILES if (origin / name).is_file()] if origin else []
    if found:
        kept.mkdir()
    for path in found:
        shutil.copyfile(path, kept / path.name)
