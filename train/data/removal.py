"""Removal of files and folders, where what is left behind would enter a run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from train.config import ConfigError


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
