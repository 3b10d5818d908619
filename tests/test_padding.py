"""If this fails, padding inside packed tensors changes results. Padding inside packed tensors:
`seqused` and padded cumulative lengths, on one device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3 import flash_attn_varlen_func
from tests.support.dense import attention, band, cumulative, mask, worst
from tests.test_functional import EXACT, both, dense_inputs

sides = st.tuples(st.integers(0, 20), st.integers(0, 9))  # tokens in use, and padding


@settings(max_examples=60)
@given(
    sequences=st.lists(st.tuples(sides, sides), min_size=1, max_size=4),
    cumulative_of_use=st.tuples(st.booleans(), st.booleans()),
    causal=st.booleans(),
    window=st.tuples(st.sampled_from([-1, 0, 5]), st.sampled_from([-1, 0, 9])),
)
def test_padding_sees_nothing_and_is_seen_by_nobody(
    sequences: list[tuple[tuple[int, int], tuple[int, int]]],
    cumulative_of_use: tuple[bool, bool],
    causal: bool,
    window: tuple[int, int],
) -> None:
    """Float64, out, lse and gradients to 1e-12, of the tokens in use alone; padding is NaN, its
    rows have 0, -inf and gradient 0. FlashAttention 3's keywords or TransformerEngine's."""
    used, sizes, index = [], [], []
    for side in range(2):
        used.append([x[side][0] for x in sequences])
        sizes.append([sum(x[side]) for x in sequences])
        begins = cumulative(sizes[side])
        runs = [torch.arange(b, b + n) for b, n in zip(begins, used[side], strict=False)]
        index.append(torch.cat(runs))
    given = [x[0].detach() for x in dense_inputs(1, sum(sizes[0]), sum(sizes[1]))]
    compact = [
        x[i].requires_grad_() for x, i in zip(given, (index[0], index[1], index[1]), strict=True)
    ]
    padded = [torch.full_like(x, torch.nan) for x in given]
    for x, y, i in zip(padded, compact, (index[0], index[1], index[1]), strict=True):
        x[i] = y.detach()
        x.requires_grad_()
    lengths, more = [], {}
    for side, name in enumerate("qk"):
        of_use = cumulative_of_use[side]
        lengths.append(torch.tensor(cumulative((used if of_use else sizes)[side])))
        more[f"cu_seqlens_{name}_padded" if of_use else f"seqused_{name}"] = (
            torch.tensor(cumulative(sizes[side])) if of_use else used[side]
        )
    out, lse = flash_attn_varlen_func(
        *padded, *lengths, causal=causal, window_size=window, return_lse=True, **more
    )
    got = torch.autograd.grad(both(out, lse), padded)
    outputs = attention(*compact, mask(*used, *band(causal, window)))
    wanted = torch.autograd.grad(both(*outputs), compact)
    pairs = []
    for x, y, side, dim, empty in zip(
        (out, lse, *got), (*outputs, *wanted), (0, 0, 0, 1, 1), (0, 1, 0, 0, 0),
        (0, -torch.inf, 0, 0, 0), strict=True,
    ):  # fmt: skip
        whole = torch.full_like(x, empty)
        pairs.append((x, whole.index_copy(dim, index[side], y.detach())))
    assert worst(pairs) < EXACT


def test_padding_compiles() -> None:
    """In one graph, bit for bit. seqused is the graph's input."""
    q, k, v = (x[0] for x in dense_inputs(1, 9, 9))

    def call(used: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, [0, 5, 9], [0, 5, 9], seqused_q=used, seqused_k=used)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for used in ([3, 4], [5, 0]):
        assert torch.equal(compiled(torch.tensor(used)), call(torch.tensor(used)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seqused_q": [3, 5]}, "seqused_q: sequence 1 uses 5 of 4 tokens"),
        ({"seqused_k": [-1, 4]}, "seqused_k: sequence 0 uses -1 of 5 tokens"),
        ({"seqused_k": [3]}, "seqused_k has 1 sequences"),
        ({"seqused_k": [1.5, 2]}, "seqused_k=.*: give a sequence of whole numbers"),
        ({"seqused_q": torch.zeros(2)}, "seqused_q must be .*integer"),
        ({"cu_seqlens_q_padded": [0, 4, 9]}, "cu_seqlens_q: sequence 0 uses 5 of 4 tokens"),
        ({"cu_seqlens_k_padded": [0, 5, 11]}, "cu_seqlens_k ends at 11, but there are 9"),
        ({"cu_seqlens_k_padded": [0, 5, 9], "seqused_k": [5, 4]}, "give one of them"),
        ({"seqused_q": [5, 4], "precision": "fp8"}, "precision='fp8' with seqused"),
        ({"cu_seqlens_q": [2, 5, 9], "seqused_q": [3, 4]}, "cu_seqlens_q must start with 0"),
        ({"cu_seqlens_q": [-2, 5, 9], "seqused_q": [3, 4]}, "cu_seqlens_q must start with 0"),
        ({"cu_seqlens_k": [1, 4, 7], "cu_seqlens_k_padded": [0, 5, 9]}, "_k must start with 0"),
        ({"cu_seqlens_k_padded": [1, 5, 9]}, "cu_seqlens_k_padded must start with 0"),
        ({"cu_seqlens_k_padded": [0, 9, 8]}, "cu_seqlens_k_padded must not decrease"),
        ({"cu_seqlens_q": [], "seqused_q": []}, "give cumulative lengths"),
        ({"cu_seqlens_k": [0, 3, 5, 9], "seqused_q": [5, 4]}, "queries have 2 .* keys have 3"),
    ],
)
def test_what_is_wrong_with_padding_is_named(more: dict[str, object], message: str) -> None:
    q = torch.ones(9, 1, 64)
    cu = {"cu_seqlens_q": [0, 5, 9], "cu_seqlens_k": [0, 5, 9]}
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_varlen_func(q, q, q, **(cu | more))


@pytest.mark.parametrize("cu", [[0, 5, 9], [1, 5, 9]])
def test_wrong_padding_raises_under_a_compiler(cu: list[int]) -> None:
    """Of another number of sequences, and lengths that do not begin with 0."""
    q, used = torch.ones(9, 1, 64), torch.tensor([3] if cu[0] == 0 else [3, 4])

    def call(cu: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(q, q, q, cu, cu, seqused_q=used, seqused_k=used)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"has 1 sequences|must start with 0"):
        torch.compile(call, backend="aot_eager")(torch.tensor(cu), used)


def test_arrays_of_numpy_name_padding() -> None:
    q = torch.randn(9, 1, 64)
    made = [
        flash_attn_varlen_func(q, q, q, [0, 5, 9], [0, 5, 9], seqused_q=used, seqused_k=used)
        for used in (np.array([3, 4]), [3, 4])
    ]
    assert torch.equal(*made)
