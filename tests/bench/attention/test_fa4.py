"""If this fails, figures of FlashAttention-4 are missing, or those of another version.
FlashAttention-4 by its Python interface: a folder of wheels stands for it on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringfa3 import Mask
from ringfa3.bench.__main__ import main
from ringfa3.bench.attention import fa4 as fa4_module
from ringfa3.bench.attention.cases import TREE
from ringfa3.bench.attention.fa4 import Fa4, flash_attention_4
from ringfa3.bench.attention.flex_attention import RunsOfKeys
from ringfa3.bench.common.cases import BACKWARD, FORWARD, of_spans
from ringfa3.bench.common.comparison import measure_row
from ringfa3.bench.common.implementations import LoadError, RingFA3
from ringfa3.bench.common.timing import WallClock
from tests.support.cases import CASES

CPU = torch.device("cpu")
# Arguments in the order of flash-attn-4 4.0.0b36; a window is None on a side without limit.
INTERFACE = """
import cutlass  # of nvidia_cutlass_dsl/dsl_packages
import torch
from tests.support.dense import attention
from ringfa3 import flash_attn_func as dense, flash_attn_varlen_func as varlen

calls, visited = [], []


def window(causal, window_size):
    assert all(side is None or side >= 0 for side in window_size)
    left, right = (-1 if side is None else side for side in window_size)
    assert window_size == (None, None) or not causal
    return (left, 0 if causal else right)


def flash_attn_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
):
    calls.append((deterministic, return_lse))
    if mask_mod is not None:
        visited[:] = block_sparse_tensors, block_sparse_tensors_bwd
        keys = torch.arange(k.shape[1])
        rows = [mask_mod(None, None, row[None], keys, None, aux_tensors) for row in keys]
        return attention(q[0], k[0], v[0], torch.stack(rows))[0][None], None
    return dense(q, k, v, window_size=window(causal, window_size)), None


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    causal=False, window_size=(None, None), deterministic=False, return_lse=False,
):
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    given = (cu_seqlens_q, cu_seqlens_k)
    return varlen(q, k, v, *given, window_size=window(causal, window_size)), None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Unpacked wheels: `flash_attn` without an __init__.py, and CUTLASS beside it."""
    wheels = tmp_path / "wheels"
    for name, text in (
        ("flash_attn/cute/__init__.py", INTERFACE),
        ("flash_attn/cute/utils.py", "def scalar_to_ssa(x, dtype): return x"),
        (
            "flash_attn/cute/block_sparsity.py",
            "BlockSparseTensorsTorch = lambda *x, **more: (x, more)",
        ),
        ("nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py", "Int32 = int"),
        ("nvidia_cutlass_dsl/dsl_packages/cutlass/cute.py", "def jit(function): return function"),
        ("flash_attn_4-4.0.0b36.dist-info/METADATA", "Name: flash-attn-4\nVersion: 4.0.0b36\n"),
    ):
        (wheels / name).parent.mkdir(parents=True, exist_ok=True)
        (wheels / name).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield wheels
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("flash_attn", "cutlass"):
            del sys.modules[name]


def loaded(folder: Path, deterministic: bool = False) -> Fa4:
    found = flash_attention_4(folder, deterministic)
    assert isinstance(found, Fa4)
    return found


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_every_mask_agrees_with_float64(folder: Path, direction: str) -> None:
    """Within the bounds of a row of the benchmark, and it is timed."""
    for case in CASES:
        implementations = [RingFA3(), loaded(folder)]
        row = measure_row(case, direction, torch.float32, CPU, implementations, 10, WallClock())
        assert row.stopped is None
        assert row.comparisons["FA4"].stopped is None
        assert row.comparisons["FA4"].ratio is not None


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_masks_of_spans_agree_with_float64(folder: Path, direction: str) -> None:
    """By the function of a row and a key; the blocks are those of FlexAttention's mask."""
    fa4_module._mask_mod.cache_clear()
    mask = Mask.pack([Mask.tree([70, 40, 60], [-1, 0, 0]), Mask.tree([128, 30], [-1, 0])])
    case, found = replace(of_spans(TREE, "any", mask), heads=4, kv_heads=2), loaded(folder)
    row = measure_row(case, direction, torch.float32, CPU, [RingFA3(), found], 10, WallClock())
    assert row.comparisons["FA4"].stopped is None
    assert row.comparisons["FA4"].ratio is not None
    blocks = RunsOfKeys.of(case, CPU).block_mask()
    for (tensors, more), own in zip(found.module.visited, ("kv", "q"), strict=True):
        assert more == {"block_size": (128, 128)}
        for i, full in enumerate(("", "full_")):
            number, index = tensors[2 * i : 2 * i + 2]
            assert torch.equal(number, getattr(blocks, f"{full}{own}_num_blocks"))
            assert torch.equal(index, getattr(blocks, f"{full}{own}_indices"))


