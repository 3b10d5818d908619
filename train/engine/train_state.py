"""The training state: the contents of a checkpoint, sufficient to continue a run exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError
from train.engine.checkpoint import load_tensors, read_facts
from train.engine.engine import Engine
from train.engine.guard import Guard
from train.engine.shard import Shard
from train.keys import flatten
from train.model.transformer import Transformer


class TrainState:
    """Weights, optimiser, guard and position.

    ``step`` counts finished optimiser steps, ``samples`` the samples that all ranks together have
    used: the next step begins with sample number ``samples``, for any number of ranks. ``batch``
    are the samples of a step, None before they are known. ``seconds`` is the training time so far.
    """

    def __init__(self, config: Config, corpus: str, engine: Engine) -> None:
        self.config, self.corpus, self.engine = config, corpus, engine
        self.guard = Guard(config.guard)
        self.step = 0
        self.samples = 0
        self.batch: int | None = None
        self.seconds = 0.0

    def shards(self) -> dict[str, Shard]:
        """What this rank holds of every tensor of the state, by name, not copied."""
        return self.engine.shards()

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

    def facts_of(self, path: Path) -> dict[str, Any]:
        """``facts`` in a verified checkpoint, and its ``step``.

        Raises ``ConfigError`` if it belongs to another stream of samples, in which its position has
        no meaning.
        """
        facts = read_facts(path)
        there, here = _stream(facts), _stream(self.facts())
        if different := sorted(k for k in there | here if there.get(k) != here.get(k)):
            key = different[0]
            raise ConfigError(
                f"checkpoint {path} was made from other samples: {key} was {there.get(key)}, is "
                f"now {here.get(key)}; give the same files and data settings, or load only its "
                f"weights with checkpoint.init_from"
            )
        return facts

    def load(self, path: Path) -> None:
        """Load a verified checkpoint; ``ConfigError`` as ``facts_of``, or if it is of another
        model."""
        facts = self.facts_of(path)
        load_tensors(path, self.shards())
        self.engine.loaded()
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
        load_tensors(path, self.weights())
        self.engine.loaded()

    def weights(self) -> dict[str, Shard]:
        """``shards`` of the model alone."""
        return {name: s for name, s in self.shards().items() if name.startswith("model.")}


def _stream(facts: dict[str, Any]) -> dict[str, Any]:
    """What determines the stream of samples; the corpus digest covers everything about tokens."""
    keys = {
        key: value
        for key, value in flatten(facts["settings"]).items()
        if key in ("data.seq_len", "data.piece_len", "train.seed") or key.endswith(".weight")
    }
    for key, value in flatten(facts["settings"]).items():  # earlier versions have no such keys
        if key == "data.packing" and value != "stream":
            keys[key] = value
        if key.startswith("data.") and key.endswith(".min_len") and value is not None:
            keys[key] = value
    return {"corpus": facts["corpus"], **keys}


def load_weights(path: Path, model: Transformer) -> None:
    """Load the weights of a verified checkpoint; ``ConfigError`` if they do not fit ``model``."""
    weights = model.named_parameters()
    load_tensors(path, {f"model.{name}": weight.detach() for name, weight in weights})
