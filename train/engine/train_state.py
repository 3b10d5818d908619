"""The training state: the contents of a checkpoint, from which a run continues exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError, from_plain
from train.data.shards import Corpus
from train.data.tokenizer import load_tokenizer
from train.engine.engine import Engine
from train.engine.shard import Shard
from train.engine.spike_filter import SpikeFilter
from train.engine.stored_checkpoint import load_tensors, read_manifest_metadata
from train.keys import flatten, shown
from train.model.transformer import Transformer
from train.sections.renamed import is_of_0_1

# Settings that determine the stream of samples; weights and lengths of sources do so too.
STREAM = ("data.seq_len", "data.max_doc_len", "data.packing", "data.eos_token", "train.seed")


class TrainState:
    """Weights, optimiser state, spike filter and position in the data.

    ``step`` counts finished optimiser steps, ``samples`` the samples that all ranks together have
    used: the next step begins with sample number ``samples``, for any number of ranks. ``batch`` is
    the number of samples in a step. ``seconds`` is the training time.
    """

    def __init__(self, config: Config, corpus: Corpus, engine: Engine) -> None:
        self.config, self.corpus, self.engine = config, corpus, engine
        self.spike_filter = SpikeFilter(config.guard)
        self.step = 0
        self.samples = 0
        self.batch = config.batch_over(engine.parallel.dp)
        self.seconds = 0.0

    def shards(self) -> dict[str, Shard]:
        """This rank's part of every tensor of the state, by name, not copied."""
        return self.engine.shards()

    def metadata(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        return {
            "samples": self.samples,
            "batch": self.batch,
            "seconds": self.seconds,
            "guard": self.spike_filter.state(),
            "corpus": self.corpus.digest,
            "settings": json.loads(json.dumps(dataclasses.asdict(self.config))),
        }

    def metadata_of(self, path: Path) -> dict[str, Any]:
        """``metadata`` in a verified checkpoint, and its ``step``.

        Raises ``ConfigError`` if the checkpoint belongs to another stream of samples: its position
        would mean other data here.
        """
        metadata = read_manifest_metadata(path)
        try:
            there = _stream(metadata)
        except ConfigError as error:
            raise ConfigError(f"checkpoint {path}: {error}") from error
        here = _stream(self.metadata())
        if there["corpus"] == here["corpus"]:  # the same tokens: null may stand for a name
            there["data.eos_token"] = here["data.eos_token"]
        if different := [k for k in there | here if there.get(k) != here.get(k)]:
            key = min(different, key=lambda k: (k == "corpus", k))  # a result of other settings
            own = path.parent.parent / "tokenizer.json"
            way = "give the same files and data settings"
            if key == "corpus":
                way += f" (data.tokenizer={own} in a new run.dir, if the run trained it)"
            way += ", or begin with new data"
            if key == "corpus" and is_of_0_1(metadata["settings"]):
                way = (
                    "RingFA3 0.1 held out other documents, so no settings give its samples; begin "
                    f"with new data in a new run.dir, with data.tokenizer={own} if the run trained "
                    "it"
                )
            was, now = (shown(stream.get(key)) for stream in (there, here))
            raise ConfigError(
                f"checkpoint {path} was made from other samples: {key} was {was}, is now {now}; "
                f"{way}: checkpoint.reset_data=true keeps Adam's moments, checkpoint.init_from "
                "takes the weights alone"
            )
        return metadata

    def load(self, path: Path) -> None:
        """Load a verified checkpoint.

        Raises ``ConfigError`` if it belongs to another stream of samples or to another model.
        """
        metadata = self.metadata_of(path)
        load_tensors(path, self.shards())
        self.engine.loaded()
        self.step, self.samples, self.seconds = (
            metadata["step"],
            metadata["samples"],
            metadata["seconds"],
        )
        self.spike_filter.restore(metadata["guard"])

    def roll_back(self, path: Path) -> None:
        """Load an earlier checkpoint, but continue with the data after the skipped steps."""
        samples, seconds = self.samples, self.seconds
        self.load(path)
        self.samples, self.seconds = samples, seconds
        self.spike_filter.consecutive_skips = 0

    def start_from(self, path: Path) -> None:
        """Load only the ``initial`` tensors of a verified checkpoint."""
        load_tensors(path, self.initial())
        self.engine.loaded()

    def initial(self) -> dict[str, Shard]:
        """The ``shards`` that a new run takes from another: of weights, and with
        ``checkpoint.reset_data`` of Adam's moments too."""
        if self.config.checkpoint.reset_data:
            return self.shards()
        return {name: s for name, s in self.shards().items() if name.startswith("model.")}

    def require_vocabulary(self, path: Path) -> None:
        """Raise ``ConfigError`` if the run of the checkpoint ``path`` has other tokens.

        The rows of its embedding are those of its own tokens. A checkpoint outside of a run folder
        has no record of them.
        """
        own = path.absolute().parents[1] / "tokenizer.json"
        if not own.is_file():
            return
        if load_tokenizer(own).get_vocab() != self.corpus.tokenizer.get_vocab():
            raise ConfigError(
                f"checkpoint {path} was made with other tokens; give data.tokenizer={own}"
            )


def _stream(metadata: dict[str, Any]) -> dict[str, Any]:
    """The settings that determine the stream of samples; the corpus digest covers the tokens."""
    settings = flatten(dataclasses.asdict(from_plain(metadata["settings"])))
    keys = {
        key: value
        for key, value in settings.items()
        if key in STREAM or (key.startswith("data.") and key.endswith((".weight", ".min_len")))
    }
    return {"corpus": metadata["corpus"], **keys}


def load_weights(path: Path, model: Transformer) -> None:
    """Load the weights of a verified checkpoint; ``ConfigError`` if they do not fit ``model``."""
    weights = model.named_parameters()
    load_tensors(path, {f"model.{name}": weight.detach() for name, weight in weights})
