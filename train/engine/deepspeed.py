"""``engine=deepspeed``: ZeRO stages 1, 2 and 3, with optimiser state or all weights on the host.

DeepSpeed's public getters of a whole weight or moment all-reduce it. A checkpoint must not
communicate, because it is taken concurrently with a step. ``shards`` therefore reads the partitions
of DeepSpeed's optimisers.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import Config
from train.data.batches import Batch
from train.engine.engine import Engine
from train.engine.parallel import ParallelLayout, require_group
from train.engine.shard import Shard, flat_boxes, whole
from train.model.initialise import initialise
from train.model.optim import set_learning_rate
from train.model.transformer import Block, LanguageModel, build_model

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine around our AdamW, over all ranks as its data-parallel group.

    DeepSpeed is not told of context parallelism: with a model-parallel group, its stages scale
    gradients differently. Gradients are reduced in float32.
    """

    def __init__(
        self, config: Config, n_tokens: int, parallel: ParallelLayout, draw: bool = True
    ) -> None:
        if parallel.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import of deepspeed
        os.environ.setdefault("LOCAL_RANK", "0")  # without torchrun
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.WARNING)
        # An all-reduce for inference on CPUs; a compiler would build it at every first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.library, self.stage = deepspeed, config.engine.stage
        self.settings = _settings(config, parallel)
        require_group(parallel)
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        super().__init__(config, n_tokens, parallel, draw)

    def _build(self, n_tokens: int) -> LanguageModel:
        parallel, meta = self.parallel, self.stage == 3
        device, group = parallel.device, parallel.cp_group
        return build_model(self.config, n_tokens, device, group, meta, self.draw)

    def wrap(self, model: LanguageModel) -> LanguageModel:
        self.shapes = {name: p.shape for name, p in model.transformer.named_parameters()}
        if self.stage == 3:
            self._partition(model)
        return model

    def _partition(self, model: LanguageModel) -> None:
        """Initialise the parts of the model one by one, and keep this rank's partition of each."""
        transformer = model.transformer
        if transformer.compile:  # no hooks inside of the graphs
            self.library.utils.set_z3_leaf_modules(model, [Block])
        apart = {f"blocks.{n}.": block for n, block in enumerate(transformer.blocks)}
        apart |= {"embedding.": transformer.embedding, "norm.": transformer.norm}
        if transformer.output is not None:
            apart["output."] = transformer.output
        for prefix, module in apart.items():
            module.to_empty(device=self.parallel.device)
            if self.draw:
                initialise(module, self.config.model, self.config.train.seed, prefix=prefix)
            self.library.zero.Init(module=module, config_dict_or_path=self.settings)

    def _create_optimizer_state(self) -> None:
        # DeepSpeed creates its process group with PyTorch's default timeout, not `timeout_s`.
        group = self.library.utils.groups._get_data_parallel_group()
        timeout = timedelta(seconds=self.config.parallel.timeout_s)
        dist.distributed_c10d._set_pg_timeout(timeout, group)
        self.engine, self.zero, *_ = self.library.initialize(
            model=self.model,
            optimizer=self.optimizer,
            config=self.settings,
            dist_init_required=False,
        )
        self.groups = [self.zero.dp_process_group]
        if self.stage < 3:
            self.no_micro_step = self.zero.micro_step_id
        for flat in self._flat_weights():
            self.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                **{moment: torch.zeros_like(flat.detach()) for moment in MOMENTS},
            }

    def backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        losses = self.engine(batch)
        self.engine.backward(losses.sum() * scale, scale_wrt_gas=False)
        return losses.detach()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        self.engine.eval()
        losses = self.engine(batch)
        self.engine.train()
        return losses

    def grad_norm(self, limit: float) -> Tensor:
        """As in ``Engine``; ``step`` clips the gradients, to the same ``limit``.

        DeepSpeed adds squares in float64. With weights or moments on the host, it waits for the
        device.
        """
        if self.stage < 3:
            norm = self.zero.scaled_global_norm()
            if not isinstance(norm, Tensor):
                norm = torch.tensor(norm, dtype=torch.float32, device="cpu")
            valid = norm
        else:
            norms = torch.stack([n.float() for n in self.zero._get_norm_groups()])
            norm, valid = norms.norm(), norms.min()
        norm = torch.where(valid >= 0, norm, math.nan)  # DeepSpeed gives -1 for a norm not finite
        return norm.to(self.parallel.device)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        return self.library.utils.safe_get_full_grad(parameter)

    def step(self, lr: float) -> None:
        set_learning_rate(self.optimizer, lr)
        self.engine.step()

    def discard(self) -> None:
        """Drop the gradients in the way that DeepSpeed's step does after an overflow."""
        zero = self.zero
        if self.stage == 3:
            zero._pre_step()
            zero._partition_all_parameters()
            zero._overflow_clean_up(zero.loss_scale)
            return
        zero.micro_step_id = self.no_micro_step
        zero._wait_for_offload_copies()
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        else:
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)

    def shards(self) -> dict[str, Shard]:
        rank, world = self.parallel.rank, self.parallel.world
        shards = {}
        names = {parameter: name for name, parameter in self.parameters.items()}
        for parameter, flat, offset, first, size in self._fragments():
            name, state = names[parameter], self.optimizer.state[flat]
            tensors = {f"model.{name}": flat.detach()}
            tensors |= {f"optimizer.state.{name}.{key}": state[key] for key in MOMENTS}
            shape = self.shapes[name]
            for key, tensor in tensors.items():
                fragment = tensor.narrow(0, offset, size)
                shards[key] = Shard(shape, flat_boxes(shape, first, fragment))
            shards[f"optimizer.state.{name}.step"] = whole(state["step"], rank, world)
        return shards

    def loaded(self) -> None:
        zero = self.zero
        if self.stage < 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _flat_weights(self) -> list[Tensor]:
        """This rank's part of the weights of every group of parameters, flat, in float32."""
        if self.stage < 3:
            return self.zero.single_partition_of_fp32_groups
        return self.zero.fp32_partitioned_groups_flat

    def _fragments(self) -> Iterator[tuple[nn.Parameter, Tensor, int, int, int]]:
        """This rank's fragment of each parameter, a run of its elements.

        Yields (parameter, flat weights, offset in them, first element of the parameter, elements).
        """
        if self.stage < 3:
            for group, flat in zip(self.zero.bit16_groups, self._flat_weights(), strict=True):
                for parameter in group:
                    mapping = parameter._hp_mapping
                    if mapping is None:
                        yield parameter, flat, 0, 0, 0
                        continue
                    there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield parameter, flat, here.start, there.start, here.numel
            return
        for group, flat in zip(self.zero.fp16_groups, self._flat_weights(), strict=True):
            offset = 0
            for parameter in group:
                size = parameter.partition_numel()  # equal on all ranks; the last ones are padded
                first = min(size * self.parallel.rank, parameter.ds_numel)
                yield parameter, flat, offset, first, min(size, parameter.ds_numel - first)
                offset += size


def _settings(config: Config, parallel: ParallelLayout) -> dict[str, Any]:
    """The configuration of DeepSpeed, which would clip to 1 without ``gradient_clipping``."""
    engine = config.engine
    host = {"device": "cpu", "pin_memory": parallel.device.type == "cuda"}
    zero: dict[str, Any] = {"stage": engine.stage, "overlap_comm": False}
    if engine.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = host
    if engine.offload == "all":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # `backward` sets the boundaries
        "gradient_clipping": config.optim.clip or 0.0,
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
