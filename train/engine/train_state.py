"""The training state: the contents of a checkpoint, sufficient to continue a run exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from train.config import Config, ConfigError, flatten
from train.engine.checkpoint import load_tensors, read_facts
from train.engine.guard import Guard
from train.model.transformer import Transformer


class TrainState:
    """Weights, optimiser, guard and position.

    ``step`` counts finished optimiser steps, ``samples`` the samples that all ranks together have
    used: the next step begins with sample number ``samples``, for any number of ranks. ``batch``
    are the samples of a step, None before they are known. ``seconds`` is the training time so far.
    """

    def __init__(
        self, config: Config, corpus: str, model: Transformer, optimizer: torch.optim.Optimizer
    ) -> None:
        self.config, self.corpus = config, corpus
        self.model, self.optimizer = model, optimizer
        self.guard = Guard(config.guard)
        self.step = 0
        self.samples = 0
        self.batch: int | None = None
        self.seconds = 0.0
        # Creates the optimiser's tensors by a step with zero learning rate, then resets its count.
        self._optimizer_tensors()
        for entry in optimizer.state.values():
            entry["step"].zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by name, not copied."""
        return self._weights() | self._optimizer_tensors()

    def facts(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        return {
            "samples": self.samples,
            "batch": self.batch,
            "seconds": self.seconds,
            "guard": self.guard.state(),
            "corpus": self.corpus,
            "settings": json.loads(json.dumps(dataclasses.asdict(self.config))),
        }

    def load(self, path: Path) -> None:
        """Load a verified checkpoint.

        Raises ``ConfigError`` if it belongs to another model or to another stream of samples, in
        which its position has no meaning.
        """
        facts = read_facts(path)
        there, here = _stream(facts), _stream(self.facts())
        if different := sorted(k for k in there | here if there.get(k) != here.get(k)):
            key = different[0]
            raise ConfigError(
                f"checkpoint {path} was made on another stream of samples, with {key}="
                f"{there.get(key)} (now {here.get(key)}); give the same files and data settings, "
                f"or take its weights alone with checkpoint.init_from"
            )
        load_tensors(path, self.tensors())
        self.step, self.samples, self.seconds = facts["step"], facts["samples"], facts["seconds"]
        self.batch = facts.get("batch")
        self.guard.restore(facts["guard"])

    def roll_back(self, path: Path) -> None:
        """Load an earlier checkpoint but keep the position in the data."""
        samples, batch, seconds = self.samples, self.batch, self.seconds
        self.load(path)
        self.samples, self.batch, self.seconds = samples, batch, seconds
        self.guard.in_a_row = 0

    def load_weights(self, path: Path) -> None:
        """Load only the weights of a verified checkpoint."""
        load_weights(path, self.model)

    def _weights(self) -> dict[str, Tensor]:
        return _weights(self.model)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        entries = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {
            f"optimizer.{name}": value for name, value in entries.items() if torch.is_tensor(value)
        }


def _stream(facts: dict[str, Any]) -> dict[str, Any]:
    """What determines the stream of samples; the corpus digest covers everything about tokens."""
    keys = {
        key: value
        for key, value in flatten(facts["settings"]).items()
        if key in ("data.seq_len", "data.piece_len", "train.seed") or key.endswith(".weight")
    }
    return {"corpus": facts["corpus"], **keys}


def load_weights(path: Path, model: Transformer) -> None:
    """Load the weights of a verified checkpoint; ``ConfigError`` if they do not fit ``model``."""
    load_tensors(path, _weights(model))


def _weights(model: Transformer) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}
