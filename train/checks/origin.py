"""The checks of ``checkpoint.init_from=hf:FOLDER``: its model, tensors and vocabulary must fit."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError
from train.hf.architecture import (
    CONFIG,
    PREFIX,
    hf_folder,
    ignored_rope_keys,
    read_model,
    require_folder,
)
from train.hf.names import hf_name, shapes
from train.hf.stored import stored_tensors, tie_head
from train.paths import expand

TOKENIZER = "tokenizer.json"
MAY_DIFFER = ("rope", "softmax_scale")  # keys of `model` that may differ from those in the folder


def check_origin(config: Config) -> None:
    """Raise ``ConfigError`` if a run of ``config`` cannot start from its folder, if it has one."""
    folder = hf_folder(config.checkpoint.init_from)
    if folder is None:
        return
    given = f"checkpoint.init_from={config.checkpoint.init_from}"
    require_folder(folder, config.checkpoint.init_from)
    _check_model(config, read_model(folder))
    if (keys := ignored_rope_keys(folder)) and os.environ.get("RANK", "0") == "0":
        print(f"{given}: RoPE has no {', '.join(keys)}; ignored, as by transformers", flush=True)
    _check_tensors(config, folder, given)
    _check_vocabulary(config, folder, given)


def _check_model(config: Config, there: dict[str, Any]) -> None:
    here = dataclasses.asdict(config.model) | {"head_dim": config.model.resolved_head_dim()}
    for key, value in there.items():
        if key not in MAY_DIFFER and here[key] != value:
            valid = "null" if value is None else value
            raise ConfigError(
                f"model.{key}={here[key]} differs from {config.checkpoint.init_from}; nearest "
                f"valid: model.{key}={valid} (or model=inherit, which takes the model from there)"
            )


def _check_tensors(config: Config, folder: Path, given: str) -> None:
    stored, model = stored_tensors(folder), config.model
    if model.tied_embeddings:
        stored = tie_head(stored, given)
    wanted = {hf_name(name): shape for name, shape in shapes(model, model.rows(1)).items()}
    for name, shape in wanted.items():
        if name not in stored:
            raise ConfigError(f"{given} lacks the tensor {name} {list(shape)}")
        if stored[name].shape != shape:
            raise ConfigError(
                f"{given}: {name} is {list(stored[name].shape)}; {CONFIG} says {list(shape)}"
            )
    if extra := sorted(stored.keys() - wanted.keys()):
        raise ConfigError(f"{given} has the tensor {extra[0]}, which the model does not have")


def _check_vocabulary(config: Config, folder: Path, given: str) -> None:
    own, chosen = folder / TOKENIZER, config.data.tokenizer
    if chosen is None:
        raise ConfigError(
            f"{given} has a vocabulary of its own, and data.tokenizer=null trains another; nearest "
            f"valid: data.tokenizer={own}"
        )
    tokens = _vocabulary(expand("data.tokenizer", chosen))
    if own.is_file() and _vocabulary(own) != tokens:
        raise ConfigError(
            f"data.tokenizer={chosen} has other tokens than {PREFIX}{folder}; nearest valid: "
            f"data.tokenizer={own}"
        )
    rows, last = config.model.vocab_size, max(tokens.values(), default=0)
    if rows is not None and last >= rows:
        raise ConfigError(
            f"data.tokenizer={chosen} has token {last}, the embedding of {given} {rows} rows"
        )


def _vocabulary(path: Path) -> dict[str, int]:
    """The ids of the tokens in a ``tokenizer.json``."""
    try:
        content = json.loads(path.read_bytes())
        tokens = content["model"]["vocab"]
        if not isinstance(tokens, dict):  # Unigram: a list of [token, score]
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        return tokens | {added["content"]: added["id"] for added in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a tokenizer.json: {error!r}") from None
