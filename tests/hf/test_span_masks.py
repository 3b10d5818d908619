"""If this fails, `ringfa3_mask` gives a model another mask than the user's. `ringfa3_mask`: models
of transformers with masks of spans, on one device and in rings.

The reference is transformers' eager attention in float64, whose mask the model makes itself:
logits and gradients within 1e-12 of the largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from ringfa3 import Mask, plan_context
from tests.support.double import in_double
from tests.support.hf_models import Results, backward, difference, tokens, worst_difference
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12
TOKENS, WINDOW, CHUNK = 22, 5, 8
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
IMAGES = torch.zeros(TOKENS, dtype=torch.long)
IMAGES[2:7] = IMAGES[11:15] = 1  # two images, longer than the window and not
PREFIX = 9


def gemma3() -> tuple[Any, Any]:
    layers = ["sliding_attention", "full_attention"]
    text = {**TEXT, "layer_types": layers, "sliding_window": WINDOW, "query_pre_attn_scalar": 6}
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return hf.Gemma3ForConditionalGeneration, config


def paligemma() -> tuple[Any, Any]:
    text = {**TEXT, "model_type": "gemma"}
    config = hf.PaliGemmaConfig(
        text_config=text, vision_config={**VISION, "projection_dim": 24}, projection_dim=24
    )
    return hf.PaliGemmaForConditionalGeneration, config


def llama4() -> tuple[Any, Any]:
    config = hf.Llama4TextConfig(
        **TEXT, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=CHUNK,
        layer_types=["chunked_attention", "full_attention"], attn_temperature_tuning=False,
    )  # fmt: skip
    return hf.Llama4ForCausalLM, config


def image_masks() -> dict[str, Mask]:
    full = Mask.documents(TOKENS).with_bidirectional([2, 11], [7, 15])
    return {
        "full_attention": full,
        "sliding_attention": full
        & Mask.documents(TOKENS, causal=False, window_size=(WINDOW - 1, None)),
    }


class Case(NamedTuple):
    """A model; what its own mask needs; the same mask as spans, one or by layer type."""

    config: Callable[[], tuple[Any, Any]]
    inputs: dict[str, torch.Tensor]
    spans: Any


CASES = {
    "gemma3": Case(gemma3, {"token_type_ids": IMAGES[None]}, image_masks()),
    "paligemma": Case(
        paligemma,
        {"token_type_ids": (torch.arange(TOKENS) >= PREFIX).long()[None]},
        Mask.documents(TOKENS).with_prefix([PREFIX]),
    ),
    "llama4": Case(
        llama4,
        {},
        {
            "chunked_attention": Mask.documents(TOKENS, chunk=CHUNK),
            "full_attention": Mask.documents(TOKENS),
        },
    ),
}


@lru_cache(None)
def model_of(name: str, attention: str) -> Any:
    """With the same weights for every implementation."""
    model_class, config = CASES[name].config()
    model = model_class._from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.2 * values + (parameter.data.round() if parameter.dim() == 1 else 0)
    return model.double().eval()


@lru_cache(None)
def eager(name: str) -> Results:
    model = model_of(name, "eager")
    model.zero_grad()
    return backward(model, model(tokens(1, TOKENS), use_cache=False, **CASES[name].inputs).logits)


@pytest.mark.parametrize("name", CASES)
def test_one_device_equals_eager(name: str) -> None:
    """Also where the mask is left out, it is none: the model's own is refused."""
    model, case = model_of(name, "ringfa3"), CASES[name]
    model.zero_grad()
    given = {"use_cache": False, **case.inputs}
    made = backward(model, model(tokens(1, TOKENS), ringfa3_mask=case.spans, **given).logits)
    assert worst_difference(made, eager(name)) <= BOUND
    with pytest.raises(ValueError, match="pass ringfa3_mask="):
        model(tokens(1, TOKENS), **given)


def _in_a_ring(group: dist.ProcessGroup, name: str) -> float:
    """The largest difference of this rank's logits, and of gradients summed over the ranks."""
    model, spans = model_of(name, "ringfa3"), CASES[name].spans
    of_all = spans if isinstance(spans, Mask) else spans["full_attention"]
    plan = plan_context(of_all, group)
    more = {} if of_all is spans else {"ringfa3_mask": spans}
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    states = text(
        inputs_embeds=plan.shard(model.get_input_embeddings()(tokens(1, TOKENS)), 1),
        position_ids=plan.positions[None],
        use_cache=False,
        ringfa3_plan=plan,
        **more,
    ).last_hidden_state
    logits = model.lm_head(states)
    model.zero_grad()
    expected, grads = eager(name)
    generator = torch.Generator().manual_seed(1)  # as in `backward`
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    logits.backward(plan.shard(gradient, 1))
    worst = difference(logits, plan.shard(expected, 1))
    found = dict(model.named_parameters())
    flat = torch.cat([found[n].grad.flatten() for n in grads])
    dist.all_reduce(flat, group=group)
    return max(worst, difference(flat, torch.cat([g.flatten() for g in grads.values()])))


@pytest.mark.parametrize("world", [2, 3])
def test_rings_equal_eager(ranks: Ranks, world: int) -> None:
    """The text model of each, whose plan has a mask."""
    for name in CASES:
        assert max(ranks.run(world, in_double, _in_a_ring, name)) <= BOUND, name


def test_rows_of_a_batch_are_one_mask() -> None:
    """Two rows of a tree and of documents; positions are the mask's. Reference: each alone."""
    masks = [Mask.tree([8, 6, 8], [-1, 0, 0]), Mask.documents(TOKENS).with_prefix([PREFIX])]
    model, ids = model_of("paligemma", "ringfa3"), tokens(2, TOKENS)
    both = Mask.pack(masks)
    positions = torch.tensor(both.positions).view(2, TOKENS) + 1
    made = model(ids, position_ids=positions, ringfa3_mask=both, use_cache=False).logits
    for row, mask in enumerate(masks):
        given = {"position_ids": positions[[row]], "ringfa3_mask": mask, "use_cache": False}
        assert difference(made[row], model(ids[[row]], **given).logits[0]) <= BOUND


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("gemma3", {"ringfa3_mask": Mask.documents(TOKENS)}, "layers of .* give a dict"),
        ("gemma3", {"ringfa3_mask": {"full_attention": Mask.documents(TOKENS)}}, "a layer is"),
        ("paligemma", {"ringfa3_mask": {"full": Mask.documents(TOKENS)}}, "a layer is None"),
        ("paligemma", {"ringfa3_mask": [0, TOKENS]}, "must be a ringfa3.Mask, got list"),
        ("paligemma", {"ringfa3_mask": Mask.documents(9)}, "has 9 queries and 9 keys"),
        (
            "paligemma",
            {
                "ringfa3_mask": Mask.documents(TOKENS),
                "attention_mask": (torch.arange(TOKENS) < 20)[None],
            },
            "hides tokens, and ringfa3_mask",
        ),
        (
            "paligemma",
            {"ringfa3_mask": Mask.documents([0, 9, TOKENS])},
            "position_ids=None, with a ringfa3_mask .*: token 9 has 9, not 0: pass position_ids=",
        ),
    ],
)
def test_what_does_not_fit_is_refused(name: str, inputs: dict[str, Any], message: str) -> None:
    model = model_of(name, "ringfa3")
    with pytest.raises((TypeError, ValueError), match=message):
        model(tokens(1, TOKENS), use_cache=False, **inputs)
