"""If this fails, the published errors of Hugging Face models under a ring are wrong. The comparison
with transformers' attention: a whole run, two ranks, wrong gradients, a peer."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from benchmarks import compare_hf, hf_ring_flash_attn
from benchmarks.compare_hf import Figures, Gradients, Peer, Shape, main, measure
from examples import hf_cp
from ringfa3 import plan_context
from ringfa3.bench.ring import peers
from tests.bench.common.test_implementations import operators_of_fa3
from tests.support.ranks import Ranks

SIZES = {size: number for size, number in hf_cp.SIZES.items() if size != "initializer_range"}
TINY = {
    "llama-1b": Shape(("LlamaConfig", SIZES), "sdpa", packs=True, longest=128),
    "gpt-oss-block": Shape(
        ("GptOssConfig", {**SIZES, **hf_cp.TINY["gpt-oss"][1]}), "eager", packs=False, longest=128
    ),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in TINY.items():
        monkeypatch.setitem(compare_hf.SHAPES, name, shape)


def _measure(group: dist.ProcessGroup | None, name: str) -> Figures:
    return measure(TINY[name], 300, 1, torch.device("cpu"), group)


@pytest.mark.usefixtures("tiny")
def test_a_whole_run_prints_a_line_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of bfloat16: above 0.1%, below 5%; no ratio exceeds 1.1."""
    assert main(["--tokens", "300", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == list(TINY)
    for line, shape in zip(lines, TINY.values(), strict=True):
        found = re.fullmatch(
            rf".*, 300 tokens, 1 x cpu: error ([\d.]+)%, {shape.attention}'s ([\d.]+)%, "
            r"ratio ([\d.]+); [\d,]+ tokens/s",
            line,
        )
        assert found, line
        ours, theirs, ratio = map(float, found.groups())
        assert 0.1 < ours < 5
        assert ours / theirs == pytest.approx(ratio, abs=2e-3)


def test_two_ranks_have_the_error_of_one(ranks: Ranks) -> None:
    """Within 5% of it: sums of bfloat16 gradients in another order."""
    alone = _measure(None, "llama-1b")
    for found in ranks.run(2, _measure, "llama-1b"):
        assert found.theirs == alone.theirs
        assert found.ours == pytest.approx(alone.ours, rel=0.05)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_gradients_that_differ_end_with_code_1(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """RingFA3's of the second shape are 1% too large, or NaN; nothing else is wrong."""
    right, calls = compare_hf.summed_gradients, itertools.count()

    def wrong(*arguments: object) -> Gradients:
        wanted = 1.0 if next(calls) == 0 else factor
        return {name: wanted * x for name, x in right(*arguments).items()}

    monkeypatch.setattr(compare_hf, "summed_gradients", wrong)
    assert main(["--tokens", "300", "--steps", "1"]) == 1


def test_the_loss_in_chunks_has_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 of 20 tokens; float32, within 1e-6 of the largest value."""
    monkeypatch.setattr(compare_hf, "LOSS_TOKENS", 7)
    labels = torch.randint(50, (20,), generator=torch.Generator().manual_seed(0))
    labels[[6, 19]] = -100
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = compare_hf.total_loss(logits, labels)
    wanted = F.cross_entropy(logits, labels, reduction="sum")
    grads = [torch.autograd.grad(total, logits)[0] for total in (found, wanted)]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


def test_one_token_has_no_label(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens", "1"])
    assert "--tokens 1: it must be at least 2" in capsys.readouterr().err


PACKAGE = '''
import torch
from flash_attn.flash_attn_interface import (
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
    assert (causal, rank, world_size) == (True, 0, 1)
    longest = int(cu_seqlens.diff().max())
    return cu_seqlens, cu_seqlens, longest, longest, slice(0, int(cu_seqlens[-1]))


class Attention(torch.autograd.Function):
    """Of all documents, on the KV heads that one rank gathers at a time."""

    @staticmethod
    def forward(ctx, q, k, v, lengths, scale, causal):
        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, *lengths, 0.0, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = *lengths, 0.0, scale, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        saved = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in saved[:3]]
        _flash_attn_varlen_backward(dout, *saved, *grads, *ctx.rest)
        return *grads, None, None, None


def llama3_flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride,
    local_k_slice, softmax_scale, causal, group,
):
    assert group is None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    shared = q.shape[1] // k.shape[1] * heads_k_stride
    heads = [
        Attention.apply(q_, k_[local_k_slice], v_[local_k_slice], lengths, softmax_scale, causal)
        for q_, k_, v_ in zip(
            q.split(shared, 1), k.split(heads_k_stride, 1), v.split(heads_k_stride, 1), strict=True
        )
    ]
    return torch.cat(heads, 1)
'''


@pytest.fixture
def ring_flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of its structure on one rank, and operators that run on the CPU."""
    monkeypatch.setattr(peers, "PACKAGE", "llama3_of_this_test")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "llama3_of_this_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("import transformers_that_are_not_there")
    (folder / "llama3_flash_attn_varlen.py").write_text(PACKAGE)
    with operators_of_fa3():
        yield


@pytest.mark.usefixtures("ring_flash_attn")
def test_the_peer_has_the_error_of_ringfa3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 5% of it, whether one or both KV heads are gathered at a time."""
    load, strides = hf_ring_flash_attn.ring_flash_attn_functions, []

    def noting(*names: str) -> tuple[Callable[..., Any], ...]:
        attend, prepare = load(*names)

        def noted(*arguments: Any, **given: Any) -> Any:
            strides.append(given["heads_k_stride"])
            return attend(*arguments, **given)

        return noted, prepare

    monkeypatch.setattr(hf_ring_flash_attn, "ring_flash_attn_functions", noting)
    found = measure(TINY["llama-1b"], 300, 1, torch.device("cpu"), None, with_peers=True)
    assert [peer.name for peer in found.peers] == [
        "ring-flash-attn, 1 KV heads at a time", "ring-flash-attn, all KV heads at a time",
    ]  # fmt: skip
    assert [stride for stride, _ in itertools.groupby(strides)] == [1, 2]
    for peer in found.peers:
        assert peer.error == pytest.approx(found.ours, rel=0.05)
        assert peer.seconds > 0
        assert peer.speed > 0


def test_the_peer_gets_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels have no float32, which RoPE makes of q and k under autocast."""
    dtypes: list[torch.dtype] = []

    def attend(*tensors: Any, **_: Any) -> torch.Tensor:
        dtypes.extend(x.dtype for x in tensors[:3])
        return tensors[0]

    monkeypatch.setattr(hf_ring_flash_attn, "functions", lambda: [attend, lambda *_: [None] * 5])
    hf_ring_flash_attn.register(plan_context(8, layout="contiguous"), torch.device("cpu"))
    q, k, v = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        AttentionInterface()[hf_ring_flash_attn.NAME](None, q, k, v.bfloat16(), None, 0.25)
    assert dtypes == [torch.bfloat16] * 3


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("error", "code"), [(0.0109, 0), (0.0111, 1), (math.nan, 1)], ids=["right", "large", "nan"]
)
def test_a_peer_with_wrong_gradients_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, error: float, code: int
) -> None:
    """Its error is 1.09 or 1.11 times that of transformers' attention, or NaN; ours is the same."""
    found = Figures(
        0.01, 0.01, 1.0, [Peer("right", 0.01, 1.0, 1.0), Peer("wrong", error, 1.0, 1.0)]
    )
    monkeypatch.setattr(compare_hf, "measure", lambda *_, **__: found)
    assert main(["--tokens", "300"]) == code


def test_tokens_that_the_ranks_do_not_divide_are_refused_for_the_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the processes make a group: on every rank, and before anything is measured."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of this test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["--tokens", "32769", "--fa3", "fa3.so"])
    assert (
        "--tokens 32769: with --fa3 it must be a multiple of the 2 ranks" in capsys.readouterr().err
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "layout", "message"),
    [(301, "contiguous", r"\[151, 150\] tokens"), (300, "zigzag", "layout 'zigzag'")],
    ids=["uneven", "zigzag"],
)
def test_the_peer_refuses_another_plan_on_every_rank(
    rank: int, tokens: int, layout: str, message: str
) -> None:
    plan = plan_context(tokens, (rank, 2), layout=layout)
    with pytest.raises(ValueError, match=message):
        hf_ring_flash_attn.register(plan, torch.device("cpu"))
