"""If this fails, a model attends to other keys than its mask allows. Masks that users put together,
on one layer, and masks that models read as tensors.

The reference is transformers' sdpa attention under the same mask, in float64, within 1e-12; rows of
padding are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ringfa3.hf.attention import attention_forward
from tests.support.hf_models import model_of, shared_model

TOKENS = 9
# What transformers 4 needs in addition to make a mask.
OLD = {} if transformers.__version__ >= "5" else {"cache_position": torch.arange(TOKENS)}


def made_mask(config: Any, given: torch.Tensor | None) -> Any:
    return masking_utils.create_causal_mask(
        config, torch.zeros(2, 9, 24), attention_mask=given, past_key_values=None, **OLD
    )


def difference(visible: torch.Tensor, padded: bool, make: str, **keywords: Any) -> float:
    """The largest one between both attentions; visible: (b, TOKENS) bool, given if padded."""
    b, embeddings = len(visible), torch.zeros(len(visible), TOKENS, 24)
    q, k, v = torch.randn(3, b, 2, TOKENS, 8, dtype=torch.float64)
    layer = torch.nn.Identity()
    outs = []
    for name, attend in (("ringfa3", attention_forward), ("sdpa", sdpa_attention_forward)):
        config = model_of("llama", name).config
        mask = getattr(masking_utils, make)(
            config, embeddings, attention_mask=visible if padded else None, **OLD, **keywords
        )
        causal = {"is_causal": make == "create_causal_mask"}
        positions = {"position_ids": torch.arange(TOKENS)[None]}
        outs.append(attend(layer, q, k, v, mask, **causal, **positions)[0][visible])
    return float((outs[0] - outs[1]).abs().max())


@pytest.mark.parametrize("rows", [[[0] * 4 + [1] * 5], [[7] * 4 + [5] * 5, [5] * 2 + [7] * 7]])
def test_documents_of_a_mask_function(rows: list[list[int]]) -> None:
    """The positions that the layer is given too have no breaks. A label may return in another
    row, and labels may fall."""
    packed = masking_utils.packed_sequence_mask_function(torch.tensor(rows))
    visible = torch.ones(len(rows), TOKENS, dtype=torch.bool)
    given = {"past_key_values": None, "and_mask_function": packed}
    assert difference(visible, False, "create_causal_mask", **given) <= 1e-12


def test_two_mask_functions_of_the_same_documents() -> None:
    """Their labels differ; what counts is where these change."""
    numbers = [torch.tensor([[a] * 4 + [b] * 5]) for a, b in ((0, 1), (5, 7))]
    packed = masking_utils.and_masks(*map(masking_utils.packed_sequence_mask_function, numbers))
    visible = torch.ones(1, TOKENS, dtype=torch.bool)
    given = {"past_key_values": None, "and_mask_function": packed}
    assert difference(visible, False, "create_causal_mask", **given) <= 1e-12


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_window_to_the_left_alone_beside_padding(side: str) -> None:
    visible = torch.ones(2, TOKENS, dtype=torch.bool)
    visible[1, slice(3) if side == "left" else slice(-3, None)] = False
    window = masking_utils.sliding_window_overlay(2)
    assert difference(visible, True, "create_bidirectional_mask", and_mask_function=window) <= 1e-12


READS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda mask: mask.dtype,
    "to": lambda mask: mask.to(torch.bool),
    "slice": lambda mask: mask[:, :, :, :9],
    "==": lambda mask: mask == 0,
    "!=": lambda mask: mask != 0,
    "~": lambda mask: ~mask,
    "scores +": lambda mask: torch.zeros(1, 2, 9, 9) + mask,
    "+ scores": lambda mask: mask + torch.zeros(1, 2, 9, 9),
    "1 -": lambda mask: 1.0 - mask,
    "function": lambda mask: torch.where(mask, 0.0, 1.0),
    "list": lambda mask: torch.cat([mask, mask], -1),
    "len": len,
    "float": float,
    "all": lambda mask: torch.all(mask),
    "truth": bool,
}


@pytest.mark.parametrize("refused", [False, True], ids=["mask", "refused mask"])
@pytest.mark.parametrize("how", READS)
def test_a_mask_that_is_read_as_a_tensor(how: str, refused: bool) -> None:
    """A mask that was refused already names that reason."""
    config = shared_model("llama", "ringfa3").config
    given = torch.ones(2, 7) if refused else None
    mask = made_mask(config, given)
    shape = r"has 7 columns|has shape \(2, 7\)"
    with pytest.raises(ValueError, match=shape if refused else "'sdpa' or 'eager'"):
        READS[how](mask)


def test_a_mask_has_no_attributes_of_tensors() -> None:
    """As libraries that move arguments between devices ask."""
    config = shared_model("llama", "ringfa3").config
    mask = made_mask(config, None)
    assert not hasattr(mask, "to")
    assert copy.copy(mask).right == 0
