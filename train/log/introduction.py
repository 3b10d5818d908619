"""The first lines of a run on the console: its model, text, batch and schedule."""

from __future__ import annotations

from collections.abc import Iterator

from train.config import Config
from train.data.mixture import short_documents
from train.data.shards import Corpus
from train.engine.parallel import ParallelLayout
from train.engine.train_state import TrainState
from train.run.run_folder import RunFolder
from train.run.schedule import describe


def introduction(
    config: Config,
    corpus: Corpus,
    state: TrainState,
    parallel: ParallelLayout,
    folder: RunFolder,
) -> Iterator[str]:
    """The lines, before the first step of this process."""
    shards = state.engine.shards().items()
    parameters = sum(s.shape.numel() for name, s in shards if name.startswith("model."))
    precision = str(state.engine.model.dtype).removeprefix("torch.")
    yield (
        f"{parameters:,} parameters in {precision} on {parallel.world} x {parallel.device.type} "
        f"(dp {parallel.dp}, cp {parallel.cp}); {len(corpus.train):,} documents of "
        f"{corpus.train.lengths.sum():,} tokens{short_documents(corpus.train, config.data)}, "
        f"{len(corpus.held_out):,} held out; run folder {folder.path}"
    )
    size = f"{state.batch} x {config.data.seq_len:,} tokens a step"
    if config.data.tokens_per_rank is not None:
        size += f", {config.data.tokens_per_rank:,} of each rank at once"
    yield f"{size}; {describe(config.optim, config.train.steps)}"
