"""If this fails, models with images get wrong positions or gradients under a ring. Text models with
positions on several axes (M-RoPE) and image tokens, over a ring.

The reference is transformers' eager attention on one process, whose model reads the pictures and
makes the positions itself: logits, and gradients of the vision tower too, summed over the ranks,
within 1e-12 of the largest number in float64. Gemma 3 and PaliGemma are in test_span_masks.py.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from ringfa3 import ContextPlan, Mask, plan_context
from tests.support.double import in_double
from tests.support.hf_models import EXPERTS, SIZES, Results, backward, difference, tokens
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12
IMAGE, BEGIN, END, VIDEO = 90, 91, 92, 93  # ids of a model's vocabulary
PATCHES = [[(1, 8, 4), (1, 4, 4)], [(1, 4, 8)]]  # the pictures of each document
LENGTHS = [30, 17]
VISION = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
          "video_token_id": VIDEO}  # fmt: skip
QWEN3 = {"hidden_size": 16, "out_hidden_size": 24, "intermediate_size": 16}
WIDE = {"head_dim": 8, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by class: text, vision
    "Qwen2VL": ({}, {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2}),
    "Qwen2_5_VL": ({}, {**QWEN3, "window_size": 8, "fullatt_block_indexes": [1]}),
    "Qwen3VL": (WIDE, {**QWEN3, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "Qwen3VLMoe": (
        {**WIDE, **MOE},
        {**QWEN3, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}


@lru_cache(None)
def model_of(name: str, attention: str) -> Any:
    text, vision = copy.deepcopy(MODELS[name])
    config = getattr(hf, f"{name}Config")(
        text_config={**SIZES, "rope_parameters": dict(ROPE), **text},
        vision_config={**VISION, **vision},
        **TOKENS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(hf, f"{name}ForConditionalGeneration")._from_config(
            config, attn_implementation=attention, **EXPERTS
        )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.2 * values + (parameter.data.round() if parameter.dim() == 1 else 0)
    return model.double().eval()


def document(number: int) -> dict[str, torch.Tensor]:
    """Text with pictures; a picture of (1, h, w) patches has h * w / 4 tokens."""
    ids = tokens(1, LENGTHS[number], seed=number).remainder(80) + 4
    at = 3
    for _, height, width in PATCHES[number]:
        size = height * width // 4
        ids[0, at], ids[0, at + 1 : at + 1 + size], ids[0, at + 1 + size] = BEGIN, IMAGE, END
        at += size + 5
    generator = torch.Generator().manual_seed(number)
    patches = sum(h * w for _, h, w in PATCHES[number])
    return {
        "input_ids": ids,
        "pixel_values": torch.randn((patches, 48), generator=generator),
        "image_grid_thw": torch.tensor(PATCHES[number]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


@lru_cache(None)
def eager(name: str, documents: int) -> Results:
    model = model_of(name, "eager")
    model.zero_grad()
    made = [model(**document(i), use_cache=False).logits for i in range(documents)]
    return backward(model, torch.cat(made, 1))


def of_all(model: Any, documents: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """What docs/huggingface.md makes of all tokens: inputs_embeds, 3D positions, and for Qwen3-VL
    where image tokens are and their further features."""
    found: list[list[torch.Tensor]] = []
    deep: list[list[tuple[torch.Tensor, ...]]] = []  # by document, layer, picture
    for inputs in map(document, range(documents)):
        ids, pixels = inputs["input_ids"], inputs.pop("pixel_values")
        images = model.model.get_image_features(pixels, inputs["image_grid_thw"])
        shown = ids == IMAGE
        embeds = model.get_input_embeddings()(ids)
        embeds = embeds.masked_scatter(shown[..., None], torch.cat(images.pooler_output))
        positions, _ = model.model.get_rope_index(**inputs)
        found.append([embeds, positions, shown])
        deep.append(getattr(images, "deepstack_features", None) or [])
    embeds, positions, shown = (list(x) for x in zip(*found, strict=True))
    whole = {
        "embeds": torch.cat(embeds, 1),
        "positions": torch.cat(positions, 2),
        "shown": torch.cat(shown, 1),
    }
    by_layer = zip(*deep, strict=True)
    return whole, [torch.cat([x for pictures in layer for x in pictures]) for layer in by_layer]


def shard_features(plan: ContextPlan, shown: torch.Tensor, deep: list[torch.Tensor]) -> Any:
    """The keywords of Qwen3-VL's text model for this rank's image tokens."""
    mine = plan.shard(shown, 1)
    number = plan.shard(shown.cumsum(1) - 1, 1)[mine]  # of each of them among all image tokens
    features = [x[number] for x in deep]
    return {"visual_pos_masks": mine, "deepstack_visual_embeds": features} if deep else {}


def _in_a_ring(group: dist.ProcessGroup, name: str, documents: int) -> float:
    """The largest difference of this rank's logits, and of gradients summed over the ranks."""
    model = model_of(name, "ringfa3")
    model.zero_grad()
    ends = [0, LENGTHS[0], sum(LENGTHS)][: documents + 1]
    plan = plan_context(ends, group)
    whole, deep = of_all(model, documents)
    positions = plan.shard(whole["positions"], 2)  # (3, 1, n)
    if documents > 1:  # a row of text positions: documents begin where it does
        positions = torch.cat([plan.positions[None, None], positions])
    states = model.model.language_model(
        inputs_embeds=plan.shard(whole["embeds"], 1),
        position_ids=positions,
        use_cache=False,
        ringfa3_plan=plan,
        **shard_features(plan, whole["shown"], deep),
    ).last_hidden_state
    logits = model.lm_head(states)
    expected, grads = eager(name, documents)
    generator = torch.Generator().manual_seed(1)  # as in `backward`
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    logits.backward(plan.shard(gradient, 1))
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in
             model.named_parameters()}  # fmt: skip
    flat = torch.cat([found[n].flatten() for n in grads])
    dist.all_reduce(flat, group=group)
    right = torch.cat([g.flatten() for g in grads.values()])
    assert any("visual" in n and g.abs().max() > 0 for n, g in grads.items())
    return max(difference(logits, plan.shard(expected, 1)), difference(flat, right))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("documents", [1, 2])
