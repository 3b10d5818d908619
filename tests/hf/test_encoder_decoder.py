"""If this fails, packed pairs of encoder-decoder models mix with each other. Encoder-decoder models
on `target.cross(source)`: packed pairs, on one device and in rings.

The reference is transformers' eager attention in float64, on the same pairs as a padded batch:
logits of all tokens that are no padding, and gradients, within 1e-12 of the largest number.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn.utils.rnn import pad_sequence

from ringfa3 import ContextPlan, Mask, keep_attention, plan_context
from ringfa3.hf.attention import attention_forward
from ringfa3.hf.masks import Mask as ModelMask
from tests.support.double import in_double, recomputed_in_double
from tests.support.encoder_decoders import model_of, new_model
from tests.support.hf_models import Results, backward, difference, tokens, worst_difference
from tests.support.hf_models import model_of as causal_model
from tests.support.markdown import ROOT, blocks
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12
SOURCE, TARGET = [0, 7, 12, 30], [0, 5, 14, 16]  # three pairs
IDS, TARGET_IDS = tokens(30), tokens(16, seed=1)
BART_NAME, T5GEMMA = "BartForConditionalGeneration", "T5GemmaForConditionalGeneration"
OTHERS = [
    f"{name}ForConditionalGeneration"
    for name in ("MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "PLBart")
]
RUN = [BART_NAME, T5GEMMA, "MarianMTModel", *OTHERS]


def padded(ids: torch.Tensor, cumulative: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, s) ids with padding on the right, and the mask that hides it."""
    rows = [ids[a:b] for a, b in pairwise(cumulative)]
    masks = [torch.ones(len(row), dtype=torch.long) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)


@lru_cache(None)
def eager(name: str) -> Results:
    """Of the padded batch; logits (1, 16, vocabulary) of tokens that are no padding."""
    model = model_of(name, "eager")
    (ids, mask), (target, shown) = padded(IDS, SOURCE), padded(TARGET_IDS, TARGET)
    model.zero_grad()
    given = {"attention_mask": mask, "decoder_attention_mask": shown, "use_cache": False}
    logits = model(input_ids=ids, decoder_input_ids=target, **given).logits
    return backward(model, logits[shown.bool()][None])


def cross_plan(group: Any = (0, 1)) -> ContextPlan:
    return plan_context(TARGET, group).cross(plan_context(SOURCE, group, causal=False))


def inputs_of(plan: ContextPlan) -> dict[str, Any]:
    ids = {
        "input_ids": plan.shard_keys(IDS)[None],
        "decoder_input_ids": plan.shard(TARGET_IDS)[None],
    }
    return {**ids, "use_cache": False, "ringfa3_plan": plan}


@pytest.mark.parametrize("name", RUN)
def test_packed_pairs_on_one_device_equal_a_padded_batch(name: str) -> None:
    model = model_of(name, "ringfa3")
    model.zero_grad()
    made = backward(model, model(**inputs_of(cross_plan())).logits)
    assert worst_difference(made, eager(name)) <= BOUND
    assert not any(module._forward_pre_hooks for module in model.modules())


def in_a_ring(group: dist.ProcessGroup, name: str, keep: bool = False) -> float:
    """The largest difference of this rank's logits, and of gradients summed over the ranks."""
    model, plan = model_of(name, "ringfa3"), cross_plan(group)
    if keep:
        model = new_model(
            name, "ringfa3", **({"dropout": 0.0} if name == BART_NAME else {})
        ).train()
        contexts = recomputed_in_double(keep_attention)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model.zero_grad()
    logits = model(**inputs_of(plan)).logits
    expected, grads = eager(name)
    generator = torch.Generator().manual_seed(1)  # as in `backward`
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    logits.backward(plan.shard(gradient, 1))
    found = dict(model.named_parameters())
    flat = torch.cat([found[n].grad.flatten() for n in grads])
    dist.all_reduce(flat, group=group)
    of_logits = difference(logits, plan.shard(expected, 1))
    return max(of_logits, difference(flat, torch.cat([g.flatten() for g in grads.values()])))


@pytest.mark.parametrize("name", [BART_NAME, T5GEMMA])
def test_rings_equal_a_padded_batch(ranks: Ranks, name: str) -> None:
    """T5Gemma has a layer with a window in its encoder and one in its decoder."""
    assert max(ranks.run(2, in_double, in_a_ring, name)) <= BOUND


@pytest.mark.soak
@pytest.mark.parametrize("name", RUN)
def test_rings_of_three(ranks: Ranks, name: str) -> None:
    assert max(ranks.run(3, in_double, in_a_ring, name)) <= BOUND


@pytest.mark.soak
@pytest.mark.parametrize("name", [BART_NAME, T5GEMMA])
def test_checkpointed_layers(ranks: Ranks, name: str) -> None:
    assert max(ranks.run(2, in_double, in_a_ring, name, True)) <= BOUND


