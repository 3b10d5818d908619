"""If this fails, a model computes something else than asked, without an error. What RingFA3 does
not compute exactly is a ValueError that names argument, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import masking_utils

from ringfa3 import ContextPlan, plan_context
from ringfa3.hf.attention import attention_forward
from tests.support.hf_models import SIZES, model_of, shared_model, tokens
from tests.support.ranks import Ranks

IDS = tokens(2, 9)
LENGTHS = [0, 4, 5, 12]  # cumulative, of the documents in a ring


def llama(**inputs: Any) -> Any:
    return shared_model("llama", "ringfa3")(IDS, **inputs)


def layer(**keywords: Any) -> Any:
    """One call of attention, as a model makes it."""
    x = torch.randn(1, 2, 9, 8)
    return attention_forward(torch.nn.Identity(), x, x, x, None, **keywords)


def dropout() -> Any:
    return model_of("llama", "ringfa3", attention_dropout=0.25).train()(IDS)


def softcap() -> Any:
    config = transformers.Gemma2Config(hidden_size=24, intermediate_size=32, num_hidden_layers=1,
                                       num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                       vocab_size=97, attn_logit_softcapping=30.0)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringfa3")
    return model(IDS)


def with_holes() -> Any:
    mask = torch.ones_like(IDS)
    mask[1, 3] = 0
    return llama(attention_mask=mask)


def chunked() -> Any:
    config = transformers.Llama4TextConfig(hidden_size=24, intermediate_size=32,
                                           intermediate_size_mlp=32, num_hidden_layers=1,
                                           num_attention_heads=4, num_key_value_heads=2,
                                           head_dim=8, vocab_size=97, num_local_experts=2,
                                           attention_chunk_size=4, pad_token_id=0,
                                           )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringfa3")
    return model(IDS)


def masked_by(is_causal: bool | None = None, rows: int = 1, **arguments: Any) -> Any:
    """A layer under the mask of `create_causal_mask` with further arguments of either."""
    model = shared_model("llama", "ringfa3")
    embeddings = torch.zeros(rows, 9, 24)
    lengths = {n: arguments.pop(n) for n in list(arguments) if n.startswith("cu_seq_lens")}
    mask = masking_utils.create_causal_mask(model.config, embeddings, None, None, **arguments)
    x = torch.randn(rows, 2, 9, 8)
    return attention_forward(torch.nn.Identity(), x, x, x, mask, is_causal=is_causal, **lengths)


def blockwise() -> Any:
    return masked_by(block_sequence_ids=torch.zeros(1, 9, dtype=torch.long))


def users_own() -> Any:
    return masked_by(and_mask_function=lambda b, h, q, k: q - k < 3)


def contradicted() -> Any:
    return masked_by(is_causal=False)


def generate(name: str, cache: str) -> Any:
    model = shared_model(name, "ringfa3")
    return model.generate(IDS, max_new_tokens=2, cache_implementation=cache)


def doge() -> Any:
    """It reads the dtype of its mask."""
    config = transformers.DogeConfig(**{**SIZES, "keep_window_size": 4})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringfa3")(IDS)


def packed_after_a_cache() -> Any:
    cache = llama(use_cache=True).past_key_values
    positions = torch.tensor([[9, 10, 0, 1, 2, 3, 4, 5, 6]])
    return llama(past_key_values=cache, position_ids=positions)


def decoded_after_packed() -> Any:
    """The cache holds documents of 6 and 3 tokens; the new token follows the second."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    cache = llama(use_cache=True, position_ids=positions).past_key_values
    model = shared_model("llama", "ringfa3")
    return model(IDS[:, :1], past_key_values=cache, position_ids=torch.tensor([[3]]))


def one_token_hidden() -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[1, 0] = 0
    return mask


