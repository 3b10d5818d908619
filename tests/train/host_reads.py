"""Counts how often a host reads a tensor: on a GPU each read waits for the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WHOLE = ("tolist", "numpy", "cpu")  # methods that read a whole tensor
aten: Any = torch.ops.aten
# Ops whose result, or its shape, the host waits for.
READS = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
)


class HostReads(TorchDispatchMode):
    """In a ``with``: ``count`` are the reads of this thread, of single numbers and of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._patches = ExitStack()

    def __enter__(self) -> HostReads:
        for name in WHOLE:
            self._patches.enter_context(mock.patch.object(Tensor, name, self._counting(name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        masks = args[1] if op is aten.index.Tensor else ()
        self.count += op in READS or any(x is not None and x.dtype == torch.bool for x in masks)
        return op(*args, **(kwargs or {}))

    def _counting(self, name: str) -> Any:
        read = getattr(Tensor, name)

        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.count += 1
            return read(tensor, *arguments, **options)

        return counted
