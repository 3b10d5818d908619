"""Who is measured: RingFA3's kernels, PyTorch's SDPA, FlashAttention-3."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringfa3 import flash_attn_func, flash_attn_varlen_func, kernels
from ringfa3.bench.cases import FORWARD, FULL
from ringfa3.bench.problem import GRADIENTS, Attempt, Problem, RefusalError, differentiated, flat
from ringfa3.engine import executor_reason
from ringfa3.plan import plan_local

OURS, FA3 = "RingFA3", "FA3"
MODULE = "flash_attn_interface"


class PeerError(RuntimeError):
    """An implementation that was asked for cannot be loaded."""


class Ours:
    """The public functions. On a GPU only where a kernel runs them, never the executor."""

    def __init__(self, name: str = OURS) -> None:
        self.name = name

    def prepare(self, problem: Problem) -> Attempt:
        case, q = problem.case, problem.q
        if q.is_cuda and (reason := executor_reason(problem.direction, q.flatten(0, -3))):
            raise RefusalError(reason)
        window = case.window  # causal is the window (-1, 0)
        if case.packed:
            cu = torch.tensor(case.cumulative, dtype=torch.int32)  # read on the host: keep it there

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return _tensor(flash_attn_varlen_func(q, k, v, cu, cu, window_size=window))
        else:

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return _tensor(flash_attn_func(q, k, v, window_size=window))

        if problem.direction == FORWARD:
            return _forward(lambda: attend(*problem.inputs))
        return differentiated(problem, attend)


class Variant:
    """Our forward kernel as one of `build.VARIANTS`, or as it is: the calls are the same."""

    def __init__(self, variant: str = "") -> None:
        self.name, self.variant = variant or OURS, variant

    def prepare(self, problem: Problem) -> Attempt:
        case = problem.case
        q, k, v = (x.flatten(0, -3) for x in problem.inputs)
        if problem.direction != FORWARD:
            raise RefusalError("an ablation of the forward alone")
        unit = kernels.unit_for("forward", q)
        if reason := executor_reason(FORWARD, q):
            raise RefusalError(reason)
        assert unit is not None
        unit = replace(unit, variant=self.variant)
        lengths = np.array(case.lengths)
        tiling = plan_local(lengths, lengths, *case.window).forward(unit.tile_m)[0]
        scale = case.head_dim**-0.5

        def attend() -> torch.Tensor:
            out = torch.empty_like(q)
            lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
            kernels.attend(unit, q, k, v, tiling, scale, out, lse[:0], lse)
            return out

        return _forward(attend)


class Sdpa:
    """PyTorch's scaled_dot_product_attention with one backend."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def prepare(self, problem: Problem) -> Attempt:
        case = problem.case
        if case.packed:
            raise RefusalError("no packed documents")
        if not case.causal and case.window != FULL:
            raise RefusalError("no window")
        grouped = case.heads != case.kv_heads

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(self.backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        if problem.direction != FORWARD:
            return differentiated(problem, attend)
        # With gradients wanted it also writes the LSE, as the others always do.
        inputs = tuple(x.detach().requires_grad_() for x in problem.inputs)
        return _forward(lambda: attend(*inputs))


class Fa3Ops:
    """FlashAttention-3 as the operators of a library, `torch.ops.flash_attn_3`."""

    name = FA3

    def __init__(self, library: Path) -> None:
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

    def prepare(self, problem: Problem) -> Attempt:
        case, (q, k, v) = problem.case, problem.inputs
        left, right = FULL if case.causal else case.window
        common: dict[str, Any] = {
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            "window_size_left": left,
            "window_size_right": right,
        }
        if case.packed:
            cu = torch.tensor(case.cumulative, dtype=torch.int32, device=q.device)
            longest = max(case.lengths)
            common |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            common |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        ops = torch.ops.flash_attn_3

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            out, lse, *_ = ops.fwd(q, k, v, num_splits=1, **common)
            return out, lse

        if problem.direction == FORWARD:
            return _forward(lambda: forward()[0])
        out, lse = forward()

        def backward() -> tuple[torch.Tensor, ...]:
            grads = tuple(torch.empty_like(x) for x in (q, k, v))
            ops.bwd(problem.dout, q, k, v, out, lse, *grads, **common)
            return grads

        return Attempt(backward, lambda grads: flat(GRADIENTS, grads))


class Fa3Module:
    """FlashAttention-3 as its Python package, `flash_attn_interface`."""

    name = FA3

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.identity = {"module": MODULE, "version": _version(module)}
        if file := getattr(module, "__file__", None):
            self.identity["sha256"] = _sha256(Path(file))

    def prepare(self, problem: Problem) -> Attempt:
        case = problem.case
        masked: dict[str, Any] = {"causal": case.causal}
        if not case.causal:
            masked["window_size"] = case.window
        if case.packed:
            cu = torch.tensor(case.cumulative, dtype=torch.int32, device=problem.q.device)
            longest = max(case.lengths)
            masked |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            masked |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        function = "flash_attn_varlen_func" if case.packed else "flash_attn_func"
        func: Callable[..., Any] = getattr(self.module, function)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = func(q, k, v, **masked)
            return _tensor(result[0] if isinstance(result, tuple) else result)  # old: (out, lse)

        if problem.direction == FORWARD:
            return _forward(lambda: attend(*problem.inputs))
        return differentiated(problem, attend)


def flash_attention_3(library: Path | None) -> Fa3Ops | Fa3Module | None:
    """FlashAttention-3 from a library, or by import; None where it is not installed.

    Raises PeerError where it is there but cannot be loaded.
    """
    if library is not None:
        return Fa3Ops(library)
    try:
        return Fa3Module(importlib.import_module(MODULE))
    except ModuleNotFoundError as error:
        if error.name == MODULE:
            return None
        raise PeerError(f"{MODULE} cannot be imported: {error}") from None
    except (ImportError, OSError) as error:
        raise PeerError(f"{MODULE} cannot be imported: {error}") from None


def _forward(call: Callable[[], torch.Tensor]) -> Attempt:
    return Attempt(call, lambda out: flat(("out",), (out.detach(),)))


def _tensor(x: Any) -> torch.Tensor:
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
