"""``engine=fsdp2``: weights, gradients and optimiser state are sharded, block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from train.config import Config, ConfigError
from train.data.batches import Batch
from train.engine.engine import Engine
from train.engine.parallel import ParallelLayout, require_agreement, require_group
from train.engine.shard import local_box
from train.engine.time_split import TimeSplit
from train.model.initialise import initialise
from train.model.transformer import LanguageModel, build_model


class FSDP2Engine(Engine):
    """PyTorch's ``fully_shard``: each block, the embedding and the head are separate FSDP units.

    A tied embedding is gathered with the last norm, in the root unit, for the whole step. Blocks
    and an untied head are gathered in the dtype of matrix products, to which a product rounds its
    weights anyway. In bfloat16 this also rounds the gains of norms inside blocks. The embedding and
    the last norm are gathered in float32: no product rounds their rows, and the gradient of the
    embedding sums over tokens in its dtype. This rank's shards are float32, and so is every
    reduction.

    ``engine.reduce=micro`` reduces the gradients of each micro-batch to shards. Hosts that hold
    replicas add theirs after the last one. With ``step`` a rank holds whole gradients in float32
    until the last micro-batch.
    """

    def _build(self, n_tokens: int) -> LanguageModel:
        parallel = self.parallel
        return build_model(self.config, n_tokens, parallel.device, parallel.cp_group, meta=True)

    def wrap(self, model: LanguageModel) -> LanguageModel:
        transformer = model.transformer
        self.mesh = make_mesh(self.config, self.parallel)
        if self.mesh.ndim > 1:  # it has groups of its own
            self.groups = self.mesh.get_all_groups()
        products: list[nn.Module] = list(transformer.blocks)
        looked_up: list[nn.Module] = [model]
        if transformer.output is not None:
            products.append(transformer.output)
            looked_up = [transformer.embedding, model]
        self.units = [*products, *looked_up]  # the root is the last one
        for module in self.units:
            # Inputs are not cast: the residual stream has a dtype of its own.
            policy = MixedPrecisionPolicy(
                param_dtype=model.dtype if module in products else torch.float32,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            # The root reshards too. Otherwise its weights would stay gathered after an evaluation,
            # and be stale in the forward after the next update.
            fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)
        model.to_empty(device=self.parallel.device)
        if self.draw:
            initialise(transformer, self.config.model, self.config.train.seed, _local_rows)
        return model

    def watch(self, times: TimeSplit) -> None:
        """As in ``Engine``; also report the waits for a unit's weights, in forward and backward."""
        super().watch(times)

        def enter(*_: object) -> None:
            times.enter("communication")

        def leave(*_: object) -> None:
            times.leave()

        def before_gather(module: nn.Module, inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(enter)

        def after_gather(module: nn.Module, inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(leave)

        for module in self.units:  # FSDP's own hooks run between these
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_pre_hook(leave)
            module.register_forward_hook(before_gather, prepend=True)
            module.register_forward_hook(after_gather)

    def backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        if self.config.engine.reduce == "step":
            self.model.set_requires_gradient_sync(last)
        else:
            self.model.set_requires_all_reduce(last)
        losses = self.model(batch)
        (losses.sum() * scale).backward()
        return losses.detach()

    def _local_gradients(self) -> list[Tensor]:
        return [gradient.to_local() for gradient in super()._local_gradients()]

    def _norm_of_all(self, local: Tensor) -> Tensor:
        squares = local.square()
        dist.all_reduce(squares, group=self.mesh.get_group(self.mesh.ndim - 1))
        return squares.sqrt()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, parameter.grad.to_local().flatten()


def make_mesh(config: Config, parallel: ParallelLayout) -> DeviceMesh:
    """The mesh over which parameters are sharded: all ranks, or (hosts, ranks of a host).

    The second is hybrid sharding (HSDP), for ``engine.shard=hsdp``: parameters are sharded over the
    ranks of a host and replicated over hosts. Raises ``RuntimeError`` on every rank if hosts have
    different numbers of processes.
    """
    require_group(parallel)
    device_type, world = parallel.device.type, parallel.world
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if config.engine.shard == "all":
        return DeviceMesh(device_type, list(range(world)))
    require_agreement(parallel, {"number of processes on its host": str(local)})
    if world % local:
        raise ConfigError(
            f"engine.shard=hsdp: {local} processes on this host do not divide the {world} of the "
            f"job; nearest valid: engine.shard=all"
        )
    hosts = torch.arange(world, dtype=torch.int64, device="cpu").view(-1, local)
    timeout = timedelta(seconds=config.parallel.timeout_s)  # init_device_mesh takes none
    groups = [
        dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)[0]
        for ranks in (hosts.T, hosts)
    ]
    return DeviceMesh.from_group(groups, device_type, hosts, mesh_dim_names=("replicate", "shard"))


def _local_rows(parameter: Tensor) -> tuple[int, Tensor]:
    """The number of the first row that this rank holds, and its rows."""
    box = local_box(parameter)
    if box is None:
        return 0, parameter.detach().to_local()  # a slice of the DTensor would gather it
    return box.offsets[0], box.values
