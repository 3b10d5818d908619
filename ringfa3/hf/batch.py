"""A batch of a trainer as one rank's tokens: documents from its masks, labels shifted, a plan."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringfa3.hf.checks import uncompiled
from ringfa3.hf.documents import documents_of
from ringfa3.hf.ring_layer import know_positions
from ringfa3.planning.communication import upload
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.ring.group import RingGroup
from ringfa3.ring.prepare_call import default_group
from ringfa3.schedules.settings import Settings

IGNORED = -100  # the label of a token without loss, as in transformers
TENSORS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
LENGTHS = "cu_seq_lens_q"  # documents, for other attention implementations
REPEATED = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # the same documents again
PASSED = ("num_items_in_batch", "use_cache")  # not of the batch
READING = "ringfa3_reading"  # the entry of a batch with its `Reading`


class ShardedBatch(NamedTuple):
    """One rank's part of a batch that all ranks of a CP group hold.

    inputs      keywords of a model: input_ids, labels, shift_labels, position_ids (1, t), t local
                tokens; use_cache=False; ringfa3_plan. `labels` are shifted too
    plan        of the batch's documents
    num_labels  () int64: labels with loss of the whole batch
    """

    inputs: dict[str, Any]
    plan: ContextPlan
    num_labels: torch.Tensor


@dataclass(frozen=True)
class Reading:
    """What the host has to know of a batch.

    `read_batch` copies tensors of a GPU, for which the host waits. So a collator reads a batch
    before it moves there. No tuple: accelerate would move that to the device, too.

    problem     why no rank can compute the batch; None: nothing
    digests     by entry: shape and checksum of its values, on which ranks agree
    cumulative  lengths of the documents
    tokens      (t,) int64 on the CPU: those of the b * s tokens that are no padding; None: all
    """

    problem: Exception | None
    digests: dict[str, str]
    cumulative: list[int]
    tokens: torch.Tensor | None


def read_batch(inputs: Mapping[str, Any]) -> Reading:
    """The reading of a batch, with arguments as in `shard_batch`. It raises nothing."""
    try:
        _check(inputs)
        digests = {name: _digest(inputs[name]) for name in _given(inputs)}
        return Reading(None, digests, *_documents(inputs))
    except Exception as problem:  # raised by `shard_batch`, on all ranks
        return Reading(problem, {}, [], None)


@uncompiled
def shard_batch(
    inputs: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    kv_budget: int | None = None,
) -> ShardedBatch:
    """This rank's part of a batch, of which every rank of the group holds all.

    Documents are those that transformers reads from the batch: rows, packed `position_ids` that
    begin again, `cu_seq_lens_q`, and what `attention_mask` shows of a row. Padding is dropped. A
    label belongs to the token before it in its row, as in transformers.

    The loss of a rank is its share: divide the sum over its labels by `num_labels`, and sum losses
    and gradients over the group. A model does so with `num_items_in_batch=num_labels`.

    Args:
        inputs: input_ids (b, s); labels or shift_labels (b, s); maybe attention_mask (b, s), not
            0 for tokens, position_ids (b or 1, s), and cu_seq_lens_q (n + 1,).
        group: the CP group; default the default group.
        kv_budget: as in `plan_context`.

    Raises:
        ValueError: on every rank; the ranks hold different batches, an entry is not expressible, or
            kv_budget is too small for the batch.
    """
    group = group or default_group()
    reading = inputs.get(READING) or read_batch(inputs)
    if group is not None and dist.get_world_size(group) > 1:
        RingGroup.of(group).agree(Settings(reading.digests), reading.problem, anew=True)
    elif reading.problem is not None:
        raise reading.problem
    return _shard(inputs, reading, group, kv_budget)


def _given(inputs: Mapping[str, Any]) -> list[str]:
    return [name for name in (*TENSORS, LENGTHS) if inputs.get(name) is not None]


def _digest(tensor: torch.Tensor) -> str:
    """Shape and checksum of a tensor's values."""
    values = tensor.detach().to("cpu", torch.int64).contiguous()
    return f"{tuple(tensor.shape)}, checksum {zlib.crc32(values.numpy().tobytes()):08x}"


