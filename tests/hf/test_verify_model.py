"""If this fails, `ringfa3.hf.verify` accepts a model that is wrong, or refuses a right one.
`ringfa3.hf.verify` passes models that are right, and finds what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

import ringfa3.hf
from ringfa3.hf import ring_layer
from ringfa3.hf.verification import Verification, verify
from ringfa3.hf.verify_model import _start_ranks, main
from tests.support.hf_models import CONFIGS, EXPERTS, VOCABULARY, config_of, tokens
from tests.support.ranks import Ranks

LENGTHS = (37, 1, 40, 12)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = config_of(name, initializer_range=0.15)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="ringfa3", dtype=dtype, **EXPERTS
    )


def batch() -> dict[str, torch.Tensor]:
    ids = tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "labels": ids.where(positions > 0, -100), "position_ids": positions}


def _verified(
    group: dist.ProcessGroup, name: str, dtype: torch.dtype, reference: str
) -> tuple[bool, str]:
    found = verify(model_of(name, dtype), batch(), group, reference=reference)
    return bool(found), str(found)


@pytest.mark.parametrize(
    ("name", "dtype", "reference"),
    [
        *((name, torch.float32, "ringfa3") for name in CONFIGS),
        ("qwen3", torch.bfloat16, "ringfa3"),
        ("llama", torch.float32, "eager"),
    ],
)
def test_models_are_right_under_a_ring(
    ranks: Ranks, name: str, dtype: torch.dtype, reference: str
) -> None:
    first, second = ranks.run(2, _verified, name, dtype, reference)
    assert first == second
    assert first[0], first[1]
    assert first[1].startswith("right: loss ")


def _balanced(group: dist.ProcessGroup, right: bool) -> str:
    """With the balance of experts in the loss: of all tokens, or of each rank's own."""
    model = model_of("qwen3-moe")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 1.0
    keep = contextlib.nullcontext() if right else mock.patch.object(ring_layer, "carry_plan")
    with keep:
        return str(verify(model, batch(), group))


@pytest.mark.parametrize("right", [True, False])
def test_the_balance_of_experts_counts(ranks: Ranks, right: bool) -> None:
    text = ranks.run(2, _balanced, right)[0]
    assert text.startswith("right: " if right else "wrong: ")
    assert right or "mlp.gate.weight" in text


class _Mixer(nn.Module):
    """A linear layer that also takes from the token before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1].sum(-1, keepdim=True)  # type: ignore[no-any-return]


def _mean(model: Any, inputs: dict[str, Any], num_labels: torch.Tensor) -> torch.Tensor:
    """A loss that is divided by this rank's labels."""
    labels = inputs.pop("shift_labels").flatten()
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits.flatten(0, 1)
    return F.cross_entropy(logits, labels)


def _wrong(group: dist.ProcessGroup, fault: str) -> str:
    model, step = model_of("gemma3"), None
    right, patches = ring_layer.attend, []

    def changed(plan: Any, q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        sink, scale, left, *others = rest
        if fault == "window off by one" and left >= 0:
            left += 1
        if fault == "dropped window":
            left = -1
        if fault == "dropped documents":
            plan = ringfa3.plan_context(plan.total_tokens, group)
        return right(plan, q, k, v, sink, scale, left, *others)

    if fault in ("window off by one", "dropped window", "dropped documents"):
        patches.append(mock.patch.object(ring_layer, "attend", changed))
    if fault == "mean of the rank":
        step = _mean
    if fault == "layer that mixes tokens":
        layer = model.model.layers[1].mlp
        layer.up_proj = _Mixer(layer.up_proj)
    if fault == "other weights" and dist.get_rank(group) == 1:
        model.lm_head.weight.data[3] += 1
    for patch in patches:
        patch.start()
    try:
        return str(verify(model, batch(), group, step))
    except ValueError as problem:
        return f"refused: {problem}"
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("none", "right: loss"),
        ("window off by one", "wrong: loss"),
        ("dropped window", "wrong: loss"),
        ("dropped documents", "wrong: loss"),
        ("mean of the rank", "wrong: loss"),
        ("layer that mixes tokens", "wrong under a ring: model.layers.1.mlp.up_proj (_Mixer) mix"),
        ("other weights", "refused: the model has other weights"),
    ],
)
def test_faults_are_found(ranks: Ranks, fault: str, verdict: str) -> None:
    first, second = ranks.run(2, _wrong, fault)
    assert first == second
    assert verdict in first


def test_a_nan_is_wrong() -> None:
    found = Verification(2, "float32", (1.0, 1.0), {"a": float("nan")}, {"a": 1.0})
    assert not found
    assert "a nan" in str(found)


def test_one_rank_is_no_ring() -> None:
    with pytest.raises(ValueError, match="2 or more ranks"):
        verify(model_of("llama"), batch())


def _command(group: dist.ProcessGroup, folder: str, *arguments: str) -> tuple[int, str]:
    """The program on this rank of the pool, which has a process group already."""
    place = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        return main([folder, "--random", *arguments]), printed.getvalue()


def test_the_command_prints_a_verdict(ranks: Ranks, tmp_path: Path) -> None:
    config_of("qwen3", initializer_range=0.15).save_pretrained(tmp_path)
    data, figures = tmp_path / "rows.jsonl", tmp_path / "figures.json"
    rows = [{"input_ids": list(range(1, 40))}, {"input_ids": [5, VOCABULARY - 1]}]
    data.write_text("\n".join(map(json.dumps, rows)))
    arguments = (str(tmp_path), "--data", str(data), "--json", str(figures))
    (code, printed), *others = ranks.run(4, _command, *arguments)
    assert (code, others) == (0, [(0, "")] * 3)
    assert printed.splitlines()[-1].startswith("right: loss ")
    assert json.loads(figures.read_text())["right"] is True
    data.write_text('{"text": "no ids"}')
    (code, printed), *_ = ranks.run(4, _command, *arguments)
    assert (code, printed) == (
        2, f"rank 0: ValueError: {data}: each line needs input_ids, a list of token ids\n"
    )  # fmt: skip
    data.write_text("")
    (code, printed), *_ = ranks.run(4, _command, *arguments)
    assert (code, printed) == (
        2,
        f"rank 0: ValueError: {data} has no documents within --tokens 512\n",
    )


class _Process:
    """A rank that ends with a code at once, or waits until it is killed."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    def wait(self) -> int:
        assert self.code is not None
        return self.code


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((1, 1), 1), ((2, None), 2), ((-11, 0), 2)]
)
def test_a_rank_that_fails_ends_the_others(
    codes: tuple[int | None, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = iter(map(_Process, codes))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: next(started))
    monkeypatch.setattr("ringfa3.hf.verify_model.GRACE_S", 0.0)
    assert _start_ranks(len(codes), []) == expected


@pytest.mark.soak
def test_a_folder_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"{tmp_path}/none", "--random"])
    assert f"there is no folder {tmp_path}/none" in capsys.readouterr().err


def test_the_command_starts_its_ranks(tmp_path: Path) -> None:
    config_of("qwen3", initializer_range=0.15).save_pretrained(tmp_path)
    command = [
        sys.executable,
        "-m",
        "ringfa3.hf.verify_model",
        str(tmp_path),
        "--random",
        "--cp",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert " over a ring of 3, " in done.stdout.splitlines()[-1]
