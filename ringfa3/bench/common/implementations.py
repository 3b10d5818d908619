"""Who is measured: RingFA3's kernels, PyTorch's SDPA, FlashAttention-3."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.bench.common.cases import FORWARD, FULL, Case
from ringfa3.bench.common.problem import Attempt, Problem, RefusalError, differentiated, flat
from ringfa3.kernels import dispatch, forward
from ringfa3.kernels.dispatch import executor_reason
from ringfa3.planning.tiling import plan_local

OURS, FA3 = "RingFA3", "FA3"
MODULE = "flash_attn_interface"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PeerError(RuntimeError):
    """An implementation that was asked for cannot be loaded."""


class OneDevice(ABC):
    """An implementation on one device, by a differentiable function."""

    name: str

    @abstractmethod
    def attend(self, case: Case, device: torch.device) -> Attend:
        """Attention under the mask of a case, of any number of heads.

        Raises RefusalError for what it does not do.
        """

    def prepare(self, problem: Problem) -> Attempt:
        attend = self.attend(problem.case, problem.q.device)
        if problem.direction == FORWARD:
            return forward_of(problem, attend)
        return differentiated(problem, attend)


class Ours(OneDevice):
    """The public functions. On a GPU only where a kernel runs them, never the executor."""

    def __init__(self, name: str = OURS, deterministic: bool = False) -> None:
        self.name, self.deterministic = name, deterministic

    def attend(self, case: Case, device: torch.device) -> Attend:
        # Causal is the window (-1, 0).
        given: Any = {"window_size": case.window, "deterministic": self.deterministic}
        if not case.packed:
            return lambda q, k, v: tensor(flash_attn_func(q, k, v, **given))
        cu = torch.tensor(case.cumulative, dtype=torch.int32)  # read on the host: keep it there
        return lambda q, k, v: tensor(flash_attn_varlen_func(q, k, v, cu, cu, **given))

    def prepare(self, problem: Problem) -> Attempt:
        refuse_executor(problem)
        return super().prepare(problem)


def refuse_executor(problem: Problem) -> None:
    """Raises RefusalError where only the executor could run a problem that is on a GPU."""
    q = problem.q
    if q.is_cuda and (reason := executor_reason(problem.direction, q.flatten(0, -3))):
        raise RefusalError(reason)


class Variant:
    """Our forward kernel as one of `build.VARIANTS`, or as it is: the calls are the same."""

    def __init__(self, variant: str = "") -> None:
        self.name, self.variant = variant or OURS, variant

    def prepare(self, problem: Problem) -> Attempt:
        case, q = problem.case, problem.q.flatten(0, -3)
        if problem.direction != FORWARD:
            raise RefusalError("an ablation of the forward alone")
        unit = dispatch.unit_for(FORWARD, q)
        if reason := executor_reason(FORWARD, q):
            raise RefusalError(reason)
        assert unit is not None
        unit = replace(unit, variant=self.variant)
        rows, keys = np.array(case.lengths), np.array(case.key_lengths)
        tiling = plan_local(rows, keys, *case.window).forward(unit.tile_m)[0]
        scale = case.head_dim**-0.5

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
            out = torch.empty_like(q)
            lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
            forward.attend(unit, q, k, v, tiling, scale, out, lse[:0], lse)
            return out

        return forward_of(problem, attend)


class Sdpa(OneDevice):
    """PyTorch's scaled_dot_product_attention with one backend."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def attend(self, case: Case, device: torch.device) -> Attend:
        if case.packed:
            raise RefusalError("no packed documents")
        if not case.causal and case.window != FULL:
            raise RefusalError("no window")
        if case.causal and case.keys:
            raise RefusalError("aligns at the top left")
        grouped = case.heads != case.kv_heads

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(self.backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return attend

    def prepare(self, problem: Problem) -> Attempt:
        if problem.direction != FORWARD:
            return super().prepare(problem)
        # With gradients wanted it also writes the LSE, as the others always do.
        q, k, v = (x.detach().requires_grad_() for x in problem.inputs)
        return forward_of(
            replace(problem, q=q, k=k, v=v), self.attend(problem.case, problem.q.device)
        )


class Fa3Ops(OneDevice):
    """FlashAttention-3 as the operators of a library, `torch.ops.flash_attn_3`."""

    def __init__(self, library: Path, deterministic: bool = False) -> None:
        self.name, self.deterministic = fa3_name(deterministic), deterministic
        if not library.is_file():
            raise PeerError(f"--fa3 {library}: no such file")
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise PeerError(f"--fa3 {library.name} cannot be loaded: {reason}") from None
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            raise PeerError(f"--fa3 {library.name} has no operator torch.ops.flash_attn_3.fwd")
        self.identity = {"library": library.name, "sha256": _sha256(library)}

    def attend(self, case: Case, device: torch.device) -> Attend:
        left, right = FULL if case.causal else case.window
        given: dict[str, Any] = {
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            "window_size_left": left,
            "window_size_right": right,
        }
        if case.packed:
            given |= _packed(case, device)
        backward = given | _deterministic(case, self.deterministic)
        return lambda q, k, v: tensor(_Fa3.apply(q, k, v, given, backward))  # type: ignore[no-untyped-call]


class _Fa3(torch.autograd.Function):
    """The operators, with what each takes besides tensors."""

    @staticmethod
    def forward(ctx, q, k, v, given, backward):  # type: ignore[no-untyped-def]
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = backward
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in saved[:3])
        torch.ops.flash_attn_3.bwd(dout, *saved, *grads, **ctx.given)
        return *grads, None, None


