"""If this fails, compiled models of transformers compute other results.
`torch.compile(fullgraph=True)` of models on RingFA3, against the same models uncompiled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.hf_models import (
    CONFIGS,
    model_of,
    results,
    shared_model,
    tokens,
    worst_difference,
)

LENGTHS = [7, 1, 12]
EXPERTS = {"gpt-oss", "deepseek-v3"}  # transformers' eager experts do not compile into one graph


def inputs_of(case: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """(ids, further inputs) of a batch."""
    if case == "padded":
        mask = (torch.arange(13) < torch.tensor([13, 8])[:, None]).long().flip(1)
        return tokens(2, 13), {"attention_mask": mask}
    if case == "packed":
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        return tokens(1, sum(LENGTHS)), {"position_ids": positions}
    if case == "cu_seq_lens":
        cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
        ids, given = inputs_of("packed")
        return ids, {**given, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    return tokens(2, 13), {}


def compare(name: str, cases: list[str]) -> None:
    """Logits and gradients, 1e-12 in float64, of one compiled model on several batches."""
    torch._dynamo.reset()
    model = model_of(name, "ringfa3", torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for case in cases:
        ids, given = inputs_of(case)
        rows = given.get("attention_mask")
        rows = None if rows is None else rows.bool()
        ours = results(compiled, ids, rows, **given)
        theirs = results(shared_model(name, "ringfa3", torch.float64), ids, rows, **given)
        grads = {n.removeprefix("_orig_mod."): g for n, g in ours[1].items()}
        assert worst_difference((ours[0], grads), theirs) <= 1e-12


@pytest.mark.parametrize("case", ["dense", "padded", "packed"])
def test_equals_uncompiled(case: str) -> None:
    compare("llama", [case])


def layers_compiled() -> torch.nn.Module:
    """A model whose layers are compiled, and whose mask is made outside of them."""
    torch._dynamo.reset()
    model = model_of("llama", "ringfa3", torch.float64)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return model


@pytest.mark.parametrize("case", ["padded", "packed", "cu_seq_lens"])
def test_compiled_layers_equal_uncompiled(case: str) -> None:
    """Logits and gradients, 1e-12 in float64. Documents from two sources are compared, too."""
    ids, given = inputs_of(case)
    theirs = results(shared_model("llama", "ringfa3", torch.float64), ids, **given)
    assert worst_difference(results(layers_compiled(), ids, **given), theirs) <= 1e-12


def test_compiled_layers_refuse_other_lengths_than_positions() -> None:
    ids, given = inputs_of("cu_seq_lens")
    other = torch.tensor([0, 8, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q begins documents at \[0, 8\]"):
        results(layers_compiled(), ids, **{**given, "cu_seq_lens_q": other})


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - EXPERTS))
def test_every_architecture_equals_uncompiled(name: str) -> None:
    """One compiled model on batches of several shapes and kinds."""
    compare(name, ["dense", "padded", "packed", "cu_seq_lens"])
