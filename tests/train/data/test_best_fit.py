"""If this fails, packed samples waste room or lose documents. Packing of whole slices, against the
definition of best fit, longest first."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import DataConfig
from train.data.best_fit import BestFitSamples, best_fit
from train.data.mixture import training_samples


def by_definition(lengths: list[int], capacity: int) -> list[list[int]]:
    """Every item in turn goes to the fullest bin that has room, or to a new one."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        rooms = [capacity - sum(lengths[n] for n in own) for own in bins]
        fitting = [room for room in rooms if room >= lengths[item]]
        if not fitting:
            bins.append([item])
        else:
            bins[rooms.index(min(fitting))].append(item)
    return bins


@given(lengths=st.lists(st.integers(1, 30), max_size=40), more=st.integers(0, 30))
@settings(deadline=None, max_examples=100)
def test_the_sums_are_those_of_the_definition(lengths, more):
    """Bins of equal room may be chosen in any order: the sums of all bins are equal."""
    capacity = max(lengths, default=1) + more
    items, numbers = best_fit(np.array(lengths, np.int64), capacity)
    assert numbers.tolist() == sorted(numbers)
    found = [items[numbers == number].tolist() for number in range(len({*numbers.tolist()}))]
    expected = by_definition(lengths, capacity)
    sums = [sorted(sum(lengths[n] for n in own) for own in bins) for bins in (found, expected)]
    assert sums[0] == sums[1]
    assert sorted(n for own in found for n in own) == list(range(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    seq_len=st.integers(2, 64),
    max_doc_len=st.none() | st.integers(1, 70),
)
@settings(deadline=None, max_examples=60)
def test_every_epoch_holds_every_slice_whole(make_documents, lengths, seq_len, max_doc_len):
    """Documents are cut at multiples of the slice length alone, and samples are never too long."""
    data = DataConfig(seq_len=seq_len, max_doc_len=max_doc_len, packing="best_fit")
    samples = training_samples(make_documents(lengths), data, seed=3)
    assert isinstance(samples, BestFitSamples)
    step = min(max_doc_len or seq_len, seq_len)
    slices = [
        (document, start, min(start + step, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, step)
    ]
    index = 0
    for _ in range(2):
        epoch = []
        while len(epoch) < len(slices):
            own = samples.slices(index)
            assert 0 < len(samples[index].tokens) == sum(p.stop - p.start for p in own) <= seq_len
            epoch += own
            index += 1
        assert sorted(epoch) == slices


def test_samples_depend_on_seed_and_index_alone(make_documents):
    documents = make_documents([5, 5, 5, 5, 9, 9, 3, 14, 2, 7] * 3)
    one, again, other = (BestFitSamples(documents, 16, None, seed) for seed in (1, 1, 2))
    first = [one.slices(index) for index in range(30)]
    assert [again.slices(index) for index in reversed(range(30))] == first[::-1]
    assert [other.slices(index) for index in range(30)] != first
