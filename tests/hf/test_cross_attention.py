"""If this fails, encoder-decoder models attend to the wrong keys. Encoder-decoder models: the keys
of cross-attention are as many as the encoder's tokens.

The reference is transformers' sdpa attention, or eager where a model has no sdpa, in float64:
logits and gradients where the decoder's mask is 1, within 1e-12.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.encoder_decoders import model_of, reference_of
from tests.support.hf_models import Results, backward, tokens, worst_difference

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12
MODELS = [
    *(f"{x}ForConditionalGeneration" for x in ("Bart", "M2M100", "T5Gemma", "Moonshine")),
    "MarianMTModel",
]
SIDES = [("none", "none"), ("right", "none"), ("none", "right"), ("right", "left")]  # of padding


def mask_of(side: str, columns: int, hidden: int) -> torch.Tensor | None:
    """Row 0 has no padding."""
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[1, slice(hidden) if side == "left" else slice(-hidden, None)] = 0
    return None if side == "none" else mask


def encoder_inputs(name: str, side: str, columns: int) -> dict[str, Any]:
    if name.startswith("Moonshine"):  # 6,000 samples are 14 tokens
        sound = torch.randn(2, 6000, generator=torch.Generator().manual_seed(0)).double()
        return {"input_values": sound, "attention_mask": mask_of(side, 6000, 2000)}
    return {"input_ids": tokens(2, columns), "attention_mask": mask_of(side, columns, 2)}


def results_of(name: str, attention: str, sides: tuple[str, str], lengths: list[int]) -> Results:
    model, mask = model_of(name, attention), mask_of(sides[1], lengths[1], 3)
    model.zero_grad()
    logits = model(
        **encoder_inputs(name, sides[0], lengths[0]),
        decoder_input_ids=tokens(2, lengths[1], seed=1),
        decoder_attention_mask=mask,
        use_cache=False,
    ).logits
    return backward(model, logits if mask is None else logits[mask.bool()])


@pytest.mark.parametrize("lengths", [[11, 7], [5, 9]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equals_sdpa(name: str, lengths: list[int]) -> None:
    """With padding in the encoder, the decoder, both and neither."""
    for sides in SIDES:
        made = [results_of(name, x, sides, lengths) for x in ("ringfa3", reference_of(name))]
        assert worst_difference(*made) <= BOUND, sides


@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str) -> None:
    """Five greedy tokens through a dynamic cache: those of the reference."""
    inputs = encoder_inputs(name, "right", 9)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1}
    models = [model_of(name, x) for x in ("ringfa3", reference_of(name))]
    made = [model.generate(**inputs, **settings) for model in models]
    assert made[0].shape == (2, 6)
    assert torch.equal(*made)
