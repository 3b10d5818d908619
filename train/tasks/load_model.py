"""A trained model, out of its run folder: settings, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from train.config import Config, ConfigError
from train.data.tokenizer import load_tokenizer
from train.engine.checkpoint import find_checkpoint, from_rank_0
from train.engine.parallel import Mesh
from train.engine.train_state import load_weights
from train.model.transformer import LanguageModel, build_model
from train.run.run_folder import RunFolder


@dataclass(frozen=True)
class Trained:
    """The model with the weights of ``checkpoint``, and the tokenizer it was trained with."""

    model: LanguageModel
    tokenizer: Tokenizer
    checkpoint: Path


def read_tokenizer(folder: RunFolder) -> Tokenizer:
    """The tokenizer that the run in ``folder`` was trained with."""
    if not folder.tokenizer.exists():
        raise ConfigError(f"run.dir={folder.path} holds no tokenizer.json; choose another run")
    return load_tokenizer(folder.tokenizer)


def load_trained(
    config: Config,
    folder: RunFolder,
    mesh: Mesh,
    checkpoint: str | None,
    say: Callable[[str], None],
) -> Trained:
    """The model of ``config`` with verified weights, on every rank.

    ``checkpoint`` is the folder of one, or of a run; None is the run in ``folder``.
    """
    tokenizer = read_tokenizer(folder)
    model = build_model(config, tokenizer.get_vocab_size(), mesh)
    place = folder.path if checkpoint is None else Path(checkpoint).expanduser()
    path = from_rank_0(mesh, lambda: find_checkpoint(place, say))
    load_weights(path, model.transformer)
    model.eval()
    return Trained(model, tokenizer, path)
