"""``engine=ddp``: every rank holds all weights and all optimiser state."""

from __future__ import annotations

import contextlib

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from train.data.batches import Batch
from train.engine.engine import Engine
from train.model.transformer import LanguageModel


class DDPEngine(Engine):
    """PyTorch's DistributedDataParallel over all ranks; a single process needs no wrapper.

    Context-parallel ranks hold different tokens and the same weights, as data-parallel ranks do.
    One all-reduce over all of them is therefore right for both.
    """

    def wrap(self, model: LanguageModel) -> LanguageModel:
        self._replica = None
        if self.parallel.world > 1:
            self._replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        run = self._replica or self.model
        alone = last or self._replica is None
        with contextlib.nullcontext() if alone else self._replica.no_sync():
            losses = run(batch)
            (losses.sum() * scale).backward()
        return losses.detach()
