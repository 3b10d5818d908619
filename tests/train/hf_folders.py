"""Folders of tiny models of transformers, with random weights and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.config import Config, ModelConfig
from train.data.tokenizer import train_tokenizer
from train.run.inherit import inherited_model
from train.sections.model import RopeConfig

N_TOKENS = 300
ROWS = 304  # of the embedding: four are padding
BOS = "<|endoftext|>"
# Over 256 tokens before; rounded and not, with the attention factor given and derived.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn, all keys": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 100,
        "beta_fast": 12.0,
        "beta_slow": 0.5,
        "mscale": 0.9,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
}


def model_of_values(values: dict[str, Any]) -> ModelConfig:
    """The settings of nested values, such as those of ``read_model``."""
    return ModelConfig(**{**values, "rope": RopeConfig(**values["rope"])})


@pytest.fixture(scope="session")
def tokenizer_file(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``tokenizer.json`` of ``N_TOKENS`` tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = [file.read_text() for file in sorted(text_folder.glob("*.txt"))]
    train_tokenizer(texts, N_TOKENS, BOS).save(str(path))
    return path


@pytest.fixture
def make_folder(tokenizer_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """Saves the model of a name, as transformers does, with a tokenizer; returns the folder."""
    from tests.support.hf_models import model_of  # imports transformers: seconds

    def make(name: str, rope: str = "default", shards: bool = False, **changes: Any) -> Path:
        changes = {"vocab_size": ROWS, "rope_parameters": dict(ROPES[rope]), **changes}
        if name.startswith("qwen"):
            changes.setdefault("use_sliding_window", False)
        model = model_of(name, "eager", **changes)
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, max_shard_size=20_000 if shards else "1GB")
        (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        return folder

    return make


@pytest.fixture
def started(config: Config) -> Callable[[Path], Config]:
    """The settings of a run that starts from a folder, with its model."""

    def start(folder: Path) -> Config:
        config.checkpoint.init_from = f"hf:{folder}"
        config.data.tokenizer = str(folder / "tokenizer.json")
        config.model = inherited_model(config.checkpoint.init_from)
        return config

    return start
