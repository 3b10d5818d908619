"""The checks of ``mode=export``: a new or empty folder, and a model that transformers supports."""

from __future__ import annotations

from train.config import Config, ConfigError
from train.hf.architecture import model_type
from train.paths import expand


def check_export(config: Config) -> None:
    """Raise ``ConfigError`` if the run of ``config`` cannot be exported to ``export.dir``."""
    if config.export.dir is None:
        raise ConfigError("mode=export writes a folder; give it with export.dir=FOLDER")
    folder = expand("export.dir", config.export.dir).resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"export.dir={config.export.dir} exists; choose an empty or a new folder")
    if folder.is_mount():  # the finished folder gets this name by a rename
        raise ConfigError(
            f"export.dir={config.export.dir} is a mount, which no folder can replace; give a new "
            f"folder in it: export.dir={folder / 'NAME'}"
        )
    model_type(config.model)
