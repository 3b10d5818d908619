"""One step over a ring against the same step on one rank: a user's model, batch and dtype."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringfa3.hf.batch import IGNORED, ShardedBatch, shard_batch
from ringfa3.hf.registration import NAME, register
from ringfa3.ring.prepare_call import default_group

EXACT = 5e-6  # allowed difference of a float32 gradient, relative to its largest element
FLOOR = 1e-6  # of the largest gradient of all: smaller gradients are rounding, and count as this
# In 16 bits: the allowed error against float32, over the error that one rank has itself. Ranks add
# float32 sums in another order, and a parameter type may have few elements.
GROWTH = 1.5
LOSS_16_BITS = 1e-2  # allowed relative difference of a loss in 16 bits: bfloat16 has 8 bits

Step = Callable[[Any, dict[str, Any], torch.Tensor], torch.Tensor]


@dataclass
class Verification:
    """What `verify` found, the same on every rank.

    world   ranks of the ring
    dtype   of the model
    loss    of one rank, and summed over the ring
    errors  by parameter type, as `model.layers.*.mlp.up_proj.weight`: the largest difference of a
            gradient, relative to the largest element of that type
    bounds  the largest allowed one, by type
    """

    world: int
    dtype: str
    loss: tuple[float, float]
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Parameter types with a wrong gradient, the worst first."""
        wrong = [name for name, error in self.errors.items() if not error <= self.bounds[name]]
        return sorted(wrong, key=lambda name: -self.errors[name] / self.bounds[name])

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        one, ring = self.loss
        figures = f"loss {ring:.7g} over a ring of {self.world}, {one:.7g} on one rank"
        if not self.wrong:
            name = max(self.errors, key=lambda name: self.errors[name] / self.bounds[name])
            worst = f"largest difference {self.errors[name]:.1e} of {self.bounds[name]:.1e} allowed"
            types = len(self.errors) - ("loss" in self.errors)
            return f"right: {figures}; {types} parameter types, {worst} ({name})"
        named = ", ".join(f"{name} {self.errors[name]:.1e}" for name in self.wrong[:5])
        more = f" and {len(self.wrong) - 5} more" if len(self.wrong) > 5 else ""
        return f"wrong: {figures}; these differ: {named}{more}"


def verify(
    model: Any,
    batch: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    step: Step | None = None,
    reference: str = NAME,
) -> Verification:
    """Compares the loss and every gradient of a step over a ring with those of one rank.

    One rank gets the whole batch without a plan, so its masks are transformers' own. In 16 bits
    both are judged against float32 on one rank. The model runs in evaluation mode, without
    dropout; its gradients are lost.

    Args:
        model: a model of transformers with equal weights on all ranks.
        batch: as for `shard_batch`, on every rank.
        group: the ring; default the default group.
        step: `step(model, inputs, num_labels)`, a rank's share of the loss, if your loop has
            another one than the sum of cross entropies over `num_labels`, and the balance of
            experts if the config asks for it. `inputs` has the labels shifted, and over a ring
            `ringfa3_plan`.
        reference: `attn_implementation` on one rank.

    Raises:
        ValueError: on every rank; the ring has one rank, the weights differ between ranks, or the
            model is refused under a ring.
    """
    register()
    group = group or default_group()
    if group is None or dist.get_world_size(group) == 1:
        raise ValueError("verify needs a ring of 2 or more ranks: start it with torchrun")
    step = step or _cross_entropy
    mine = shard_batch(batch, group)
    _check_weights(model, group)
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    try:
        model.set_attn_implementation(reference)
        whole = _whole(batch, mine)
        one, one_loss = _gradients(model, step, whole, mine.num_labels)
        exact = None
        if next(iter(one.values())).dtype not in (torch.float32, torch.float64):
            exact, _ = _gradients(copy.deepcopy(model).float(), step, whole, mine.num_labels)
        model.set_attn_implementation(NAME)
        ring, ring_loss = _gradients(model, step, mine.inputs, mine.num_labels, group)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
        model.zero_grad(set_to_none=True)
    dtype = str(next(iter(one.values())).dtype).removeprefix("torch.")
    found = Verification(mine.plan.world, dtype, (one_loss, ring_loss))
    found.errors = _errors(ring, exact or one)
    found.bounds = dict.fromkeys(found.errors, EXACT)
    if exact is not None:
        found.bounds = {k: max(EXACT, GROWTH * e) for k, e in _errors(one, exact).items()}
    found.errors["loss"] = abs(ring_loss - one_loss) / max(abs(one_loss), 1e-30)
    found.bounds["loss"] = EXACT if exact is None else LOSS_16_BITS
    return found


def _cross_entropy(model: Any, inputs: dict[str, Any], num_labels: torch.Tensor) -> torch.Tensor:
    labels = inputs.pop("shift_labels")
    outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
    logits = outputs.logits.flatten(0, 1)
    auxiliary: torch.Tensor | None = getattr(outputs, "aux_loss", None)
    total = F.cross_entropy(logits.float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    loss = total / num_labels
    if auxiliary is not None:
        loss = loss + model.config.get_text_config().router_aux_loss_coef * auxiliary
    return loss


def _whole(batch: Mapping[str, Any], mine: ShardedBatch) -> dict[str, Any]:
    """The inputs of one rank: the batch as it came, its labels shifted."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    kept = ("input_ids", "attention_mask", "position_ids")
    inputs = {name: batch[name] for name in kept if batch.get(name) is not None}
    return {**inputs, "labels": labels, "shift_labels": labels, "use_cache": False}


def _gradients(
    model: Any,
    step: Step,
    inputs: dict[str, Any],
    num_labels: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients by name on the CPU, and the loss; summed over the group."""
    model.zero_grad(set_to_none=True)
    loss = step(model, dict(inputs), num_labels)
    torch.autograd.backward(loss)
    total = loss.detach().double()
    if group is not None:
        dist.all_reduce(total, group=group)
    grads = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad  # of an expert without tokens
            if group is not None:
                dist.all_reduce(grad, group=group)
            grads[name] = grad.detach().cpu()
    return grads, float(total)


def _errors(grads: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """By parameter type: the largest difference over the largest element."""
    difference: dict[str, float] = {}
    largest: dict[str, float] = {}
    for name, grad in grads.items():
        if not grad.numel():
            continue
        of_all = re.sub(r"\.\d+\.", ".*.", name)
        expected = right[name].float()
        here = float((grad.float() - expected).abs().max())
        # `max` of Python drops a NaN that comes second
        difference[of_all] = here if here != here else max(difference.get(of_all, 0.0), here)
        largest[of_all] = max(largest.get(of_all, 0.0), float(expected.abs().max()))
    floor = max(FLOOR * max(largest.values(), default=0.0), 1e-30)
    return {name: difference[name] / max(largest[name], floor) for name in difference}


def _check_weights(model: Any, group: dist.ProcessGroup) -> None:
    """Raises ValueError, on every rank: the model has other weights on another rank."""
    sums = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()])
    ends = torch.cat([sums, -sums]).to(next(model.parameters()).device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if not torch.isfinite(ends).all():
        raise ValueError("the model has weights that are not finite: load another checkpoint")
    most, least = ends.chunk(2)
    if not torch.equal(most, -least):
        raise ValueError(
            "the model has other weights on other ranks: load the same checkpoint, or set the same "
            "seed before it is made"
        )
