"""The checks of ``mode=export``: a new or empty folder, and a model that transformers supports."""

from __future__ import annotations

from pathlib import Path

from train.config import Config, ConfigError
from train.hf.architecture import model_type


def check_export(config: Config) -> None:
    """Raise ``ConfigError`` if the run of ``config`` cannot be exported to ``export.dir``."""
    if config.export.dir is None:
        raise ConfigError("mode=export writes a folder; give it with export.dir=FOLDER")
    folder = Path(config.export.dir).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"export.dir={config.export.dir} exists; choose an empty or a new folder")
    model_type(config.model)
