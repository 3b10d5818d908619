"""If this fails, packed documents attend to each other. Packed documents with a mask that hides
nothing, as collators give it.

The reference is transformers' sdpa attention on the same `position_ids` without a mask, which keeps
documents apart: logits and gradients within 1e-12 in float64.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import masking_utils

from ringfa3 import plan_context
from ringfa3.hf import documents
from ringfa3.hf.ring_layer import found_by_plan
from tests.support.hf_models import (
    SIZES,
    difference,
    results,
    shared_model,
    tokens,
    worst_difference,
)

ROWS = [[7, 1, 12], [3, 17]]  # lengths of documents
BOUND = 1e-12


def positions_of(*rows: list[int]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def worst(
    ours: Any, theirs: Any, positions: torch.Tensor, ids: torch.Tensor, **given: Any
) -> float:
    expected = results(theirs, ids, position_ids=positions)
    return worst_difference(results(ours, ids, position_ids=positions, **given), expected)


@pytest.mark.parametrize("given", ["mask", "mask and cu_seq_lens"])
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one row", "two rows"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_mask_of_ones(name: str, rows: list[list[int]], given: str) -> None:
    ids, positions = tokens(len(rows), 20), positions_of(*rows)
    inputs = {"attention_mask": torch.ones_like(ids)}
    if given != "mask":
        ends = itertools.accumulate(itertools.chain(*rows))
        cu = torch.tensor([0, *ends], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    models = [shared_model(name, x, torch.float64) for x in ("ringfa3", "sdpa")]
    assert worst(*models, positions, ids, **inputs) <= BOUND


def test_one_row_of_positions_for_a_batch() -> None:
    ids, positions = tokens(2, 20), positions_of(ROWS[0])
    models = [shared_model("llama", x, torch.float64) for x in ("ringfa3", "sdpa")]
    assert worst(*models, positions, ids, attention_mask=torch.ones_like(ids)) <= BOUND


@pytest.mark.parametrize("name", ["Qwen2VLText", "Qwen2_5_VLText", "Qwen3VLText"])
def test_text_rows_of_multimodal_positions(name: str) -> None:
    """position_ids (4, b, s): those of the text, then time, height and width, which may differ."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, "head_dim": 6, "rope_parameters": rope}
    )
    models = []
    for implementation in ("ringfa3", "sdpa"):
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{name}Model")
        models.append(
            model_class._from_config(
                copy.deepcopy(config), attn_implementation=implementation
            ).double()
        )
    text = positions_of(*ROWS)
    positions = torch.stack((text, text, text // 2, text // 3))
    outs = [
        model(tokens(2, 20), position_ids=positions, use_cache=False, **given).last_hidden_state
        for model, given in zip(models, ({"attention_mask": torch.ones(2, 20)}, {}), strict=True)
    ]
    assert difference(*outs) <= BOUND


def test_values_are_read_once_a_forward() -> None:
    """Of mask and positions together, by all layers, their backward included."""
    ids, positions = tokens(2, 20), positions_of(*ROWS)
    model = shared_model("llama", "ringfa3")
    with mock.patch.object(documents, "_on_host", wraps=documents._on_host) as read:
        results(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert read.call_count == 1


def test_a_plan_spares_transformers_the_search_for_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which copies from a GPU. Logits are those that it finds documents for, 1e-12."""
    searched: list[torch.Tensor] = []

    def find(position_ids: torch.Tensor) -> Any:
        searched.append(position_ids)
        return original.__wrapped__(position_ids)

    model, ids = shared_model("gemma3", "ringfa3", torch.float64), tokens(1, 20)
    original = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", found_by_plan(find))
    plan = plan_context([0, *itertools.accumulate(ROWS[0])], (0, 1))
    positions = plan.positions[None]
    given: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    ours = model(ids, **given, ringfa3_plan=plan).logits
    assert all(x is not positions for x in searched)  # but those of the check of the model
    theirs = model(ids, **given).logits  # after a call with the plan
    assert any(x is positions for x in searched)
    assert difference(ours, theirs) <= BOUND


def test_left_padding_whose_positions_begin_again_in_padding() -> None:
    """As generate makes them; the positions of visible tokens go up by one. sdpa, 1e-12."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    given = {"attention_mask": mask, "position_ids": positions}
    made = [
        results(shared_model("llama", x, torch.float64), ids, mask.bool(), **given)
        for x in ("ringfa3", "sdpa")
    ]
    assert worst_difference(*made) <= BOUND


def test_a_token_after_packed_documents_in_a_cache() -> None:
    """generate gives a mask of ones with each token."""
    model, ids = shared_model("llama", "ringfa3"), tokens(1, 21)
    ones, positions = torch.ones_like(ids), positions_of(ROWS[0])
    cache = model(ids[:, :20], attention_mask=ones[:, :20], position_ids=positions).past_key_values
    given = {"attention_mask": ones, "position_ids": torch.tensor([[12]])}
    with pytest.raises(ValueError, match="position_ids begin with 12 after 20 cached tokens"):
        model(ids[:, 20:], past_key_values=cache, **given)
