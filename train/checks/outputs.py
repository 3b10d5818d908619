"""The checks of ``log``, ``profile`` and ``export``."""

from __future__ import annotations

from train.config import Config, ConfigError
from train.extras import installed, remedy
from train.hf.architecture import model_type
from train.paths import expand


def check_log(config: Config) -> None:
    """Raise ``ConfigError`` if ``log`` needs a package that is not installed."""
    if config.log.wandb and not installed("wandb"):
        raise ConfigError(
            "log.wandb=true: the package wandb is not installed; "
            f"{remedy('wandb')} (or log.wandb=false)"
        )


def check_profile(config: Config, world: int) -> None:
    """Raise ``ConfigError`` for steps or ranks of ``profile`` that ``world`` processes lack."""
    profile, steps = config.profile, config.train.steps
    if profile.steps is None:
        if profile.memory:
            raise ConfigError(
                "profile.memory=true needs profile.steps, the steps whose allocations it keeps; "
                "for example profile.steps=[3,5]"
            )
        return
    wanted = profile.steps
    if not wanted[0] <= wanted[1] <= steps:
        last = min(5, steps)
        raise ConfigError(
            f"profile.steps={wanted} must be the first and the last step, from 1 to "
            f"train.steps={steps}; for example profile.steps=[{min(3, last)},{last}]"
        )
    if max(profile.ranks) >= world:
        raise ConfigError(
            f"profile.ranks={profile.ranks} must be ranks from 0 to {world - 1}; nearest valid: "
            f"profile.ranks=[{world - 1}]"
        )


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
