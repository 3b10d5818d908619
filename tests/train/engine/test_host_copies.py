"""If this fails, checkpoints take more host memory than predicted, and a job is killed. Copies for
checkpoints: host memory of their exact size, pinned once for a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.train.engine.test_checkpoint import equal, shards, tensors
from tests.train.fake_pinning import fake_pinning
from train.engine.checkpoint import Checkpoints
from train.engine.host_copies import HostCopies
from train.engine.parallel import ParallelLayout
from train.engine.stored_checkpoint import load_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CUDA = torch.device("cuda", 3)


def test_checkpoints_pin_as_many_bytes_as_their_tensors_have(tmp_path):
    """Once, for two checkpoints; no power of two. What they write is what the tensors have."""
    parallel = ParallelLayout(rank=0, world=1, cp=1, device=CUDA)
    with fake_pinning(CUDA) as memory:
        checkpoints = Checkpoints(tmp_path, parallel, keep=2, keep_every=None, log=print)
        for step in (1, 2):
            checkpoints.begin(step, shards(tensors(step)), {})
        checkpoints.wait()
        assert memory.asked == [sum(tensor.nbytes for tensor in tensors(1).values())]
        del checkpoints
    for step in (1, 2):
        loaded = tensors(0)
        load_tensors(tmp_path / f"step-{step:08d}", loaded)
        assert equal(loaded, tensors(step))


def test_copies_of_all_types_have_their_own_storage_in_one_buffer():
    """Of a bfloat16 before a float32: two bytes between them. An empty tensor takes nothing."""
    like = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 0), torch.zeros(()), torch.ones(2)]
    with fake_pinning(CUDA) as memory:
        copies = HostCopies(CUDA)
        made = copies.like(like)
        assert memory.asked == [20]
        for number, (one, other) in enumerate(zip(made, like, strict=True)):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.untyped_storage().nbytes() == other.nbytes
            one.fill_(number)
        first = made[0].data_ptr()
        assert [t.data_ptr() - first for t in (made[2], made[3])] == [8, 12]
        assert [t.tolist() for t in made] == [[0, 0, 0], [[], []], 2, [3, 3]]
        assert copies.like(like)[0].data_ptr() == first
        assert memory.asked == [20]
        del copies, made, one


def test_a_larger_set_of_copies_replaces_the_buffer():
    """The old memory is unpinned before the new one is pinned, and lives as long as its tensors."""
    with fake_pinning(CUDA) as memory:
        copies = HostCopies(CUDA)
        (small,) = copies.like([torch.zeros(5)])
        small.fill_(3)
        copies.like([torch.zeros(6)])[0].fill_(4)
        assert (memory.asked, memory.most) == ([20, 24], 24)
        assert small.tolist() == [3] * 5
        copies.like([torch.zeros(2)])
        assert memory.asked == [20, 24]
        del copies


def test_copies_on_a_cpu_are_not_pinned():
    with fake_pinning(CUDA) as memory:
        HostCopies(torch.device("cpu")).like([torch.zeros(5)])
        assert not memory.asked
