"""If this fails, a checkpoint lacks parts of a tensor. Parts of tensors: their rectangles cover
what the rank holds, once, whatever the sharding."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import Ranks
from train.engine.shard import flat_boxes, own_share, shard_of


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_run_of_elements_is_cut_into_its_rectangles(shape, data):
    """The reference is the run itself: written through the boxes, read from the flat tensor."""
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    filled = torch.zeros(shape)
    boxes = flat_boxes(torch.Size(shape), first, torch.arange(first, stop) + 1.0)
    for box in boxes:
        sizes = zip(box.offsets, box.values.shape, strict=True)
        place = tuple(slice(offset, offset + size) for offset, size in sizes)
        assert not filled[place].any()
        filled[place] = box.values
    expected = torch.zeros(size)
    expected[first:stop] = torch.arange(first, stop) + 1.0
    assert torch.equal(filled.reshape(-1), expected)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_boxes_of_a_run_are_views():
    values = torch.zeros(17)
    for box in flat_boxes(torch.Size([4, 3, 5]), 13, values):
        box.values.fill_(1)
    assert values.all()


def _written(group: dist.ProcessGroup) -> list:
    """What a rank writes of DTensors with 5 and 1 rows, sharded along their first dimension."""
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = {f"w{n}": torch.arange(2.0 * n).view(n, 2) for n in (5, 1)}
    shards = {
        name: shard_of(distribute_tensor(t, mesh, [Shard(0)]), group.rank(), group.size())
        for name, t in rows.items()
    }
    return [(n, box.offsets, box.values) for n, s in own_share(shards).items() for box in s.boxes]


def test_every_row_of_a_dtensor_is_written_once(ranks: Ranks):
    for world in (2, 4):
        written = [box for rank in ranks.run(world, _written) for box in rank]
        for name, height in (("w5", 5), ("w1", 1)):
            filled = torch.full((height, 2), torch.nan)
            for _, (row, _), values in (box for box in written if box[0] == name):
                assert filled[row : row + len(values)].isnan().all()
                filled[row : row + len(values)] = values
            assert torch.equal(filled, torch.arange(2.0 * height).view(height, 2))