def _check(inputs: Mapping[str, Any]) -> None:
    """Raises ValueError: an entry that the ring would ignore, or that is no tensor of tokens."""
    allowed = {*TENSORS, LENGTHS, *REPEATED, *PASSED, READING}
    unknown = [name for name, value in inputs.items() if name not in allowed and value is not None]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: a batch under a ring has {', '.join(TENSORS)} alone: leave "
            "other columns out of the dataset or the collator"
        )
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must be a (batch, tokens) tensor, not {_shape(ids)}")
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError("labels are missing: a training batch has labels or shift_labels")
    if inputs.get("seq_idx") is not None and not {"position_ids", LENGTHS} & {*_given(inputs)}:
        raise ValueError(f"seq_idx alone has the documents: give position_ids or {LENGTHS} too")
    for name in _given(inputs):
        x = inputs[name]
        if name == LENGTHS:
            continue
        rows = (ids.shape[0], 1) if name == "position_ids" else (ids.shape[0],)
        if not isinstance(x, torch.Tensor) or x.shape not in [(n, ids.shape[1]) for n in rows]:
            raise ValueError(
                f"{name} must have the shape {tuple(ids.shape)} of input_ids under a ring, not "
                f"{_shape(x)}"
            )
        if name != "attention_mask" and (x.is_floating_point() or x.is_complex()):
            raise ValueError(f"{name} has dtype {x.dtype}: give whole numbers")


def _shape(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def _documents(inputs: Mapping[str, Any]) -> tuple[list[int], torch.Tensor | None]:
    """`cumulative` and `tokens` of a `Reading`.

    Raises ValueError as `documents_of` does, and for labels of padding.
    """
    ids, mask, positions = (inputs.get(n) for n in ("input_ids", "attention_mask", "position_ids"))
    assert ids is not None
    batch, tokens = ids.shape
    shown = None if mask is None else mask.cpu() != 0
    packed = None if positions is None else positions.cpu()
    found = documents_of(batch, tokens, tokens, True, shown, packed, 1)
    if found is not None:
        ends = torch.unique(found.cu_q)
    else:
        ends = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int64, device="cpu")
    if (lengths := inputs.get(LENGTHS)) is not None:
        given = torch.unique(lengths.cpu().long())
        if positions is None and mask is None and given[[0, -1]].tolist() == [0, ids.numel()]:
            ends = given
        if not torch.equal(given, ends):
            raise ValueError(
                f"{LENGTHS} has documents at {given[:4].tolist()} ..., the rest of the batch at "
                f"{ends[:4].tolist()} ...: give the same documents"
            )
    if shown is None or bool(shown.all()):
        return ends.tolist(), None
    shown = shown.flatten()
    labels = _shifted_labels(inputs).flatten().cpu()
    if (lost := int((labels[~shown] != IGNORED).sum())) > 0:
        raise ValueError(
            f"labels: {lost} would be predicted from tokens that attention_mask hides: set the "
            f"labels of padding, and of the first token after it, to {IGNORED}"
        )
    if not shown.any():
        raise ValueError("attention_mask hides all tokens of the batch")
    before = F.pad(shown.cumsum(0), (1, 0))  # tokens that are no padding before each token
    return torch.unique(before[ends]).tolist(), shown.nonzero()[:, 0]


def _shifted_labels(inputs: Mapping[str, Any]) -> torch.Tensor:
    labels: torch.Tensor | None = inputs.get("shift_labels")
    if labels is None:
        labels = F.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:]
    return labels


def _shard(
    inputs: Mapping[str, Any],
    reading: Reading,
    group: dist.ProcessGroup | None,
    kv_budget: int | None,
) -> ShardedBatch:
    """No step waits for a GPU."""
    ids, labels = inputs["input_ids"].flatten(), _shifted_labels(inputs).flatten()
    tokens, cumulative = reading.tokens, reading.cumulative
    plan = plan_context(cumulative, group, kv_budget=kv_budget)
    if min(plan.tokens_per_rank) == 0:
        # transformers computes no mask of 0 tokens: a document without loss gives each rank some.
        more = 2 * plan.world
        plan = plan_context([*cumulative, cumulative[-1] + more], group, kv_budget=kv_budget)
        if tokens is not None:
            added = torch.arange(len(ids), len(ids) + more, dtype=torch.int64, device="cpu")
            tokens = torch.cat([tokens, added])
        ids, labels = F.pad(ids, (0, more)), F.pad(labels, (0, more), value=IGNORED)
    index = plan.token_index if tokens is None else plan.shard(tokens)
    index, positions = (upload(x, ids.device) for x in (index, plan.positions))
    mine = labels[index][None]
    know_positions(plan, positions := positions[None])
    return ShardedBatch(
        {
            "input_ids": ids[index][None],
            "labels": mine,
            "shift_labels": mine,
            "position_ids": positions,
            "use_cache": False,
            "ringfa3_plan": plan,
        },
        plan,
        (labels != IGNORED).sum(),
    )
