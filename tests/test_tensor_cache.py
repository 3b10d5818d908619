"""If this fails, a call uses the lengths or masks of an earlier tensor. Results are computed once
for each version of a tensor, and die with it."""

from __future__ import annotations

import weakref

import pytest
import torch

from ringfa3.tensor_cache import KEYS, TENSORS, MemoryCache, TensorCache


class Result:
    """What a test computes; it can be referred to weakly."""


def test_one_result_for_each_tensor_version_and_key() -> None:
    cache: TensorCache[Result] = TensorCache()
    x, same = torch.zeros(3), torch.zeros(3)
    first = cache.get(x, 1, Result)
    assert cache.get(x, 1, Result) is first
    assert cache.get(same, 1, Result) is not first
    assert cache.get(x, 2, Result) is not first
    assert cache.get(x, 1, Result) is first
    x[0] = 1
    assert cache.get(x, 1, Result) is not first


def test_a_tensor_has_its_latest_keys() -> None:
    """A tensor that is read with a new key in every step keeps a few results."""
    cache: TensorCache[Result] = TensorCache()
    x = torch.zeros(3)
    results = [weakref.ref(cache.get(x, key, Result)) for key in range(KEYS + 5)]
    assert [result() is not None for result in results] == [False] * 5 + [True] * KEYS


def test_tensors_that_live_are_bounded() -> None:
    """The one that was used least recently is forgotten, and computed again when it comes back."""
    cache: TensorCache[Result] = TensorCache()
    tensors = [torch.zeros(1) for _ in range(TENSORS + 2)]
    results = []
    for x in tensors:
        results.append(weakref.ref(cache.get(x, 1, Result)))
        cache.get(tensors[0], 1, Result)
    gone = [n for n, result in enumerate(results) if result() is None]
    assert gone == [1, 2]
    assert cache.get(tensors[0], 1, Result) is results[0]()
    cache.get(tensors[1], 1, Result)
    assert results[3]() is None
    tensors[5][0] = 1  # a new version takes no other tensor's place
    cache.get(tensors[5], 1, Result)
    assert results[4]() is not None


def test_a_result_that_is_none_is_kept() -> None:
    cache: TensorCache[None] = TensorCache()
    x, calls = torch.zeros(3), []
    for _ in range(2):
        cache.get(x, None, lambda: calls.append(1))
    assert len(calls) == 1


def test_results_die_with_their_tensor_and_its_version() -> None:
    cache: TensorCache[Result] = TensorCache()
    x = torch.zeros(3)
    old = weakref.ref(cache.get(x, 1, Result))
    x[0] = 1
    new = weakref.ref(cache.get(x, 1, Result))
    assert old() is None
    assert new() is not None
    del x
    assert new() is None


def test_an_error_is_raised_again() -> None:
    cache: TensorCache[None] = TensorCache()
    x = torch.zeros(3)

    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cache.get(x, None, fail)


def test_nothing_is_kept_of_an_inference_tensor() -> None:
    """It has no version: a change would not be seen."""
    cache: TensorCache[float] = TensorCache()
    with torch.inference_mode():
        x = torch.zeros(3)
        assert cache.get(x, None, lambda: float(x.sum())) == 0
        x[0] = 1
        assert cache.get(x, None, lambda: float(x.sum())) == 1


def test_a_value_is_known_by_the_memory_of_a_tensor() -> None:
    """As long as that lives: other memory at its address has none."""
    cache: MemoryCache[int] = MemoryCache()
    kept = []
    for number in range(1, 300):
        x = torch.empty(3)
        cache.set(x, number)
        if number % 50 == 0:
            kept.append((number, x))
        assert cache.get(x.view(1, 3).detach()) == number
        del x
        assert cache.get(torch.empty(3)) is None
    assert all(cache.get(x) == number for number, x in kept)
    assert len(cache._values) < 150
