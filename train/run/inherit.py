"""``model=inherit``: the model of ``checkpoint.init_from`` or of the path ``checkpoint.resume``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError, ModelConfig, fill_model, from_plain, resolve
from train.data.manifest import DamagedError, read_manifest
from train.hf.architecture import CONFIG, hf_folder, read_model, require_folder
from train.paths import expand
from train.run.run_folder import read_config
from train.sections.model import RopeConfig


def resolve_inherited(composed: Any) -> Config:
    """``resolve``, after ``fill_model`` has filled the keys of ``model`` that have no value.

    Raises ``ConfigError`` if ``checkpoint`` names none, or one that cannot be read.
    """
    init_from, resume = composed.checkpoint.init_from, composed.checkpoint.resume
    if init_from is None and resume not in ("auto", "never"):
        fill_model(composed, lambda: inherited_model(resume, "checkpoint.resume"))
    else:
        fill_model(composed, lambda: inherited_model(init_from))
    return resolve(composed)


def inherited_model(origin: str | None, key: str = "checkpoint.init_from") -> ModelConfig:
    """The model of ``origin``, the value of ``key``."""
    if origin is None:
        raise ConfigError(
            "model=inherit takes the model from checkpoint.init_from, which is null; give it an "
            "hf:FOLDER or a run (or checkpoint.resume=PATH), or choose another model"
        )
    folder = hf_folder(origin)
    if folder is not None:
        require_folder(folder, origin)
        there = read_model(folder)
        return ModelConfig(**{**there, "rope": RopeConfig(**there["rope"])})
    path = expand(key, origin)
    if (path / CONFIG).is_file():
        if _is_of_transformers(path / CONFIG):
            raise ConfigError(
                f"{key}={origin} is a folder of Hugging Face's; nearest valid: "
                f"checkpoint.init_from=hf:{origin}"
            )
        return read_config(path / CONFIG).model
    try:
        return from_plain(read_manifest(path).metadata["settings"]).model
    except (DamagedError, KeyError, ConfigError) as error:
        raise ConfigError(
            f"{key}={origin} is no hf:FOLDER, no run and no checkpoint: {error}"
        ) from None


def _is_of_transformers(path: Path) -> bool:
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(values, dict) and "model_type" in values
