"""Packages that the trainer imports beyond those of ringfa3, and the extras that bring them."""

from __future__ import annotations

import importlib.util

# The imports of the extra ``train``; ``hydra`` is the package hydra-core.
TRAIN = (
    *("hydra", "omegaconf", "tokenizers", "rich", "tensorboard", "filelock", "safetensors"),
    "jinja2",
)


def installed(package: str) -> bool:
    """Whether ``package`` can be imported.

    A folder with that name does not count: W&B leaves a folder wandb/ in the working directory.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def remedy(extra: str) -> str:
    """The command that installs an extra. The trainer is part of the checkout, not of a wheel."""
    return f"pip install -e '.[{extra}]'"


def missing_packages() -> str | None:
    """A line that names the packages of the extra ``train`` that are missing, and the remedy."""
    missing = ", ".join(package for package in TRAIN if not installed(package))
    if not missing:
        return None
    return f"training needs packages that are not installed ({missing}): {remedy('train')}"
