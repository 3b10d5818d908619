"""If this fails, the published errors of 8-bit attention are wrong. `python -m ringfa3.bench fp8`:
errors of designs, by the PyTorch fallback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ringfa3 import flash_attn_func
from ringfa3.bench.__main__ import main
from ringfa3.bench.common.scores import SCORES
from ringfa3.bench.fp8.designs import DESIGNS, attention
from ringfa3.bench.fp8.run import Row, summary


def outliers(seed: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(shape, generator=generator) for _ in range(3)]
    SCORES["outliers"](*qkv, generator)
    return [x.bfloat16() for x in qkv]


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_the_designs_of_ringfa3_are_its_precisions(precision: str) -> None:
    """Equal bits but for the output dtype, which is float32 here."""
    q, k, v = outliers(0, 300, 2, 64)
    out, lse = attention(DESIGNS[precision], q, k, v, causal=True)
    got = flash_attn_func(
        *(x[None].float() for x in (q, k, v)), causal=True, precision=precision, return_lse=True
    )
    torch.testing.assert_close(got[1][0], lse, atol=1e-5, rtol=0)
    limit = 0 if precision == "fp8" else 2.0**-8 * v.float().abs().max()  # P in float32, not bf16
    assert (got[0][0] - out).abs().max() <= limit


def test_every_part_of_a_design_pays_where_it_should(tmp_path: Path) -> None:
    """Without Hadamard outliers cost more, without centring means do, with one scale all do."""
    q, k, v = outliers(1, 1024, 2, 64)
    means = k + torch.randn(2, 64) * 2, v + torch.randn(2, 64) * 20
    for precision in ("fp8", "int8"):
        errors = {}
        for name, design in DESIGNS.items():
            if design.precision == precision:
                keys, values = means if "centring" in name else (k, v)
                out, _ = attention(design, q, keys.bfloat16(), values.bfloat16(), causal=False)
                wide = [x.bfloat16()[None].double() for x in (q, keys, values)]
                expected = flash_attn_func(*wide)[0]
                assert isinstance(expected, torch.Tensor)
                errors[name] = (out - expected).square().mean().sqrt().item()
        whole = errors[precision]
        assert errors[f"{precision} without Hadamard"] > 1.15 * whole
        assert errors[f"{precision} without tile scales"] > 0.99 * whole
        assert errors[f"{precision} without centring"] > 1.3 * whole
        if precision == "fp8":
            assert errors["per tensor"] > 1.5 * whole


def test_the_command_writes_errors_of_every_design(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--lengths", "200", "--heads", "2", "--seeds", "2", "--head-dim", "64"]
    assert main(["fp8", *small, "--device", "cpu", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "times less error than per tensor: fp8 " in said.splitlines()[-1]
    content = json.loads((tmp_path / "errors.json").read_text())
    assert [row["causal"] for row in content["rows"]] == [False, True]
    for row in content["rows"]:
        assert list(row["out"]) == list(row["lse"]) == list(DESIGNS)
        assert 0 < row["out"]["int8"] < row["out"]["fp8"] < row["out"]["per tensor"] < row["size"]
    q, k, v = outliers(0, 200, 2, 64)  # the first seed's squared error is a part of the row's
    exact = flash_attn_func(*(x[None].double() for x in (q, k, v)))[0]
    assert isinstance(exact, torch.Tensor)
    out, _ = attention(DESIGNS["fp8"], q, k, v, causal=False)
    share = (out - exact).square().mean().item() / 2
    assert share < content["rows"][0]["out"]["fp8"] ** 2 < 8 * share
    assert main(["fp8", *small, "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "has results already" in capsys.readouterr().err
    assert json.loads((tmp_path / "errors.json").read_text()) == content


def test_the_summary_is_a_geometric_mean() -> None:
    rows = [Row(1, 64, False, out={"per tensor": x, "fp8": 1.0}) for x in (2.0, 8.0)]
    assert summary(rows, ["per tensor", "fp8"]).endswith("fp8 4.00")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_bandwidth_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fp8", "--bandwidth"]) == 2
    assert "no CUDA GPU is visible" in capsys.readouterr().err


def test_kernels_need_a_gpu_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--lengths", "200", "--seeds", "1", "--kernels", "--out", str(tmp_path)]
    assert main(["fp8", *small, "--device", "cpu"]) == 2
    assert "no kernel attends in 8 bits at head_dim 128 on cpu" in capsys.readouterr().err


def test_too_few_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fp8", "--lengths", "0", "--device", "cpu"]) == 2
    assert "--lengths" in capsys.readouterr().err
