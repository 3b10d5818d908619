"""Small corpora for the tests of the trainer."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.train.hf_folders import make_folder, started, tokenizer_file
from tests.train.jobs import run_script
from tests.train.texts import make_text
from train.config import Config
from train.data.documents import Documents

__all__ = ["make_folder", "started", "tokenizer_file"]  # fixtures of all folders


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty text files of 5 to 400 words in two folders, and one that is not UTF-8."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "deep").mkdir()
    for number in range(40):
        name = f"{number}.txt" if number % 2 else f"deep/{number}.txt"
        (folder / name).write_text(make_text(number, 5 + 10 * number))
    (folder / "binary.dat").write_bytes(b"\xff\xfe\x00not text")
    (folder / ".hidden").write_text("left out")
    return folder


@pytest.fixture
def config(text_folder: Path, tmp_path: Path) -> Config:
    """A valid configuration over ``text_folder``, its cache and run folder under ``tmp_path``."""
    config = Config()
    config.data.path = str(text_folder)
    config.data.cache_dir = str(tmp_path / "cache")
    config.data.vocab_size = 300
    config.data.held_out = 0.2
    config.data.seq_len = 256
    config.run.dir = str(tmp_path / "run")
    config.parallel.threads = 1
    return config


@pytest.fixture(scope="session")
def make_documents() -> Callable[[Sequence[int]], Documents]:
    """Builds documents of given lengths in memory: token i of the corpus is the number i."""

    def make(lengths: Sequence[int]) -> Documents:
        sizes = np.array(lengths, np.int64)
        return Documents(
            shards=(np.arange(sizes.sum(), dtype=np.uint32),),
            shard=np.zeros(len(sizes), np.int64),
            start=np.cumsum(sizes) - sizes,
            lengths=sizes,
            n_bytes=3 * sizes,
            origin=np.zeros(len(sizes), np.int64),
            row=np.arange(len(sizes)) + 1,
            hash=np.arange(len(sizes)),
            files=["numbers"],
            sources={"": 1.0},
            bounds=(0, len(sizes)),
            vocab_size=2**32,
        )

    return make


@pytest.fixture
def pretrain() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``train/pretrain.py`` with the given arguments, under torchrun for several processes."""

    def run(
        *arguments: str, processes: int | None = None, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        launcher = None
        if processes is not None:
            launcher = ["--standalone", "--nproc-per-node", str(processes)]
        return run_script(*arguments, given=given, launcher=launcher)

    return run


@pytest.fixture(scope="session")
def overrides(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a small model on the small corpus; gradients are clipped at every step."""
    return [
        f"data.path={text_folder}",
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        *("data.vocab_size=300", "data.held_out=0.2", "data.seq_len=500", "data.max_doc_len=130"),
        *("model.dim=32", "model.ffn_dim=64", "model.n_layers=2", "optim.warmup_steps=2"),
        *("train.steps=10", "train.precision=float32", "train.eval_every=4"),
        *("optim.clip=0.05", "optim.embedding_lr_scale=3", "memory.loss_chunk=100"),
    ]


@pytest.fixture(scope="session")
def trained_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run over ``text_folder``: 20 steps of a tiny model."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    command = [f"data.path={text_folder}", f"run.dir={folder}"]
    command += [f"data.cache_dir={folder.parent / 'cache'}", "data.vocab_size=300"]
    command += ["data.held_out=0.2", "data.seq_len=200", "model.dim=32", "model.ffn_dim=64"]
    command += ["model.n_layers=2", "optim.warmup_steps=2", "train.steps=20", "parallel.threads=1"]
    command += ["train.seed=1"]  # its greedy text has more than one token
    run_script(*command).check_returncode()
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that a test saves."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k))
    )
    return figures
