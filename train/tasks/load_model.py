"""Loads a trained model and its tokenizer from a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from train.config import Config, ConfigError
from train.data.tokenizer import load_tokenizer, vocabulary_size
from train.engine.parallel import ParallelLayout, from_rank_0
from train.engine.stored_checkpoint import find_checkpoint
from train.engine.train_state import load_weights
from train.model.transformer import LanguageModel, build_model
from train.paths import expand
from train.run.run_folder import RunFolder


@dataclass(frozen=True)
class LoadedModel:
    """The model with the weights of ``checkpoint``, and the tokenizer of its run."""

    model: LanguageModel
    tokenizer: Tokenizer
    checkpoint: Path


def read_tokenizer(folder: RunFolder) -> Tokenizer:
    """The tokenizer of the run in ``folder``."""
    if not folder.tokenizer.exists():
        raise ConfigError(f"run.dir={folder.path} holds no tokenizer.json; choose another run")
    return load_tokenizer(folder.tokenizer)


def load_model(
    config: Config,
    folder: RunFolder,
    parallel: ParallelLayout,
    checkpoint: str | None,
    log: Callable[[str], None],
) -> LoadedModel:
    """The model of ``config`` with verified weights, on every rank.

    ``checkpoint`` is the folder of a checkpoint or of a run; None means the run in ``folder``.
    """
    tokenizer = read_tokenizer(folder)
    n_tokens, device = vocabulary_size(tokenizer), parallel.device
    model = build_model(config, n_tokens, device, parallel.cp_group, draw=False)
    key = f"{config.mode}.checkpoint"
    given = folder.path if checkpoint is None else expand(key, checkpoint)
    path = from_rank_0(parallel, lambda: find_checkpoint(given, log))
    load_weights(path, model.transformer)
    model.eval()
    return LoadedModel(model, tokenizer, path)
