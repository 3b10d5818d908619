"""What is known of a tensor: by the version of its values, or by its memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


KEYS = 16  # of a tensor, the latest ones
TENSORS = 256  # alive; beyond that the one that was used least recently is forgotten


@dataclass
class _Entry(Generic[T]):
    """The results of one version of a tensor."""

    version: int
    used: int = 0  # when, by the clock of the cache
    results: dict[Hashable, T] = field(default_factory=dict)


class TensorCache(Generic[T]):
    """Results by tensor and key, of the latest `KEYS` keys of each of `TENSORS` tensors.

    They die with the tensor, and when its values change. A result must not refer to the tensor,
    which would keep it. An inference tensor has no version, so nothing is kept of it.
    """

    def __init__(self) -> None:
        self._entries: MutableMapping[torch.Tensor, _Entry[T]] = WeakTensorKeyDictionary()
        self._clock = itertools.count()
        self._lock = threading.Lock()  # of the entries: threads call at the same time

    def get(self, tensor: torch.Tensor, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute()`, which may depend on the values of `tensor` and on `key`."""
        if tensor.is_inference():
            return compute()
        with self._lock:
            entry = self._entries.get(tensor)
            if entry is None or entry.version != tensor._version:
                if entry is None and len(self._entries) >= TENSORS:
                    self._forget_one()
                entry = self._entries[tensor] = _Entry(tensor._version)
            entry.used = next(self._clock)
        results = entry.results
        if key not in results:
            result = compute()
            if len(results) == KEYS:
                del results[next(iter(results))]
            results[key] = result
        return results[key]

    def _forget_one(self) -> None:
        alive = list(self._entries.items())  # other tensors may die meanwhile
        if alive:
            oldest, _ = min(alive, key=lambda item: item[1].used)
            self._entries.pop(oldest, None)


class MemoryCache(Generic[T]):
    """A value for the memory of a tensor. A later `set` drops the values of freed memory.

    A forward call leaves a value to its backward call, by the LSE that it has returned. LSE passes
    through checkpoints and compiled graphs, where other arguments would become constants. The value
    is lost where hooks move saved tensors to other memory.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[StorageWeakRef, T]] = {}
        self._limit = 16  # entries, after which those of freed memory are dropped

    def set(self, tensor: torch.Tensor, value: T) -> None:
        if len(self._values) >= self._limit:
            for key, (memory, _) in list(self._values.items()):
                if _freed(memory):
                    self._values.pop(key, None)
            self._limit = 16 + 2 * len(self._values)
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._values[memory.cdata] = memory, value  # no other memory has its `cdata` meanwhile

    def get(self, tensor: torch.Tensor) -> T | None:
        """The value for the tensor's memory; None if there is none."""
        found = self._values.get(tensor.untyped_storage()._cdata)
        return None if found is None or _freed(found[0]) else found[1]


def _freed(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