def two_sources_of_lengths() -> Any:
    cu = torch.tensor([0, 9, 18])
    return llama(attention_mask=one_token_hidden(), cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def packed_positions_and_padding() -> Any:
    """transformers would join the documents of row 1."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 3, 4]])
    return llama(attention_mask=one_token_hidden(), position_ids=positions)


def packed_by(*rows: list[int]) -> Any:
    """A user's mask function of packed documents."""
    return masking_utils.packed_sequence_mask_function(torch.tensor(rows))


def two_packed_masks() -> Any:
    both = masking_utils.and_masks(packed_by([0] * 4 + [1] * 5), packed_by([0] * 5 + [1] * 4))
    return masked_by(and_mask_function=both)


def packed_and_padded() -> Any:
    model, x = shared_model("llama", "ringfa3"), torch.randn(1, 2, 9, 8)
    mask = masking_utils.create_causal_mask(
        model.config, torch.zeros(1, 9, 24), one_token_hidden()[1:], None,
        and_mask_function=packed_by([0] * 4 + [1] * 5),
    )  # fmt: skip
    return attention_forward(torch.nn.Identity(), x, x, x, mask)


RETURNING = [0, 0, 0, 1, 1, 1, 0, 0, 0]  # the first tokens and the last see each other


def a_label_returns() -> Any:
    return masked_by(and_mask_function=packed_by(RETURNING))


def a_label_returns_in_row_1() -> Any:
    """Row 0 ends with the label with which row 1 begins, which is no return."""
    return masked_by(and_mask_function=packed_by([1] * 4 + [0] * 5, RETURNING), rows=2)


def a_label_returns_beside_lengths() -> Any:
    cu = torch.tensor([0, 3, 6, 9])
    return masked_by(and_mask_function=packed_by(RETURNING), cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def wide_labels() -> Any:
    """Of 12 tokens, for 9; without a check the last change would be one of the next row."""
    return masked_by(and_mask_function=packed_by(*[[0] * 10 + [1] * 2] * 2), rows=2)


def labels_of_other_rows() -> Any:
    return masked_by(and_mask_function=packed_by(*[[0] * 4 + [1] * 5] * 3), rows=2)


def labels_beside_packed_positions() -> Any:
    """transformers 5 takes labels 0, 0, 0, 0 and 0, 0, 0, 0, 1, by position."""
    return masked_by(
        and_mask_function=packed_by([0] * 4 + [1] * 5),
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
    )


def packed_and_other_lengths() -> Any:
    cu, positions = torch.tensor([0, 5, 9]), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = {"position_ids": positions, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    return shared_model("llama", "ringfa3")(IDS[:1], use_cache=False, **packed)


CASES: dict[str, tuple[Callable[[], Any], str, str]] = {  # call, argument and value, remedy
    "dropout": (dropout, "attention_dropout=0.25", "config.attention_dropout to 0"),
    "softcap": (softcap, "softcap=30.0", "attn_implementation='sdpa' or 'eager'"),
    "output_attentions": (lambda: llama(output_attentions=True), "output_attentions=True", "eager"),
    "4D mask": (
        lambda: llama(attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool)),
        "attention_mask=<(2, 1, 9, 9) torch.bool>",
        "give the 2D (batch, keys) padding mask",
    ),
    "holes": (with_holes, "attention_mask hides tokens", "in row 1, 8 of tokens 0 to 8"),
    "short mask": (
        lambda: llama(attention_mask=torch.ones(2, 7)),
        "attention_mask has shape (2, 7)",
        "give (batch, keys)",
    ),
    "chunked": (chunked, "mask_function=chunked_overlay", "attn_implementation='sdpa'"),
    "blockwise": (blockwise, "mask_function=or_masks", "attn_implementation='sdpa'"),
    "a user's mask": (users_own, "mask_function=users_own", "attn_implementation='sdpa'"),
    **{
        f"{cache} cache, {name}": (
            partial(generate, name, cache),
            named,
            "DynamicCache, which is cache_implementation='dynamic'",
        )
        for name, named in (
            ("llama", "past_key_values is a static cache"),
            ("mistral", "attention_mask.contiguous: RingFA3's mask is not a tensor"),
            ("gemma3", "a static cache"),  # of two masks, which transformers makes in any order
            ("phi3", "past_key_values is a static cache"),
        )
        for cache in ("static", "sliding_window")
    },
    "a model that reads the mask": (doge, "attention_mask.dtype: RingFA3's mask", "'sdpa' or"),
    "paged cache": (lambda: layer(cache=object()), "cache=<object>", "attn_implementation='sdpa'"),
    "position_bias": (
        lambda: layer(position_bias=torch.zeros(9, 9)),
        "position_bias=<(9, 9) torch.float32>",
        "attn_implementation='sdpa'",
    ),
    "packed after a cache": (packed_after_a_cache, "position_ids begin again", "use_cache=False"),
    "decoded after packed": (
        decoded_after_packed,
        "position_ids begin with 3 after 9 cached",
        "use_cache=False",
    ),
    "lengths twice": (two_sources_of_lengths, "cu_seq_lens_q", "attention_mask=None"),
    "packed positions and padding": (
        packed_positions_and_padding,
        "position_ids begin again at token 4 of row 1, and attention_mask hides padding",
        "attention_mask=None",
    ),
    "packed twice": (two_packed_masks, "mask_function has two", "give documents once"),
    "label returns": (a_label_returns, "label 0 returns in row 0", "a label of its own"),
    "label returns in row 1": (a_label_returns_in_row_1, "0 returns in row 1", "of its own"),
    "label returns beside lengths": (
        a_label_returns_beside_lengths,
        "label 0 returns in row 0",
        "a label of its own",
    ),
    "wide labels": (wide_labels, "labels of shape (2, 12) for 2 rows", "give (batch, keys)"),
    "rows of labels": (
        labels_of_other_rows,
        "labels of shape (3, 9) for 2 rows",
        "give (batch, keys)",
    ),
    "labels and positions": (
        labels_beside_packed_positions,
        "packed_sequence_mask_function, and position_ids",
        "by position_ids alone",
    ),
    "packed and padded": (packed_and_padded, "packed_sequence_mask_function", "no padding"),
    "packed and other lengths": (
        packed_and_other_lengths,
        "begins documents at [0, 5] ..., the mask, which may have them from position_ids",
        "give the same documents",
    ),
    "is_causal": (contradicted, "is_causal=False", "config.is_causal"),
}


@pytest.mark.parametrize("case", CASES)
def test_on_one_device(case: str) -> None:
    call, named, remedy = CASES[case]
    with pytest.raises(ValueError, match=re.escape(named)) as raised:
        call()
    assert remedy in str(raised.value)


def sharded(model: Any, group: dist.ProcessGroup, **changes: Any) -> Any:
    """A forward under the ring, with arguments of one rank changed."""
    plan = plan_context(LENGTHS, group)
    ids = plan.shard(tokens(1, 12), 1)
    given = {"position_ids": plan.positions[None], "use_cache": False, "ringfa3_plan": plan}
    return model(ids, **{**given, **changes})


def cached(group: dist.ProcessGroup) -> Any:
    model = shared_model("llama", "ringfa3")
    cache = sharded(model, group, use_cache=True).past_key_values
    return sharded(model, group, past_key_values=cache, use_cache=True)


def padded(group: dist.ProcessGroup) -> Any:
    """Padding on rank 0 alone; a mask of ones, on the others, is none."""
    mask = torch.ones(1, 12 // dist.get_world_size(group), dtype=torch.long)
    mask[0, 0] = dist.get_rank(group) > 0
    return sharded(shared_model("llama", "ringfa3"), group, attention_mask=mask)


def roped(rope_type: str, group: dist.ProcessGroup) -> Any:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    changes: dict[str, Any] = {"max_position_embeddings": 64}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3,
                 "original_max_position_embeddings": 32}  # fmt: skip
    name = "phi3" if rope_type == "longrope" else "llama"
    return sharded(model_of(name, "ringfa3", rope_parameters=rope, **changes), group)


def longrope(group: dist.ProcessGroup) -> Any:
    return roped("longrope", group)


def dynamic(group: dist.ProcessGroup) -> Any:
    return roped("dynamic", group)


def of_another_length(group: dist.ProcessGroup) -> Any:
    """The plan of rank 0 has other documents."""
    other = plan_context(20, group)
    changes = {"ringfa3_plan": other} if dist.get_rank(group) == 0 else {}
    return sharded(shared_model("llama", "ringfa3"), group, **changes)


def without_positions(group: dist.ProcessGroup) -> Any:
    return sharded(shared_model("llama", "ringfa3"), group, position_ids=None)


def dropping(group: dist.ProcessGroup) -> Any:
    """Rank 1 alone is in training."""
    model = model_of("llama", "ringfa3", attention_dropout=0.25)
    return sharded(model.train(dist.get_rank(group) == 1), group)


def of_another_width(group: dist.ProcessGroup) -> Any:
    """A mask that one rank gives alone is refused where all ranks meet, in attention."""
    odd = {"attention_mask": torch.ones(1, 3)} if dist.get_rank(group) == 0 else {}
    return sharded(shared_model("llama", "ringfa3"), group, **odd)


def labelled(plan: ContextPlan, labels: list[int]) -> Any:
    """A layer under the ring and a mask function with labels of this rank's tokens."""
    n = plan.local_tokens
    mask = masking_utils.create_causal_mask(
        shared_model("llama", "ringfa3").config, torch.zeros(1, n, 24), None, None,
        and_mask_function=packed_by(labels),
    )  # fmt: skip
    x = torch.randn(1, 2, n, 8)
    given = {"position_ids": plan.positions[None], "ringfa3_plan": plan}
    return attention_forward(torch.nn.Identity(), x, x, x, mask, **given)


def packed_otherwise(group: dist.ProcessGroup) -> Any:
    """A mask function whose documents are not the plan's."""
    return labelled(plan_context(12, group), [0] * 2 + [1] * 4)


def returning(group: dist.ProcessGroup) -> Any:
    """Labels change where the plan's documents do, and the first returns."""
    plan = plan_context([0, 2, 4, 6, 8, 10, 12], group)
    breaks = plan.positions.diff(prepend=plan.positions[:1] - 1) != 1
    return labelled(plan, (breaks.cumsum(0) % 2).tolist())


def too_wide(group: dist.ProcessGroup) -> Any:
    """The labels are those of all tokens, which is more than the rank has."""
    return labelled(plan_context(12, group), [0] * 12)


RINGS: dict[str, tuple[Callable[[dist.ProcessGroup], Any], str, str]] = {
    "KV cache": (cached, "past_key_values holds 6 tokens", "use_cache=False"),
    "padding": (padded, "attention_mask hides 1 tokens", "pack the documents"),
    "longrope": (longrope, "rope_type='longrope'", "allowed are default, linear"),
    "dynamic": (dynamic, "rope_type='dynamic'", "allowed are default, linear"),
    "length": (of_another_length, "ringfa3_plan gives this rank 10 of 20", "plan.shard(input_ids"),
    "positions": (
        without_positions,
        "position_ids=None with ringfa3_plan",
        "plan.positions[None]",
    ),
    "documents": (packed_otherwise, "packed_sequence_mask_function has other", "leave it out"),
    "label returns": (returning, "label 0 returns in row 0", "a label of its own"),
    "wide labels": (too_wide, "labels of shape (1, 12) for 1 rows of 6", "give (batch, keys)"),
    "dropout": (dropping, "attention_dropout=0.25", "config.attention_dropout to 0"),
    "short mask": (of_another_width, "attention_mask has 3 columns", "give (batch, keys)"),
}


def message(group: dist.ProcessGroup, case: str) -> str:
    try:
        RINGS[case][0](group)
    except ValueError as problem:
        return str(problem)
    return "no error"


@pytest.mark.parametrize("case", RINGS)
def test_in_a_ring_on_every_rank(ranks: Ranks, case: str) -> None:
    """Two ranks; both raise, and the pool, whose ranks must agree, is whole afterwards."""
    _, named, remedy = RINGS[case]
    for text in ranks.run(2, message, case):
        assert named in text
        assert remedy in text