class Fa3Module(OneDevice):
    """FlashAttention-3 as its Python package, `flash_attn_interface`."""

    def __init__(self, module: ModuleType, deterministic: bool = False) -> None:
        self.name, self.deterministic = fa3_name(deterministic), deterministic
        self.module = module
        self.identity = {"module": MODULE, "version": _version(module)}
        if file := getattr(module, "__file__", None):
            self.identity["sha256"] = _sha256(Path(file))

    def attend(self, case: Case, device: torch.device) -> Attend:
        masked: dict[str, Any] = {"causal": case.causal, **_deterministic(case, self.deterministic)}
        if not case.causal:
            masked["window_size"] = case.window
        if case.packed:
            masked |= _packed(case, device)
        function = "flash_attn_varlen_func" if case.packed else "flash_attn_func"
        func: Callable[..., Any] = getattr(self.module, function)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = func(q, k, v, **masked)
            return tensor(result[0] if isinstance(result, tuple) else result)  # old: (out, lse)

        return attend


def fa3_name(deterministic: bool) -> str:
    return f"{FA3} deterministic" if deterministic else FA3


def _deterministic(case: Case, wanted: bool) -> dict[str, bool]:
    """FlashAttention-3's argument. Raises RefusalError where it has no such backward."""
    if wanted and case.head_dim > 128:
        raise RefusalError(f"no deterministic backward at head dim {case.head_dim}")
    return {"deterministic": True} if wanted else {}


def _packed(case: Case, device: torch.device) -> dict[str, Any]:
    """FlashAttention-3's arguments for packed sequences."""
    cu = torch.tensor(case.cumulative, dtype=torch.int32, device=device)
    longest = max(case.lengths)
    return {
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def flash_attention_3(
    library: Path | None, deterministic: bool = False
) -> Fa3Ops | Fa3Module | None:
    """FlashAttention-3 from a library, or by import; None where it is not installed.

    Raises PeerError where it is there but cannot be loaded.
    """
    if library is not None:
        return Fa3Ops(library, deterministic)
    try:
        return Fa3Module(importlib.import_module(MODULE), deterministic)
    except ModuleNotFoundError as error:
        if error.name == MODULE:
            return None
        raise PeerError(f"{MODULE} cannot be imported: {error}") from None
    except (ImportError, OSError) as error:
        raise PeerError(f"{MODULE} cannot be imported: {error}") from None


def forward_of(problem: Problem, attend: Attend) -> Attempt:
    """`attend` of a problem's inputs."""
    inputs = tuple(problem.inputs)
    return Attempt(lambda: attend(*inputs), lambda out: flat(("out",), (out.detach(),)))


def tensor(x: Any) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def _version(module: ModuleType) -> str:
    for name in ("flash_attn_3", "flash-attn-3"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "unknown"))
