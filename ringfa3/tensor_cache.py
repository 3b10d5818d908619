"""What has been computed from a tensor's values, once for each version of the tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import Generic, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


KEYS = 16  # of a tensor, the latest ones


class TensorCache(Generic[T]):
    """Results by tensor and key, of the latest `KEYS` keys of each tensor.

    They die with the tensor, and when its values change. A result must not refer to the tensor,
    which would keep it. An inference tensor has no version, so nothing is kept of it.
    """

    def __init__(self) -> None:
        self._results: MutableMapping[torch.Tensor, tuple[int | None, dict[Hashable, T]]]
        self._results = WeakTensorKeyDictionary()

    def get(self, tensor: torch.Tensor, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute()`, which may depend on the values of `tensor` and on `key`."""
        if tensor.is_inference():
            return compute()
        version, results = self._results.get(tensor, (None, {}))
        if version != tensor._version:
            results = {}
            self._results[tensor] = tensor._version, results
        if key not in results:
            result = compute()
            if len(results) == KEYS:
                del results[next(iter(results))]
            results[key] = result
        return results[key]
