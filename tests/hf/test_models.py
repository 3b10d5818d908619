"""If this fails, a model of transformers computes other results on RingFA3. Eight architectures of
transformers on RingFA3, against transformers' own attention."""

from __future__ import annotations

import itertools
import subprocess
import sys
from unittest import mock

import pytest
import torch
import transformers

import ringfa3.hf
from ringfa3 import keep_attention
from ringfa3.hf import attention
from ringfa3.kernels import reference
from tests.support.double import recomputed_in_double
from tests.support.hf_models import (
    CONFIGS,
    Results,
    backward,
    difference,
    model_of,
    results,
    shared_model,
    tokens,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12  # relative to the largest number
CASES = [  # name, reference
    (name, theirs)
    for name, theirs in itertools.product(CONFIGS, ("eager", "sdpa"))
    if (name, theirs) != ("gpt-oss", "sdpa")  # its sinks have no sdpa
]
LENGTHS = [7, 1, 12]  # of packed documents


def compare(name: str, theirs_by: str, ids: torch.Tensor, **inputs: torch.Tensor) -> None:
    """Logits and gradients where attention_mask, if any, is 1."""
    rows = inputs.get("attention_mask")
    rows = None if rows is None else rows.bool()
    ours = results(shared_model(name, "ringfa3"), ids, rows, **inputs)
    theirs = results(shared_model(name, theirs_by), ids, rows, **inputs)
    assert worst_difference(ours, theirs) <= BOUND


@pytest.mark.parametrize(("name", "theirs_by"), CASES)
def test_dense(name: str, theirs_by: str) -> None:
    compare(name, theirs_by, tokens(2, 13))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "theirs_by"), CASES)
def test_padded(name: str, theirs_by: str, side: str) -> None:
    """Rows of 13, 8 and 1 tokens; logits and loss of what is no padding."""
    lengths = torch.tensor([13, 8, 1])[:, None]
    mask = (torch.arange(13) < lengths).long()
    mask = mask.flip(1) if side == "left" else mask
    compare(name, theirs_by, tokens(3, 13) * mask, attention_mask=mask)


def documents_alone(name: str, ids: torch.Tensor) -> Results:
    """The eager results of each document by itself."""
    model = shared_model(name, "eager")
    model.zero_grad()
    parts = [model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)]
    return backward(model, torch.cat(parts, 1))


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize(("name", "theirs_by"), CASES)
def test_packed(name: str, theirs_by: str, given: str) -> None:
    """Documents of 7, 1 and 12 tokens in one row, against each document alone, or against sdpa's
    packing."""
    ids = tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    inputs = {"position_ids": positions}
    if theirs_by == "eager":
        theirs = documents_alone(name, ids)
    else:
        theirs = results(shared_model(name, theirs_by), ids, **inputs)
    if given == "cu_seq_lens":
        cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    ours = results(shared_model(name, "ringfa3"), ids, **inputs)
    assert worst_difference(ours, theirs) <= BOUND


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_packed_with_a_cache_that_is_empty(name: str) -> None:
    """transformers makes a cache unless told not to; documents stay apart. Each document
    alone; batches of two packed rows, too."""
    ids, positions = tokens(2, sum(LENGTHS)), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        made = shared_model(name, "ringfa3")(ids, position_ids=positions, use_cache=True).logits
        alone = [shared_model(name, "eager")(x).logits for x in ids.split(LENGTHS, 1)]
    assert difference(made, torch.cat(alone, 1)) <= BOUND


@pytest.mark.parametrize(("name", "theirs_by"), CASES)
def test_prefill_in_two_chunks(name: str, theirs_by: str) -> None:
    """9 and 6 tokens through a dynamic cache, more than a window, with left padding and without."""
    ids = tokens(2, 15)
    for padding in (0, 4):
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
        logits = []
        for implementation in ("ringfa3", theirs_by):
            model = shared_model(name, implementation)
            with torch.no_grad():
                first = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
                rest = {"attention_mask": mask} if padding else {}
                cache = first.past_key_values
                second = model(ids[:, 9:], past_key_values=cache, use_cache=True, **rest)
            logits.append(torch.cat((first.logits, second.logits), 1)[mask.bool()])
        assert difference(*logits) <= BOUND


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_generation_of_a_batch_with_left_padding(name: str) -> None:
    """12 new tokens for prompts of 9 and 4: the tokens of eager attention."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :5] = 0
    made = [
        shared_model(name, implementation).generate(
            ids * mask, attention_mask=mask, max_new_tokens=12, do_sample=False
        )
        for implementation in ("ringfa3", "eager")
    ]
    assert made[0].shape == (2, 21)
    assert torch.equal(*made)
    assert len(set(made[0][0, 9:].tolist())) > 2  # no constant


def test_every_layer_of_a_model_attends_by_ringfa3() -> None:
    """After `set_attn_implementation`, on a model that was made with eager attention."""
    model = model_of("llama", "eager")
    ids = tokens(2, 13)
    expected = results(model, ids)
    model.set_attn_implementation("ringfa3")
    with mock.patch.object(attention, "padded_attention", wraps=attention.padded_attention) as op:
        assert worst_difference(results(model, ids), expected) <= BOUND
    assert op.call_count == 2


def test_an_encoder_sees_both_sides_and_no_padding() -> None:
    """BERT with right padding, float64 against sdpa, 1e-12: queries of the padding, too."""
    config = transformers.BertConfig(vocab_size=97, hidden_size=24, num_hidden_layers=2,
                                     num_attention_heads=4, intermediate_size=32,
                                     initializer_range=0.3)  # fmt: skip
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    made = []
    for implementation in ("ringfa3", "sdpa"):
        torch.manual_seed(0)
        model = transformers.BertModel._from_config(config, attn_implementation=implementation)
        made.append(model.double().eval()(tokens(2, 9), attention_mask=mask).last_hidden_state)
    assert difference(*made) <= 1e-12


def test_register_changes_nothing_the_second_time() -> None:
    before = transformers.AttentionInterface._global_mapping.copy()
    ringfa3.hf.register()
    assert transformers.AttentionInterface._global_mapping == before
    assert before["ringfa3"] is attention.attention_forward


def test_ringfa3_imports_no_transformers() -> None:
    """In a new process: nor does `import ringfa3.hf`; only `register` does."""
    code = "import sys, ringfa3, ringfa3.hf; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_checkpointing_keeps_attention(name: str) -> None:
    """With `keep_attention` each of two layers attends once, and gradients are those without
    checkpointing, exactly."""
    model = model_of(name, "ringfa3").train()
    ids = tokens(2, 13)
    expected = results(model, ids)
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": recomputed_in_double(keep_attention)}
    )
    with mock.patch.object(reference, "attend", wraps=reference.attend) as runs:
        assert worst_difference(results(model, ids), expected) == 0
    assert runs.call_count == 2
