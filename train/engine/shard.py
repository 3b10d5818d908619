"""The part of a tensor that a rank holds, in the form in which checkpoints are written and read.

A part is a list of boxes: rectangles of the whole tensor, each with its own values.
torch.distributed.checkpoint fills them from the boxes of any number of ranks and any sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True)
class Box:
    """The rectangle of a tensor that begins at ``offsets`` and has the shape of ``values``."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's ``boxes`` of a tensor of ``shape``.

    ``replicas`` ranks hold the same boxes; this rank is number ``replica`` of them. Because a shard
    is not a tensor, torch.distributed.checkpoint calls its methods with underscores.
    """

    shape: torch.Size
    boxes: tuple[Box, ...]
    replica: int = 0
    replicas: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes of all boxes."""
        return sum(box.values.numel() * box.values.element_size() for box in self.boxes)

    def map(self, change: Callable[[int, Tensor], Tensor]) -> Shard:
        """The same boxes with other tensors: ``change`` gets the number of a box and its tensor."""
        boxes = (Box(b.offsets, change(n, b.values)) for n, b in enumerate(self.boxes))
        return replace(self, boxes=tuple(boxes))

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(box.values),
                    size=self.shape,
                ),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.offsets), b.values.shape) for b in self.boxes]

    def box_at(self, index: MetadataIndex) -> Tensor:
        """The box with the offsets of ``index``."""
        return next(b.values for b in self.boxes if b.offsets == tuple(index.offset or ()))


class SavePlanner(DefaultSavePlanner):
    """Finds the boxes of a dictionary of shards."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].box_at(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds the boxes of a dictionary of shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].box_at(index)


def whole(tensor: Tensor, rank: int = 0, world: int = 1) -> Shard:
    """A tensor that all ``world`` ranks hold whole."""
    tensor = tensor.detach()
    return Shard(tensor.shape, (Box((0,) * tensor.ndim, tensor),), rank, world)


def local_box(tensor: Tensor) -> Box | None:
    """The rectangle of ``tensor`` on this rank: all of it unless it is a DTensor. None if empty.

    A DTensor may be sharded along its first dimension, and replicated.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tensor.detach())
    local = tensor.detach().to_local()
    if local.numel() == 0:
        return None
    sharded = [n for n, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    if not sharded:
        return Box((0,) * tensor.ndim, local)
    mesh, (dim,) = tensor.device_mesh, sharded
    rows = math.ceil(tensor.shape[0] / mesh.size(dim))
    return Box((rows * mesh.get_local_rank(dim), *(0,) * (tensor.ndim - 1)), local)


def shard_of(tensor: Tensor, rank: int, world: int) -> Shard:
    """This rank's part of a DTensor, or of a plain tensor that all ``world`` ranks hold."""
    if not isinstance(tensor, DTensor):
        return whole(tensor, rank, world)
    box, replica, replicas = local_box(tensor), 0, 1
    for n, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(n)
            replica = replica * size + tensor.device_mesh.get_local_rank(n)
            replicas *= size
    return Shard(tensor.shape, () if box is None else (box,), replica, replicas)


def state_tensors(
    named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Weights and optimiser state by their names in a checkpoint."""
    for name, parameter in named.items():
        yield f"model.{name}", parameter
        for key, value in optimizer.state[parameter].items():
            yield f"optimizer.state.{name}.{key}", value


def own_share(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The shards that this rank writes. Ranks that hold the same shards write about equal bytes."""
    share = {}
    loads: dict[int, list[int]] = {}
    for name in sorted(shards, key=lambda name: (-shards[name].n_bytes, name)):
        shard = shards[name]
        of_replicas = loads.setdefault(shard.replicas, [0] * shard.replicas)
        least = of_replicas.index(min(of_replicas))
        of_replicas[least] += shard.n_bytes or 1
        if least == shard.replica:
            share[name] = shard
    return share


def flat_boxes(shape: torch.Size, first: int, values: Tensor) -> tuple[Box, ...]:
    """Consecutive elements of a row-major tensor of ``shape``, from element ``first``, as boxes.

    ``values`` are the elements, one-dimensional; the boxes are views of it.
    """
    run = values.numel()
    if run == 0:
        return ()
    if len(shape) <= 1:
        return (Box((first,) * len(shape), values if shape else values.view(())),)
    row = math.prod(shape[1:])
    before = min(-first % row, run)  # elements of a row that begins before the run
    rows = (run - before) // row
    middle = before + rows * row
    boxes = []
    for start, stop in ((0, before), (middle, run)):
        number, column = divmod(first + start, row)
        for box in flat_boxes(shape[1:], column, values[start:stop]):
            boxes.append(Box((number, *box.offsets), box.values[None]))
    if rows:
        offsets = ((first + before) // row, *(0,) * (len(shape) - 1))
        boxes.append(Box(offsets, values[before:middle].view(rows, *shape[1:])))
    return tuple(boxes)
