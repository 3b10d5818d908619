"""FlashAttention-3, as its operators in a library or as its Python package."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ringfa3.bench.common.cases import FULL, Case
from ringfa3.bench.common.implementations import (
    FA3,
    Attend,
    LoadError,
    SingleDevice,
    name_of,
    tensor,
)
from ringfa3.bench.common.problem import UnsupportedCaseError

MODULE = "flash_attn_interface"


class Fa3Ops(SingleDevice):
    """The operators of a library, `torch.ops.flash_attn_3`."""

    def __init__(self, library: Path, deterministic: bool = False) -> None:
        self.name, self.deterministic = name_of(FA3, deterministic), deterministic
        if not library.is_file():
            raise LoadError(f"--fa3 {library}: no such file")
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise LoadError(f"--fa3 {library.name} cannot be loaded: {reason}") from None
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            raise LoadError(f"--fa3 {library.name} has no operator torch.ops.flash_attn_3.fwd")
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
            given |= packed_arguments(case, device)
        backward = given | _deterministic(case, self.deterministic)
        return lambda q, k, v: tensor(_Fa3.apply(q, k, v, given, backward))  # type: ignore[no-untyped-call]


class _Fa3(torch.autograd.Function):
    """The operators; `given` and `backward` are their keyword arguments."""

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


class Fa3Module(SingleDevice):
    """The Python package, `flash_attn_interface`."""

    def __init__(self, module: ModuleType, deterministic: bool = False) -> None:
        self.name, self.deterministic = name_of(FA3, deterministic), deterministic
        self.module = module
        self.identity = {"module": MODULE, "version": _version(module)}
        if file := getattr(module, "__file__", None):
            self.identity["sha256"] = _sha256(Path(file))

    def attend(self, case: Case, device: torch.device) -> Attend:
        masked: dict[str, Any] = {"causal": case.causal, **_deterministic(case, self.deterministic)}
        if not case.causal:
            masked["window_size"] = case.window
        if case.packed:
            masked |= packed_arguments(case, device)
        function = "flash_attn_varlen_func" if case.packed else "flash_attn_func"
        func: Callable[..., Any] = getattr(self.module, function)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = func(q, k, v, **masked)
            return tensor(
                result[0] if isinstance(result, tuple) else result
            )  # earlier versions: (out, lse)

        return attend


def _deterministic(case: Case, wanted: bool) -> dict[str, bool]:
    """The argument `deterministic`. Raises UnsupportedCaseError above head dim 128."""
    if wanted and case.head_dim > 128:
        raise UnsupportedCaseError(f"no deterministic backward at head dim {case.head_dim}")
    return {"deterministic": True} if wanted else {}


def packed_arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments for packed sequences."""
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

    Raises LoadError where the library or the package exists but cannot be loaded.
    """
    if library is not None:
        return Fa3Ops(library, deterministic)
    try:
        return Fa3Module(importlib.import_module(MODULE), deterministic)
    except ModuleNotFoundError as error:
        if error.name == MODULE:
            return None
        raise LoadError(f"{MODULE} cannot be imported: {error}") from None
    except (ImportError, OSError) as error:
        raise LoadError(f"{MODULE} cannot be imported: {error}") from None


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
