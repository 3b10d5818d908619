"""If this fails, a trainer under a ring trains on wrong tokens or labels. `shard_batch`: a
trainer's batch as a rank's tokens, labels and plan."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfa3.hf import shard_batch
from ringfa3.hf.batch import READING, read_batch
from ringfa3.hf.ring_layer import _check_positions
from tests.support.ranks import Ranks

IDS = torch.arange(1, 13).view(2, 6)
LABELS = IDS.clone()


def batch(**others: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "labels": LABELS, **others}


def pairs(inputs: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """(token, its label, its position) of every token, in order."""
    columns = (inputs[n].flatten().tolist() for n in ("input_ids", "shift_labels", "position_ids"))
    return sorted(zip(*columns, strict=True))


def test_rows_are_documents_and_labels_belong_to_the_token_before() -> None:
    inputs, plan, num_labels = shard_batch(batch())
    assert plan.lengths.tolist() == [6, 6]
    assert pairs(inputs) == [
        (token, -100 if token in (6, 12) else token + 1, (token - 1) % 6) for token in range(1, 13)
    ]
    assert int(num_labels) == 10


def test_packed_positions_begin_documents() -> None:
    positions = torch.tensor([[0, 1, 0, 0, 1, 2]])
    _, plan, _ = shard_batch(batch(position_ids=positions))
    assert plan.lengths.tolist() == [2, 1, 3, 2, 1, 3]  # of one row for all
    _, plan, _ = shard_batch(batch(position_ids=torch.stack([positions[0], torch.arange(6)])))
    assert plan.lengths.tolist() == [2, 1, 3, 6]


def test_cumulative_lengths_begin_documents() -> None:
    """As for flash attention in transformers; also of documents that position_ids do not have."""
    lengths = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    repeated = {"cu_seq_lens_k": lengths, "max_length_q": 7, "seq_idx": IDS}
    _, plan, _ = shard_batch(batch(cu_seq_lens_q=lengths, **repeated))
    assert plan.lengths.tolist() == [4, 1, 7]
    positions = torch.tensor([[0, 1, 0, 0, 1, 2]])
    lengths = torch.tensor([0, 2, 3, 6, 8, 9, 12])
    _, plan, _ = shard_batch(batch(cu_seq_lens_q=lengths, position_ids=positions))
    assert plan.lengths.tolist() == [2, 1, 3, 2, 1, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_dropped(side: str) -> None:
    mask, labels = torch.ones(2, 6, dtype=torch.long), LABELS.clone()
    hidden = slice(0, 2) if side == "left" else slice(4, 6)
    mask[1, hidden] = 0
    labels[1, hidden] = -100
    if side == "left":
        labels[1, 2] = -100  # it would be predicted from padding
    inputs, plan, num_labels = shard_batch(batch(attention_mask=mask, labels=labels))
    assert plan.lengths.tolist() == [6, 4]
    first = 9 if side == "left" else 7
    kept = [*range(1, 7), *range(first, first + 4)]
    assert [token for token, _, _ in pairs(inputs)] == kept
    assert int(num_labels) == 8


def test_shift_labels_are_taken_as_they_are() -> None:
    shifted = LABELS.flip(1)
    inputs, _, num_labels = shard_batch({"input_ids": IDS, "shift_labels": shifted})
    assert {token: label for token, label, _ in pairs(inputs)} == dict(
        zip(IDS.flatten().tolist(), shifted.flatten().tolist(), strict=True)
    )
    assert int(num_labels) == 12


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"seq_idx": IDS}, "seq_idx alone has the documents: give position_ids or cu_seq_lens_q"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5])},
            r"cu_seq_lens_q has documents at \[0, 5\] \.\.\., the",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "position_ids": torch.arange(6)[None]},
            r"documents at \[0, 5, 12\] \.\.\., the rest of the batch at \[0, 6, 12\]",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 12]), "attention_mask": torch.ones(2, 6)},
            r"documents at \[0, 12\] \.\.\., the rest of the batch at \[0, 6, 12\]",
        ),
        ({"token_type_ids": IDS}, "token_type_ids: a batch under a ring has input_ids, labels"),
        ({"pixel_values": IDS, "mm": 1}, "pixel_values, mm: a batch under a ring"),
        ({"input_ids": IDS[0]}, r"input_ids must be a \(batch, tokens\) tensor, not shape \(6,\)"),
        ({"input_ids": IDS[:, :0]}, r"input_ids must be a .* not shape \(2, 0\)"),
        ({"input_ids": None}, "input_ids must be a .* not NoneType"),
        ({"labels": None}, "labels are missing"),
        ({"labels": IDS.float()}, r"labels has dtype torch\.float32: give whole numbers"),
        ({"labels": IDS[:1]}, r"labels must have the shape \(2, 6\)"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "attention_mask must have the shape"),
        ({"position_ids": torch.zeros(3, 2, 6)}, "position_ids must have the shape"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 2)}, "hides tokens between"),
        ({"attention_mask": torch.zeros(2, 6)}, "labels: 10 would be predicted from tokens that"),
        (
            {"attention_mask": torch.zeros(2, 6), "labels": torch.full((2, 6), -100)},
            "attention_mask hides all tokens",
        ),
    ],
)
def test_what_is_not_expressible_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        shard_batch(batch(**given))


@pytest.mark.parametrize("hidden", [None, slice(10, 12), slice(0, 11)])
def test_a_batch_that_was_read_before_is_not_read_again(hidden: slice | None) -> None:
    """Tensors of the device "meta" have no values: as on a GPU, looking at them would cost."""
    given = {"input_ids": IDS.view(1, 12), "labels": LABELS.view(1, 12)}
    if hidden is not None:
        mask = torch.ones(1, 12, dtype=torch.long)
        mask[:, hidden] = 0
        given |= {"attention_mask": mask, "labels": given["labels"].where(mask > 0, -100)}
        given["labels"][0, hidden.stop % 12] = -100  # it would be predicted from padding
    expected, plan, _ = shard_batch(given, None)
    reading = pickle.loads(pickle.dumps(read_batch(given)))  # as from a worker of a loader
    moved = {name: x.to("meta") for name, x in given.items()}
    inputs, same, num_labels = shard_batch({**moved, READING: reading})
    assert same is plan
    assert num_labels.is_meta
    shapes = {name: x.shape for name, x in expected.items() if isinstance(x, torch.Tensor)}
    assert {name: inputs[name].shape for name in shapes} == shapes
    _check_positions(plan, inputs["position_ids"])  # does not look either
    with pytest.raises(NotImplementedError, match="meta"):
        _check_positions(plan, plan.positions[None].to("meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        shard_batch(moved)


def test_a_wrong_batch_is_read_without_an_error_and_refused_later() -> None:
    reading = pickle.loads(pickle.dumps(read_batch(batch(labels=LABELS[:1]))))
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 6\)"):
        shard_batch(batch(**{READING: reading}))


def _alone(group: dist.ProcessGroup, tokens: int, padding: int = 0) -> tuple[int, list[int], int]:
    ids = torch.arange(1, tokens + padding + 1)[None]
    given = {"input_ids": ids, "labels": ids.where(ids <= tokens, -100)}
    if padding:
        given["attention_mask"] = ids <= tokens
    inputs, plan, num_labels = shard_batch(given, group, kv_budget=100)
    assert plan.kv_budget == 100
    return inputs["input_ids"].shape[1], plan.lengths.tolist(), int(num_labels)


def test_a_rank_never_has_no_token(ranks: Ranks) -> None:
    """transformers fails there. A document without loss is added."""
    for padding in (0, 3):
        found = ranks.run(3, _alone, 2, padding)
        assert all(tokens > 0 for tokens, _, _ in found)
        assert [(lengths, labels) for _, lengths, labels in found] == [([2, 6], 1)] * 3
    assert [lengths for _, lengths, _ in ranks.run(3, _alone, 7)] == [[7]] * 3


def _unequal(group: dist.ProcessGroup, what: str) -> str:
    rank, given = dist.get_rank(group), batch()
    if what == "labels" and rank == 1:
        given["labels"] = LABELS.flip(0)
    if what == "mask" and rank == 0:
        given["attention_mask"] = torch.ones(2, 6)
    if what == "wrong" and rank == 1:
        given["labels"] = LABELS[:1]
    with pytest.raises(ValueError, match="rank") as raised:
        shard_batch(given, group)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("labels", "labels differs between the ranks of the CP group: rank 0: (2, 6), checksum"),
        ("mask", "attention_mask differs between the ranks of the CP group"),
        ("wrong", "rank 1: labels must have the shape (2, 6)"),
    ],
)
def test_unequal_batches_raise_on_every_rank(ranks: Ranks, what: str, problem: str) -> None:
    first, second = ranks.run(2, _unequal, what)
    assert first == second
    assert problem in first
