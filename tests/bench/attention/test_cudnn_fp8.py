"""If this fails, the figures of cuDNN's FP8 forward are of another problem than RingFA3's. cuDNN's
FP8 forward: a module stands for its frontend on the CPU and computes in float32."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringfa3 import flash_attn_func
from ringfa3.bench.attention.cudnn_fp8 import CudnnFp8, cudnn_fp8
from ringfa3.bench.common.cases import CAUSAL, FORWARD, FULL, Case
from ringfa3.bench.common.problem import UnsupportedCaseError, make_problem

CPU = torch.device("cpu")


class NotSupportedError(Exception):
    """As the frontend's, which pybind11 registers without a base: no RuntimeError."""


class Tensor:
    """A tensor of a graph: (b, h, s, d) with strides."""

    def __init__(self, dim: Any = None, stride: Any = None, **_: Any) -> None:
        self.dim, self.stride = dim, stride

    def set_output(self, _: bool) -> Tensor:
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, _: str) -> Tensor:
        return self


class Graph:
    """`sdpa_fp8` with the arguments of nvidia-cudnn-frontend 1.15."""

    def __init__(self, **_: Any) -> None:
        self.built = 0

    def tensor(self, **given: Any) -> Tensor:
        return Tensor(**given)

    def sdpa_fp8(self, **given: Any) -> list[Tensor]:
        self.given, self.results = given, [Tensor() for _ in range(4)]
        return self.results

    def build_plans(self, *_: Any) -> None:
        self.built += 1

    validate = build_operation_graph = create_execution_plans = check_support = build_plans

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Tensor, torch.Tensor], _: torch.Tensor, handle: Any) -> None:
        assert handle is not None
        assert self.built == 5
        given = self.given

        def held(name: str) -> torch.Tensor:
            tensor = given[name]
            x = pack[tensor].view(torch.float8_e4m3fn)
            return x.as_strided(tensor.dim, tensor.stride).float() * number(f"descale_{name}")

        def number(name: str) -> float:
            return pack[given[name]].item()

        q, k, v = (held(name).transpose(1, 2) for name in "qkv")
        assert number("scale_s") * number("descale_s") == 1
        out = flash_attn_func(
            q, k, v, softmax_scale=given["attn_scale"], causal=given["use_causal_mask"]
        )
        assert isinstance(out, torch.Tensor)
        to = pack[self.results[0]].view(torch.float8_e4m3fn)
        to = to.as_strided(self.results[0].dim, self.results[0].stride).transpose(1, 2)
        to.copy_((out * number("scale_o")).to(torch.float8_e4m3fn))


@pytest.fixture
def module() -> Any:
    return SimpleNamespace(
        __version__="1.15.0",
        create_handle=object,
        set_stream=lambda handle, stream: None,
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float"),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=Graph,
        cudnnGraphNotSupportedError=NotSupportedError,
    )


@pytest.mark.parametrize("window", [FULL, CAUSAL])
def test_outputs_are_those_of_the_operands(module: Any, window: tuple[int, int]) -> None:
    """Within 8% of the rms of float32 attention: e4m3 rounds Q, K, V and O to 4 bits.

    The scale of V differs from those of Q and K: a wrong one shows.
    """
    case = Case("fp8", "70 x 2", (70, 70), 4, 2, 64, window)
    problem = make_problem(case, FORWARD, torch.bfloat16, CPU)
    problem.v.mul_(50), problem.q.mul_(0.3)
    prepared = CudnnFp8(module).prepare(problem)
    out = prepared.results()["out"]
    q, k, v = (x.float() for x in problem.inputs)
    expected = flash_attn_func(q, k, v, causal=window == CAUSAL)
    assert isinstance(expected, torch.Tensor)
    expected = expected.flatten(0, 1)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).square().mean() <= 0.08**2 * expected.square().mean()


def test_what_it_does_not_support(module: Any) -> None:
    for changed, message in (
        (Case("fp8", "w", (64,), 2, 2, 64, (16, 0)), "no window"),
        (Case("fp8", "p", (64,), 2, 2, 64, FULL, packed=True), "no packed documents"),
        (Case("fp8", "k", (64,), 2, 2, 64, CAUSAL, keys=(32,)), "aligns at the top left"),
    ):
        problem = make_problem(changed, FORWARD, torch.bfloat16, CPU)
        with pytest.raises(UnsupportedCaseError, match=message):
            CudnnFp8(module).prepare(problem)

    problem = make_problem(Case("fp8", "d", (64,), 2, 2, 64, FULL), FORWARD, torch.bfloat16, CPU)
    for kind in (NotSupportedError, RuntimeError, ValueError):

        def refuse(*_: Any, kind: type[Exception] = kind) -> None:
            raise kind("no engine\nsecond line")

        module.pygraph = type("Refusing", (Graph,), {"check_support": refuse})
        with pytest.raises(UnsupportedCaseError, match=r"^no engine$"):
            CudnnFp8(module).prepare(problem)


def test_a_missing_frontend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "nvidia-cudnn-frontend cannot be imported" in str(cudnn_fp8())