def test_determinism_is_asked_for_and_the_lse_is_written(folder: Path) -> None:
    for wanted, name in ((False, "FA4"), (True, "FA4 deterministic")):
        found = loaded(folder, wanted)
        assert found.name == name
        found.module.calls.clear()
        measure_row(CASES[0], BACKWARD, torch.float32, CPU, [RingFA3(), found], 10, WallClock())
        assert found.module.calls == [(wanted, True)]


def test_what_was_measured_is_named(folder: Path) -> None:
    identity = loaded(folder).identity
    assert identity["folder"] == "wheels"  # no path
    assert identity["version"] == "4.0.0b36"
    assert identity["dsl"] == "unknown"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "AssertionError('head_dim 24 is not supported on SM90.\\nmore')",
            "refused: head_dim 24 is",
        ),
        ("NotImplementedError('no window')", "refused: no window"),
        ("ValueError('requires 2CTA')", "refused: requires 2CTA"),
        ("AssertionError()", "refused: AssertionError without a message"),
        ("RuntimeError('ptxas died')", "failed: ptxas died"),
    ],
)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_case_that_it_rejects_says_so_in_words(
    folder: Path, error: str, words: str, direction: str
) -> None:
    """In the call; the row goes on with the other libraries."""
    path = folder / "flash_attn" / "cute" / "__init__.py"
    path.write_text(path.read_text().replace("    calls.append", f"    raise {error}\n    calls"))
    again = RingFA3("again")
    implementations = [RingFA3(), loaded(folder), again]
    row = measure_row(CASES[0], direction, torch.float32, CPU, implementations, 10, WallClock())
    assert str(row.comparisons["FA4"].stopped).startswith(words)
    assert row.comparisons["again"].ratio is not None


def test_a_backward_that_it_rejects_says_so_in_words(folder: Path) -> None:
    path = folder / "flash_attn" / "cute" / "__init__.py"
    path.write_text(
        path.read_text()
        + "\ndef reject(x):\n    raise AssertionError('no backward')\n"
        + "\nforward = flash_attn_func\n"
        + "\ndef flash_attn_func(*given, **more):\n    out, lse = forward(*given, **more)\n"
        + "    out.requires_grad and out.register_hook(reject)\n    return out, lse\n"
    )
    implementations = [RingFA3(), loaded(folder)]
    row = measure_row(CASES[0], BACKWARD, torch.float32, CPU, implementations, 10, WallClock())
    assert row.comparisons["FA4"].stopped == "refused: no backward"


def test_a_folder_without_it_is_an_error_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(LoadError, match=r"no folder flash_attn/cute in it; unpack the wheels"):
        flash_attention_4(tmp_path / "empty")
    packages = folder / "nvidia_cutlass_dsl" / "dsl_packages"
    packages.rename(packages.with_name("elsewhere"))
    with pytest.raises(LoadError, match=r"cannot be imported: No module named 'cutlass'"):
        flash_attention_4(folder)


def test_without_a_folder_an_incomplete_installation_is_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of FlashAttention-2 may have a `flash_attn.cute` without CUTLASS."""
    monkeypatch.setattr(fa4_module, "MODULE", "flash_attn_of_this_test.cute")
    note = flash_attention_4(None)
    assert isinstance(note, str)
    assert note.endswith("and no --fa4 DIR was given")
    monkeypatch.setattr(fa4_module, "MODULE", "flash_attn.cute")
    monkeypatch.syspath_prepend(folder)
    assert "No module named 'cutlass'" in str(flash_attention_4(None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fa4", "x"], "--fa4 needs a GPU; leave it out with --device cpu"),
        (["--fa4", "x", "--peers", "fa3"], "--fa4 was given, but --peers leaves fa4 out"),
        (["--sample-ms", "0"], "--sample-ms 0: it must be above 0"),
        (["--errors-only"], "--errors-only goes with --set scores alone"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_options_that_contradict_are_one_line_and_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attention", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
