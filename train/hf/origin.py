"""Settings of the folder that a run started from, stored for the folder that it is exported to."""

from __future__ import annotations

import shutil
from pathlib import Path

from train.hf.architecture import CONFIG
from train.paths import require_removal

# The files of settings. tokenizer.json is not among them: the run stores its own.
FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def keep_origin(origin: Path | None, kept: Path) -> None:
    """Copy the settings in ``origin``, if any, to the folder ``kept``, which is cleared first."""
    require_removal(kept)
    found = [origin / name for name in FILES if (origin / name).is_file()] if origin else []
    if found:
        kept.mkdir()
    for path in found:
        shutil.copyfile(path, kept / path.name)