def test_padding_may_stay_where_it_is() -> None:
    """Plans of masks whose documents have unused tokens: those of the padded batch."""
    (ids, mask), (target, shown) = padded(IDS, SOURCE), padded(TARGET_IDS, TARGET)
    source, rows = (range(0, x.numel() + 1, x.shape[1]) for x in (ids, target))
    used, written = mask.sum(1), shown.sum(1)
    encoder = plan_context(Mask.documents(source, causal=False, seqused_q=used), (0, 1))
    decoder = plan_context(Mask.documents(rows, seqused_q=written), (0, 1))
    pairs = Mask.documents(rows, source, causal=False, seqused_q=written, seqused_k=used)
    model = model_of(BART_NAME, "ringfa3")
    model.zero_grad()
    plan = decoder.cross(encoder, pairs)
    given = {"decoder_input_ids": target.view(1, -1), "use_cache": False, "ringfa3_plan": plan}
    logits = model(input_ids=ids.view(1, -1), **given).logits
    made = backward(model, logits[:, shown.flatten().bool()])
    assert worst_difference(made, eager(BART_NAME)) <= BOUND


def test_the_loss_of_the_page_is_the_models_own() -> None:
    """docs/huggingface.md, a padded batch on one device: loss and gradients of eager attention."""
    ids, mask = padded(IDS, SOURCE)
    target, shown = padded(TARGET_IDS, TARGET)
    labels = padded(tokens(16, seed=2), TARGET)[0].masked_fill(shown == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batch["decoder_input_ids"] = target
    page: dict[str, Any] = {"plan_context": plan_context, "F": torch.nn.functional}
    (code,) = (x for _, x in blocks(ROOT / "docs" / "huggingface.md") if "share_of_loss" in x)
    exec(compile(code, "huggingface.md", "exec"), page)
    model, reference = model_of(BART_NAME, "ringfa3"), model_of(BART_NAME, "eager")
    loss, expected = page["share_of_loss"](model, batch), reference(**batch).loss
    results = []
    for of, x in ((model, loss), (reference, expected)):
        of.zero_grad()
        x.backward()
        results.append((x.detach(), {n: p.grad for n, p in of.named_parameters()}))
    assert worst_difference(*results) <= BOUND


@pytest.mark.soak
def test_a_compiled_model() -> None:
    model = model_of(BART_NAME, "ringfa3")
    given = inputs_of(cross_plan())
    made = torch.compile(model, backend="eager")(**given).logits
    assert difference(made, model(**given).logits) <= BOUND


WITHOUT: dict[str, tuple[dict[str, Any], str]] = {  # by argument: its value, what is raised
    "labels": ({"labels": TARGET_IDS[None]}, "labels with .* average its loss over this rank's"),
    "ringfa3_mask": ({"ringfa3_mask": Mask.documents(9)}, "give masks to plan_context and to"),
    "encoder_outputs": ({"encoder_outputs": (torch.randn(1, 30, 24),)}, "runs the encoder too"),
    "past_key_values": ({"past_key_values": object()}, "a ring has no KV cache, and so no gener"),
    "no target": ({"decoder_input_ids": None}, r"decoder_input_ids is missing .*shard\(tokens\)"),
    "target": ({"decoder_input_ids": tokens(1, 15)}, r"\(1, 15\), and .* 16 of the decoder's 16"),
    "source": ({"input_ids": tokens(2, 15)}, r"\(2, 15\), and .* 30 of the encoder's 30 tokens"),
    "padding": ({"attention_mask": torch.arange(30)[None] > 2}, "hides 3 tokens: a ring takes no"),
    "a plain plan": (
        {"ringfa3_plan": plan_context(TARGET, (0, 1))},
        r"different tokens: pass target.cross\(source\)",
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_a_plan_does_not_reach_is_refused(name: str) -> None:
    changes, message = WITHOUT[name]
    with pytest.raises(ValueError, match=message):
        model_of(BART_NAME, "ringfa3")(**inputs_of(cross_plan()) | changes)


def test_positions_of_ones_own_are_checked() -> None:
    model, given = model_of(T5GEMMA, "ringfa3"), inputs_of(cross_plan())
    for name, count in (("position_ids", 30), ("decoder_position_ids", 16)):
        with pytest.raises(ValueError, match="position_ids are not those of ringfa3_plan on this"):
            model(**given, **{name: torch.arange(count)[None]})


def test_layers_left_out_at_random_are_refused() -> None:
    """Each rank would leave out others."""
    model = new_model(BART_NAME, "ringfa3", encoder_layerdrop=0.5).train()
    with pytest.raises(ValueError, match=r"config.encoder_layerdrop=0.5 with ringfa3_plan"):
        model(**inputs_of(cross_plan()))


REFUSED = {  # model: the reason
    "T5ForConditionalGeneration": "RingFA3 has no bias of the scores",
    "M2M100ForConditionalGeneration": "depend on the index of a token",
    "MvpForConditionalGeneration": r"\(MvpAttention\) mixes tokens",
    "WhisperForConditionalGeneration": "takes no input_ids",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_by_name(name: str) -> None:
    given = inputs_of(cross_plan())
    if name.startswith("Whisper"):
        given["input_features"] = given.pop("input_ids")
    with pytest.raises(ValueError, match=REFUSED[name]):
        model_of(name, "ringfa3")(**given)


def test_parts_run_with_the_whole_model_alone() -> None:
    """Its check covers them; an encoder with the plan of the source would count its own tokens."""
    model, plan = model_of(BART_NAME, "ringfa3"), cross_plan()
    model(**inputs_of(plan))
    source, alone = plan.key_plan, {"input_ids": IDS[None]}
    found = model.get_encoder()(**alone, ringfa3_plan=plan).last_hidden_state
    expected = [model.get_encoder()(IDS[None, a:b]).last_hidden_state for a, b in pairwise(SOURCE)]
    assert difference(found, torch.cat(expected, 1)) <= BOUND
    with pytest.raises(ValueError, match=r"BartEncoder, an encoder-decoder.*target.cross\(source"):
        model.get_encoder()(**alone, ringfa3_plan=source)
    with pytest.raises(ValueError, match="of which LlamaForCausalLM is at most a part"):
        causal_model("llama", "ringfa3")(**alone, ringfa3_plan=plan, use_cache=False)


HIDDEN = torch.arange(30)[None] > 2
LAYERS: list[tuple[dict[str, Any], int, str]] = [  # fields of the mask, keys, what is raised
    ({"padding": HIDDEN}, 30, "attention_mask hides keys of Module: a ring takes no padding"),
    ({"left": 3, "right": 3}, 30, "attention_mask hides keys of Module"),
    ({"problem": ValueError("mask_function=f")}, 30, "mask_function=f"),
    ({}, 29, "cross-attention has 29 keys, and ringfa3_plan gives this rank 30"),
]


@pytest.mark.parametrize(("fields", "keys", "message"), LAYERS)
def test_cross_attention_of_other_keys_is_refused(
    fields: dict[str, Any], keys: int, message: str
) -> None:
    """Without the check of a call."""
    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, keys, 8)
    mask = ModelMask(keys=keys, **fields)
    with pytest.raises(ValueError, match=message):
        attention_forward(torch.nn.Module(), q, k, k, mask, ringfa3_plan=cross_plan())


def test_cross_attention_under_another_mask_is_refused() -> None:
    """As above."""
    q, k, mask = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 30, 8), ModelMask(keys=30)
    given = {"ringfa3_plan": cross_plan(), "ringfa3_mask": Mask.documents(9)}
    with pytest.raises(ValueError, match=r"leave it out, and give target\.cross its mask"):
        attention_forward(torch.nn.Module(), q, k, k, mask, **given)


def test_a_decoder_that_sees_later_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own attention would pass for cross-attention."""
    module = transformers.models.bart.modeling_bart
    monkeypatch.setattr(
        module,
        "create_causal_mask",
        lambda past_key_values, **given: module.create_bidirectional_mask(**given),
    )
    with pytest.raises(ValueError, match="attends to its own tokens without a causal mask"):
        new_model(BART_NAME, "ringfa3")(**inputs_of(cross_plan()))


def of_all_ranks(group: dist.ProcessGroup, case: str) -> str:
    """What a rank raises; but for tokens and positions, rank 1 alone is wrong."""
    plan = cross_plan(group)
    given = inputs_of(plan)
    if case == "positions":
        plan = plan_context(TARGET, group).cross(plan_context([0, 1, 2, 67], group, causal=False))
        given |= {"ringfa3_plan": plan, "input_ids": plan.shard_keys(tokens(67))[None]}
    elif case == "tokens":
        plan = plan_context(1, group).cross(plan_context(30, group, causal=False))
        given |= {"ringfa3_plan": plan, "decoder_input_ids": plan.shard(tokens(1))[None]}
    elif dist.get_rank(group) == 1:
        wrong = {"labels": TARGET_IDS[None], "input_ids": IDS[None], "ringfa3_plan": plan.key_plan}
        given[case] = wrong[case]
    with pytest.raises(ValueError, match="ringfa3_plan") as raised:
        model_of(BART_NAME, "ringfa3")(**given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("labels", "rank 1: labels with ringfa3_plan"),
        ("input_ids", "rank 1: input_ids has shape (1, 30), and ringfa3_plan gives this rank 15"),
        ("ringfa3_plan", "rank 1: ringfa3_plan in BartForConditionalGeneration, an encoder-dec"),
        ("positions", "ringfa3_plan has a document of 65 tokens, and BartEncoder has 64 positions"),
        ("tokens", "ringfa3_plan has 1 tokens of the decoder for 2 ranks: transformers makes no"),
    ],
)
def test_refused_on_all_ranks(ranks: Ranks, case: str, message: str) -> None:
    assert all(message in text for text in ranks.run(2, in_double, of_all_ranks, case))
