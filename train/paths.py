"""Paths: ``~`` in settings, folders that are written to, removal; errors name the remedy."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from train.config import ConfigError


def expand(key: str, value: str) -> Path:
    """The path ``value`` of ``key``, with the home directory instead of ``~``.

    Raises ``ConfigError`` if there is no home directory.
    """
    try:
        return Path(value).expanduser()
    except RuntimeError:  # HOME is not set, and the system has no entry for the user
        raise ConfigError(
            f"{key}={value}: ~ has no home directory (HOME is not set); give {key} a path without ~"
        ) from None


def make_folder(key: str, path: Path) -> None:
    """Create the folder of ``key``, with its parents; ``ConfigError`` if it takes no file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(key, path, "made", error) from None
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise unusable(key, path, "written to", error) from None


def unusable(key: str, path: Path, use: str, error: Exception) -> ConfigError:
    """The error that the folder ``path`` of ``key`` cannot be ``use``, a participle."""
    why = getattr(error, "strerror", None) or error
    return ConfigError(f"{key}: the folder {path} cannot be {use} ({why}); choose another")


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link without its target; ``OSError`` if that
    fails. A path that does not exist is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_removal(path: Path) -> None:
    """``remove``, with a ``ConfigError`` if that fails."""
    try:
        remove(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be removed ({error.strerror}: {error.filename or path}); remove it, or "
            f"choose another folder"
        ) from None


def discard(path: Path) -> None:
    """Remove as much of it as can be removed; nothing reads it, so what stays only costs space."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
