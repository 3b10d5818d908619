"""Host memory for copies of tensors, which later copies reuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.model.offload import host_buffer


class HostCopies:
    """One buffer for the copies, of their total size; pinned for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = host_buffer(0, device)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors of these shapes and dtypes, one after the other in the buffer.

        They overwrite the tensors of an earlier call. Allocates only if the buffer is too small.
        Each tensor has a storage of its own size: torch.distributed.checkpoint would clone a view.
        """
        starts, end = [], 0
        for tensor in tensors:
            end += -end % tensor.itemsize
            starts.append(end)
            end += tensor.nbytes
        if end > len(self._buffer):
            self._buffer = host_buffer(0, self._device)  # frees the old one before the new one
            self._buffer = host_buffer(end, self._device)
        return [self._at(start, like) for start, like in zip(starts, tensors, strict=True)]

    def _at(self, start: int, like: Tensor) -> Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        memory, count = self._buffer.numpy(), like.numel()
        flat = torch.frombuffer(memory, dtype=like.dtype, count=count, offset=start)
        return flat.view(like.shape)
