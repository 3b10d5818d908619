"""Context parallelism in Hugging Face's trainers: `ContextParallel(n)` and `context_parallel`.

accelerate gives all ranks of a CP group the same batch. `compute_loss`, which training and
evaluation of `Trainer` and TRL's `SFTTrainer` share, takes this rank's part of it. The trainers
scale a rank's loss by the number of processes, and average gradients over them. So each gradient
is that of all tokens once, as on one process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs, ParallelismConfig

from ringfa3.hf.batch import READING, read_batch, shard_batch
from ringfa3.hf.registration import NAME, register
from ringfa3.hf.router_loss import scaled
from ringfa3.planning.exchange.buffers import check_kv_budget

CP = "cp"  # the dimension of the device mesh, as accelerate names it
# Whose `compute_loss` is a sum over tokens.
LOSSES = ("transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer")
# Methods of a trainer that pass a batch from its loader on, and could change it.
LIBRARIES = tuple(name.rpartition(".")[0] for name in LOSSES)
PASSING = ("get_batch_samples", "training_step", "prediction_step", "_prepare_inputs")


class ContextParallel(ParallelismConfig):  # type: ignore[misc]
    """Groups of `size` ranks that share each sample; for `parallelism_config` of a trainer.

    The other ranks are data parallel: `world / size` groups, replicated by DDP or sharded by FSDP2
    if that is configured. FSDP2 shards over the CP group, too.

    accelerate's own `cp` means another ring: it drops masks, refuses packing and windows. So
    `cp_enabled` is False, while the mesh has the dimension.

    `kv_budget` is as in `plan_context`: the most rows of other ranks' K/V that a rank holds at
    once, for plans of a trainer.

    Raises ValueError: `size` is no positive int; later, if it does not divide the processes.
    ValueError, TypeError: `kv_budget` is no positive int; later, if a batch needs more.
    """

    def __init__(self, size: int, kv_budget: int | None = None) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"ContextParallel({size!r}): the ranks of a group are 1 or more")
        sizes = dict.fromkeys(("dp_replicate_size", "dp_shard_size", "tp_size", "sp_size"), 1)
        super().__init__(cp_size=size, cp_backend="torch", **sizes)
        self.cp_handler = None
        self.kv_budget = check_kv_budget(kv_budget)

    @property
    def cp_enabled(self) -> bool:
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [CP] if self.cp_size > 1 else []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*(["dp_shard"] if self.dp_shard_enabled else []), *self.non_dp_dim_names]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    def build_device_mesh(self, device_type: str) -> Any:
        """The mesh (dp, cp) of all processes."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % self.cp_size:
            raise ValueError(
                f"ContextParallel({self.cp_size}): the number of processes, {world}, must be a "
                f"multiple of {self.cp_size}: set torchrun --nproc-per-node"
            )
        sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        self._set_size("dp_shard" if sharded else "dp_replicate", world // self.cp_size)
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """accelerate's own check wants FSDP, and SDPA, for a `cp` of its own."""


def context_parallel(trainer_class: type) -> type:
    """A trainer like the given one, which runs models with `attn_implementation="ringfa3"` over
    the CP groups of a `ContextParallel`.

    Losses, gradients, counters and logs are those of one process that has the samples of all
    groups. Packing, padding, windows and sinks are computed exactly. With
    `parallelism_config=None` or `ContextParallel(1)` it is the given trainer.

    Args:
        trainer_class: `transformers.Trainer`, `trl.SFTTrainer`, or a subclass that has their
            `compute_loss`.

    Raises:
        TypeError: the class computes another loss, as TRL's `DPOTrainer` and `RewardTrainer` do.
        ValueError: when a trainer is made, on every rank: a setting that is not right under a
            ring; the message names it and the remedy.
    """
    register()
    known = [base for base in trainer_class.__mro__ if "compute_loss" in vars(base)]
    if not known or f"{known[0].__module__}.{known[0].__name__}" not in LOSSES:
        found = f"{known[0].__name__}.compute_loss" if known else "no compute_loss"
        raise TypeError(
            f"context_parallel({trainer_class.__name__}): {found} is not known to be a sum over "
            "tokens: allowed are transformers.Trainer, trl.SFTTrainer and subclasses that do not "
            "override compute_loss"
        )
    return type(f"ContextParallel{trainer_class.__name__}", (_ContextParallel, trainer_class), {})


class _ReadingCollator:
    """A collator whose batches have their `Reading`. Workers of a loader may unpickle it."""

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if isinstance(batch, MutableMapping):
            batch[READING] = read_batch(batch)
        return batch


class _ContextParallel:
    """What `context_parallel` adds to a trainer."""

    accelerator: Any
    args: Any
    data_collator: Callable[..., Any]
    current_gradient_accumulation_steps: int = 1  # until the trainer trains
    model: Any
    state: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.get_cp_size() > 1:
            _refuse(self)
            self._cp_group = self.accelerator.torch_device_mesh[CP].get_group()

    def get_train_dataloader(self) -> Any:
        with self._reading_ahead():
            return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, *arguments: Any, **keywords: Any) -> Any:
        with self._reading_ahead():
            return super().get_eval_dataloader(*arguments, **keywords)  # type: ignore[misc]

    @contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """Loaders made inside read batches on the CPU, unless a subclass might change these later:
        then `shard_batch` reads them, for which the host waits for the device."""
        collator = self.data_collator
        others = [x for x in type(self).__mro__ if x.__module__ != __name__]
        owners = (next(x for x in others if name in vars(x)) for name in PASSING)
        if self.get_cp_size() > 1 and all(x.__module__ in LIBRARIES for x in owners):
            self.data_collator = _ReadingCollator(collator)
        try:
            yield
        finally:
            self.data_collator = collator

    def get_cp_size(self) -> int:
        """Ranks that share a sample. transformers 4 has no such method."""
        config = getattr(self.accelerator, "parallelism_config", None)
        return 1 if config is None else int(config.cp_size)

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        """DDP's buckets are the gradients: no copies, and no memory for a second set of them.

        transformers 4 does not call it.
        """
        given: dict[str, Any] = super()._build_accelerator_args(**keywords)  # type: ignore[misc]
        if isinstance(self.args.parallelism_config, ContextParallel):
            for handler in given["kwargs_handlers"]:
                if isinstance(handler, DistributedDataParallelKwargs):
                    handler.gradient_as_bucket_view = True
        return given

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **keywords: Any,
    ) -> Any:
        """The trainer's loss of this rank's tokens, so scaled that the mean over ranks is right."""
        compute = functools.partial(super().compute_loss, **keywords)  # type: ignore[misc]
        if self.get_cp_size() == 1:
            return compute(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        kv_budget = self.accelerator.parallelism_config.kv_budget
        mine, _, num_labels = shard_batch(inputs, self._cp_group, kv_budget)
        cp = float(self.get_cp_size())
        average = self.args.average_tokens_across_devices
        # By `balance`, the trainer makes a mean of groups of what is a sum over a group's ranks: it
        # averages over the processes, after it has multiplied by them, if `average`.
        balance = 1.0 if average else cp
        steps = self.current_gradient_accumulation_steps
        if num_items_in_batch is None:  # a mean over the batch, which the group's ranks add up to
            balance = cp / self.accelerator.num_processes if average else cp
            num_items_in_batch = num_labels.clamp(min=1).float() / balance
            steps = 1
        if hasattr(self, "aux_loss_enabled"):  # TRL adds it after it has multiplied
            balance = cp
        mine["num_items_in_batch"] = num_items_in_batch
        with self._every_rank(steps), scaled(balance):
            return compute(model, mine, return_outputs, num_items_in_batch=num_items_in_batch)

    @contextmanager
    def _every_rank(self, steps: int) -> Iterator[None]:
        """TRL sums counts of the ranks by `gather_for_metrics`, which in the last batch drops those
        of the last ranks: they would repeat samples there, but have tokens here. And it divides the
        balance of experts by the accumulated `steps` of every call with a number of items."""
        accumulated = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = steps
        self.accelerator.gather_for_metrics = self.accelerator.gather
        try:
            yield
        finally:
            del self.accelerator.gather_for_metrics
            self.current_gradient_accumulation_steps = accumulated

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Evaluation: every rank of a group returns the loss of the whole sample."""
        step = super().prediction_step  # type: ignore[misc]
        if self.get_cp_size() == 1:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        if not prediction_loss_only:
            _reject("predict", "each rank has the logits of some tokens: evaluate the loss alone")
        loss, _, _ = step(model, inputs, prediction_loss_only, ignore_keys)
        dist.all_reduce(loss, group=self._cp_group)
        return loss / self.get_cp_size(), None, None

    @property
    def gather_function(self) -> Any:
        return self._gather_groups if self.get_cp_size() > 1 else self._gather_function

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        self._gather_function = function

    def _gather_groups(self, tensor: torch.Tensor) -> torch.Tensor:
        """(samples, ...) of an evaluation over all groups: one copy of what a group's ranks have,
        without the samples by which accelerate fills the last batch."""
        rows = self.accelerator.gather(tensor)
        of_ranks = rows.view(self.accelerator.num_processes, -1, *tensor.shape[1:])
        samples: torch.Tensor = of_ranks[:: self.get_cp_size()].flatten(0, 1)
        state = self.accelerator.gradient_state
        last = state.end_of_dataloader and state.remainder > 0
        return samples[: state.remainder] if last else samples

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's share of the batch's."""
        return float(super().floating_point_ops(inputs)) / self.get_cp_size()  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts the tokens of a group's sample once, not once for each of its ranks."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self.get_cp_size()


def _reject(setting: str, reason: str) -> NoReturn:
    raise ValueError(f"{setting} under a ring: {reason}")


def _liger_loss(args: Any) -> bool:
    """Whether Liger replaces the loss, which it does by default; `SFTTrainer` forbids it."""
    config: dict[str, bool] = args.liger_kernel_config or {}
    return config.get("fused_linear_cross_entropy", True) or config.get("cross_entropy", False)


def _refuse(trainer: Any) -> None:
    """Raises ValueError: a setting would give a wrong result, or has not been tried."""
    args, model = trainer.args, trainer.model
    text = getattr(model, "config", None)
    text = text.get_text_config() if text is not None else None
    attention = getattr(text, "_attn_implementation", None)
    if not isinstance(trainer.accelerator.parallelism_config, ContextParallel):
        _reject(
            "parallelism_config", "pass ringfa3.hf.ContextParallel(n), not accelerate's own class"
        )
    if attention != NAME:
        _reject(
            f"attn_implementation={attention!r}",
            f"load the model with attn_implementation={NAME!r}, or call "
            f"model.set_attn_implementation({NAME!r})",
        )
    if not getattr(trainer, "model_accepts_loss_kwargs", False):
        _reject(type(model).__name__, "its forward takes no **kwargs, so no ringfa3_plan")
    if args.world_size % trainer.get_cp_size():
        _reject(
            f"world_size={args.world_size}",
            "the trainer is not distributed: start it with torchrun; on CPUs pass use_cpu=True",
        )
    if getattr(args, "loss_type", "nll") != "nll":
        _reject(f"loss_type={args.loss_type!r}", "allowed is 'nll'")
    held_out = trainer.eval_dataset
    held_out = [*held_out.values()] if isinstance(held_out, dict) else [held_out]
    dispatched = getattr(args.accelerator_config, "dispatch_batches", None)
    streams = any(
        isinstance(x, torch.utils.data.IterableDataset) for x in [trainer.train_dataset, *held_out]
    )
    if streams and dispatched is not False:
        _reject(
            f"dispatch_batches={dispatched}",
            "accelerate's dispatcher gives the ranks of a group different samples: pass "
            "accelerator_config={'dispatch_batches': False}",
        )
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and getattr(peft, "is_prompt_learning", False):
        _reject(f"peft_type={peft.peft_type}", "each rank would add the prompt's tokens to its own")
    counts = getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False)
    if counts and not hasattr(trainer, "_track_num_input_tokens"):
        _reject(
            f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}",
            "transformers 4 counts a sample once for each of its ranks: pass 'no', or use 5",
        )
    for name, wrong, reason in (
        ("label_smoothing_factor", args.label_smoothing_factor, "pass 0"),
        ("compute_loss_func", trainer.compute_loss_func, "it would get this rank's logits alone"),
        ("compute_metrics", trainer.compute_metrics, "it would get this rank's logits alone"),
        ("torch_compile", args.torch_compile, "it has not been tried: pass False"),
        (
            "use_liger_kernel",
            args.use_liger_kernel and _liger_loss(args),
            "Liger's losses would replace the ring's: pass liger_kernel_config="
            "{'fused_linear_cross_entropy': False}",
        ),
        ("auto_find_batch_size", args.auto_find_batch_size, "ranks of a group could differ"),
        ("deepspeed", args.deepspeed, "its data sharding knows no CP group: use DDP or FSDP2"),
        ("n_gpu", args.n_gpu > 1 and args.n_gpu, "start one process for each GPU with torchrun"),
    ):
        if wrong:
            _reject(f"{name}={wrong}" if isinstance(wrong, str | int | float) else name, reason)