def test_rings_equal_eager(ranks: Ranks, world: int, documents: int) -> None:
    for name in MODELS:
        assert max(ranks.run(world, in_double, _in_a_ring, name, documents)) <= BOUND, name


def test_a_mask_on_one_device_takes_a_row_of_text_positions() -> None:
    """Two documents as a mask. Without the row nothing shows where positions begin again."""
    model, mask = model_of("Qwen2VL", "ringfa3"), Mask.documents([0, LENGTHS[0], sum(LENGTHS)])
    whole, _ = of_all(model, 2)
    text = torch.tensor(mask.positions).expand(1, 1, -1)
    given = {"inputs_embeds": whole["embeds"], "use_cache": False, "ringfa3_mask": mask}
    positions = torch.cat([text, whole["positions"]])
    states = model.model.language_model(position_ids=positions, **given).last_hidden_state
    assert difference(model.lm_head(states), eager("Qwen2VL", 2)[0]) <= BOUND
    with pytest.raises(ValueError, match=r"position_ids=\(3, 1, 47\) without a row of text, with"):
        model.model.language_model(position_ids=whole["positions"], **given)


def _without_positions(group: dist.ProcessGroup) -> str:
    """The whole model would make positions of this rank's tokens."""
    plan = plan_context(LENGTHS[0], group)
    ids = plan.shard(document(0)["input_ids"], 1)
    with pytest.raises(ValueError, match="rank") as raised:
        model_of("Qwen2VL", "ringfa3")(ids, use_cache=False, ringfa3_plan=plan)
    return str(raised.value)


def test_positions_have_to_be_given(ranks: Ranks) -> None:
    named = "position_ids=None with ringfa3_plan"
    assert all(named in text for text in ranks.run(2, _without_positions))
