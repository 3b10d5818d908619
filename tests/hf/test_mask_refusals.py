"""If this fails, a mask is ignored without an error. What `ringfa3_mask` and `ringfa3_plan` cannot
reach is a ValueError: towers, cross-attention, layers without attention, and positions that differ
from the mask's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from ringfa3 import Mask, plan_context
from ringfa3.hf.attention import attention_forward
from tests.support.double import in_double
from tests.support.hf_models import EXPERTS, SIZES, difference, tokens
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12  # relative to the largest number
TOKENS = 22
IDS = tokens(1, TOKENS)
TREE = Mask.tree([8, 6, 8], [-1, 0, 0])
PATHS = [[*range(14)], [*range(8), *range(14, TOKENS)]]  # rows from the root to each leaf
FULL = Mask.documents(TOKENS)
SEQ2SEQ = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "patch_size": 4,
          "spatial_merge_size": 2, "temporal_patch_size": 1, "mlp_ratio": 2}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def tiny(model: str, config: str, attention: str = "ringfa3", **changes: Any) -> Any:
    settings = copy.deepcopy({**SIZES, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(hf, config)(**settings)
        return getattr(hf, model)._from_config(made, attn_implementation=attention, **EXPERTS)


def bart() -> Any:
    return tiny("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ)


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    text = {**SIZES, "rope_parameters": rope}
    return tiny(
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", text_config=text, vision_config=VISION,
        image_token_id=90, vision_start_token_id=91, vision_end_token_id=92, video_token_id=93,
    )  # fmt: skip


def llama4(attention: str = "ringfa3") -> Any:
    """Its attention gets no position_ids. The chunk is longer than the tokens."""
    return tiny(
        "Llama4ForCausalLM", "Llama4TextConfig", attention, head_dim=8, intermediate_size_mlp=32,
        num_local_experts=2, attention_chunk_size=64, attn_temperature_tuning=False,
        layer_types=["chunked_attention", "full_attention"],
    ).eval()  # fmt: skip


def of_llama4(mask: Mask) -> dict[str, Mask]:
    return {"full_attention": mask, "chunked_attention": mask}


def with_image() -> dict[str, torch.Tensor]:
    """A picture of 4 x 4 patches, which are 4 tokens."""
    ids = IDS.clone()
    ids[0, 3], ids[0, 4:8], ids[0, 8] = 91, 90, 92
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 3 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def bert_decoder() -> Any:
    return tiny("BertLMHeadModel", "BertConfig", is_decoder=True, add_cross_attention=True)


def encoder_states() -> torch.Tensor:
    return torch.randn(1, TOKENS, SIZES["hidden_size"])


OTHERS: dict[str, tuple[Any, Any, str]] = {  # model, inputs, what is named
    "Bart": (
        bart,
        lambda: {"input_ids": IDS, "decoder_input_ids": IDS},
        "an encoder-decoder, whose encoder, decoder and cross-attention have different tokens: ",
    ),
    "vision tower": (qwen2_vl, with_image, "takes no input_ids"),
    "cross-attention": (
        bert_decoder,
        lambda: {"input_ids": IDS, "encoder_hidden_states": encoder_states()},
        "encoder_hidden_states with",
    ),
}


@pytest.mark.parametrize("keyword", ["ringfa3_mask", "ringfa3_plan"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_with_other_tokens_is_refused(name: str, keyword: str) -> None:
    """Also where the numbers of tokens are equal, so that no shape shows it."""
    make, inputs, named = OTHERS[name]
    plan = plan_context(FULL)
    given = {
        "ringfa3_mask": {"ringfa3_mask": FULL},
        "ringfa3_plan": {"ringfa3_plan": plan, "position_ids": plan.positions[None]},
    }[keyword]
    if name == "Bart":
        given.pop("position_ids", None)
    with pytest.raises(ValueError, match=f"{keyword}") as raised:
        make()(**inputs(), **given)
    assert named in str(raised.value)


def test_attention_of_an_encoder_decoder_is_refused() -> None:
    """Without the check of a call."""
    x = torch.randn(1, 2, TOKENS, 8)
    module = torch.nn.Module()
    module.config = hf.BartConfig(**SEQ2SEQ)
    with pytest.raises(ValueError, match="Module of an encoder-decoder, which attends to tokens"):
        attention_forward(module, x, x, x, None, ringfa3_mask=FULL)


@pytest.mark.parametrize("layer_type", ["linear_attention", "conv", "hybrid"])
def test_attention_next_to_layers_without_masks_is_refused(layer_type: str) -> None:
    x = torch.randn(1, 2, TOKENS, 8)
    module = torch.nn.Module()
    module.config = SimpleNamespace(layer_types=[layer_type, "full_attention"])
    module.layer_idx = 1
    masks = {"full_attention": FULL}
    with pytest.raises(ValueError, match=rf"layers of \['{layer_type}'\], which have no mask"):
        attention_forward(module, x, x, x, None, ringfa3_mask=masks)


HYBRIDS: dict[str, tuple[str, dict[str, Any], str]] = {  # config, changes, layer
    "LFM2": ("Lfm2Config", {"layer_types": ["full_attention", "conv"]}, "Lfm2ShortConv"),
    "Falcon-H1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 48, "head_dim": 8}, "FalconH1Mixer"),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA, "Qwen3NextGatedDeltaNet"),
}


def hybrid(name: str) -> Any:
    config, changes, _ = HYBRIDS[name]
    return tiny(config.replace("Config", "ForCausalLM"), config, **changes)


@pytest.mark.parametrize("after_a_ring", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_without_masks_are_refused_on_one_device(name: str, after_a_ring: bool) -> None:
    """A ring replaces the forward of gated delta nets, of which a mask has to be refused too."""
    model, plan = hybrid(name), plan_context(TOKENS)
    if after_a_ring and name == "Qwen3-Next":
        model(IDS, position_ids=plan.positions[None], ringfa3_plan=plan, use_cache=False)
    with pytest.raises(ValueError, match=f"ringfa3_mask.*{HYBRIDS[name][2]}"):
        model(IDS, ringfa3_mask={"full_attention": FULL, "hybrid": FULL}, use_cache=False)


def test_a_layer_that_asks_the_plan_has_no_mask_either() -> None:
    """It passes in a ring, whose plan it follows."""

    class Shifted(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, **keywords: Any) -> Any:
            plan = keywords.get("ringfa3_plan")
            before = x.roll(1, 1) if plan is None else plan.shift(x[0], 1)[None]
            return self.inner(x + before, **keywords)

    model, plan = tiny("LlamaForCausalLM", "LlamaConfig"), plan_context(TOKENS)
    model.model.layers[1] = Shifted(model.model.layers[1])
    model(IDS, position_ids=plan.positions[None], ringfa3_plan=plan, use_cache=False)
    with pytest.raises(ValueError, match=r"layers.1 \(Shifted\) mixes tokens .* with ringfa3_mask"):
        model(IDS, ringfa3_mask=FULL, use_cache=False)


def late(x: torch.Tensor) -> torch.Tensor:
    """Of (1, n) positions the fifth is 1 too large."""
    return x + (torch.arange(x.shape[1]) == 4)


Change = Callable[[torch.Tensor], torch.Tensor]
WRONG: dict[str, tuple[Change, str]] = {  # of position_ids (1, n), what is raised
    "one": (late, "not those of ringfa3_plan on this rank: token 4 has"),
    "rows": (lambda x: x.expand(3, -1), "have shape (3, 11), and this rank has 11 tokens"),
    "a rank's own": (
        lambda x: torch.arange(x.shape[1]).expand(3, 1, -1),
        "on 3 axes are not 0 where documents of ringfa3_plan begin, and there alone: token 0 has",
    ),
    "a text row": (
        lambda x: late(x).expand(4, 1, -1),
        "not those of ringfa3_plan on this rank: token 4 has",
    ),
}


def of_all_ranks(group: dist.ProcessGroup, case: str) -> str:
    """What a rank raises; rank 1 alone is wrong."""
    plan, rank = plan_context(TOKENS, group), dist.get_rank(group)
    given: dict[str, Any] = {"position_ids": plan.positions[None]}
    if case == "gated delta net":
        model = hybrid("Qwen3-Next")
        if rank == 1:  # others meet it in the exchange of the layer
            given["ringfa3_mask"] = {"full_attention": FULL}
    elif case == "the plan's, not the mask's":
        model, given["ringfa3_mask"] = llama4(), of_llama4(TREE)
    else:
        model = tiny("LlamaForCausalLM", "LlamaConfig")
        if rank == 1:
            given["position_ids"] = WRONG[case][0](plan.positions[None])
    with pytest.raises(ValueError, match=r"rank [01]: ") as raised:
        model(plan.shard(IDS, 1), ringfa3_plan=plan, use_cache=False, **given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gated delta net", "in a model with Qwen3NextGatedDeltaNet, a recurrence"),
        ("the plan's, not the mask's", "not those of ringfa3_plan on this rank: token"),
        *((case, message) for case, (_, message) in WRONG.items()),
    ],
)
def test_refused_on_all_ranks(ranks: Ranks, case: str, message: str) -> None:
    assert all(message in text for text in ranks.run(2, in_double, of_all_ranks, case))


def path_difference(logits: torch.Tensor) -> float:
    """Of (TOKENS, vocabulary) logits of Llama 4 under TREE, and each path with eager attention."""
    model = llama4("eager")
    paths = [(path, model(IDS[:, path], use_cache=False).logits[0]) for path in PATHS]
    return max(difference(logits[path], expected) for path, expected in paths)


def test_positions_that_do_not_reach_attention_are_checked() -> None:
    """Llama 4 with a tree; the reference is each path alone."""
    model, given = llama4(), {"ringfa3_mask": of_llama4(TREE), "use_cache": False}
    wrong = "position_ids.*not 0, 1, 2, ... in each row: token 14 has 14, not 8: pass position_ids"
    for called in (model, model.model.forward):  # also without the check of a call
        with pytest.raises(ValueError, match=wrong):
            called(IDS, **given)
    with pytest.raises(ValueError, match=r"position_ids are not those .*: token 14 has 14, not 8:"):
        model(IDS, position_ids=torch.arange(TOKENS)[None], **given)
    with pytest.raises(ValueError, match=r"their shape is \(3, 22\), of 1 rows of 22 tokens"):
        model(IDS, position_ids=torch.arange(TOKENS).expand(3, -1), **given)
    positions = torch.tensor(TREE.positions)[None]
    assert path_difference(model(IDS, position_ids=positions, **given).logits[0]) <= BOUND
    given["ringfa3_mask"] = of_llama4(FULL)  # positions are those of another mask
    with pytest.raises(ValueError, match="token 14 has 8, not 14"):
        model(IDS, position_ids=positions, **given)


def in_a_ring(group: dist.ProcessGroup) -> torch.Tensor:
    """(TOKENS, vocabulary) logits, from a plan that has other positions than the mask."""
    model, plan = llama4(), plan_context(FULL, group)
    logits = model(
        plan.shard(IDS, 1),
        position_ids=plan.with_mask(TREE).positions[None],
        ringfa3_plan=plan,
        ringfa3_mask=of_llama4(TREE),
        use_cache=False,
    ).logits
    return plan.unshard(logits[0]).detach()


@pytest.mark.parametrize("world", [2, 3])
def test_positions_in_a_ring_are_the_masks(ranks: Ranks, world: int) -> None:
    for logits in ranks.run(world, in_double, in_a_ring):
        assert path_difference(logits) <= BOUND


def test_models_that_take_no_position_ids_and_poolers_run() -> None:
    """A mask that counts tokens needs no position_ids. A pooler takes its row, the first.

    The reference is each document alone.
    """
    mask = Mask.documents([0, TOKENS])
    model = tiny("BartForCausalLM", "BartConfig", **SEQ2SEQ).eval()
    assert not model.config.is_encoder_decoder
    made = model(IDS, ringfa3_mask=mask, use_cache=False).logits
    assert difference(made, model(IDS, use_cache=False).logits) <= BOUND
    with pytest.raises(ValueError, match="gets tokens that depend on the index of a token"):
        model(IDS, ringfa3_mask=TREE, use_cache=False)
    bert = tiny("BertModel", "BertConfig").eval()
    both = Mask.documents(TOKENS, causal=False)
    made = bert(IDS, ringfa3_mask=both)
    assert difference(made.pooler_output, bert(IDS).pooler_output) <= BOUND


def test_a_mapping_with_keys_of_several_types_is_named() -> None:
    with pytest.raises(ValueError, match=r"masks for \[0, 'full_attention'\], and a layer is 'ch"):
        llama4()(IDS, ringfa3_mask={0: FULL, "full_attention": FULL}, use_cache=False)
