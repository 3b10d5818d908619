"""FlashAttention-4 for Hopper, from a folder of unpacked wheels or as an installed package."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ringfa3.bench.attention.flex_attention import BLOCK, RunsOfKeys
from ringfa3.bench.common.cases import Case
from ringfa3.bench.common.fa3 import packed_arguments
from ringfa3.bench.common.implementations import (
    FA4,
    Attend,
    LoadError,
    SingleDevice,
    name_of,
    tensor,
)
from ringfa3.bench.common.problem import PreparedRun, Problem, UnsupportedCaseError

MODULE = "flash_attn.cute"
DSL = Path("nvidia_cutlass_dsl") / "dsl_packages"  # which its wheel adds to the path by a .pth file
PACKAGES = {"version": "flash-attn-4", "dsl": "nvidia-cutlass-dsl"}


class Fa4(SingleDevice):
    """The functions of `flash_attn.cute`.

    A kernel compiles in the first call with its shapes and settings, in seconds. That call is never
    timed: every result is checked first.
    """

    def __init__(
        self, module: ModuleType, folder: Path | None = None, deterministic: bool = False
    ) -> None:
        self.name, self.deterministic = name_of(FA4, deterministic), deterministic
        self.module = module
        self.identity = {"module": MODULE, **_versions()}
        if folder is not None:
            self.identity["folder"] = folder.resolve().name

    def attend(self, case: Case, device: torch.device) -> Attend:
        # As the other libraries do, it writes the LSE in a forward without gradients too.
        given: dict[str, Any] = {"causal": case.causal, "return_lse": True}
        if self.deterministic:
            given["deterministic"] = True
        if not case.causal:
            left, right = case.window
            given["window_size"] = (None if left < 0 else left, None if right < 0 else right)
        if case.spans is not None:
            given |= self._spans(case, device)
            batched = self.module.flash_attn_func
            return lambda q, k, v: tensor(batched(q[None], k[None], v[None], **given)[0])[0]
        if case.packed:
            given |= packed_arguments(case, device)
        function = "flash_attn_varlen_func" if case.packed else "flash_attn_func"
        func: Callable[..., Any] = getattr(self.module, function)
        return lambda q, k, v: tensor(func(q, k, v, **given)[0])

    def _spans(self, case: Case, device: torch.device) -> dict[str, Any]:
        """The arguments for a mask of spans: a function of a row and a key, and blocks to visit."""
        runs = RunsOfKeys.of(case, device)
        blocks = runs.block_mask()
        sparsity = importlib.import_module(f"{MODULE}.block_sparsity").BlockSparseTensorsTorch

        def visited(own: str) -> Any:
            """By rows ("kv") or by keys ("q"): the blocks with some pairs, and the full ones."""
            names = (f"{own}_num_blocks", f"{own}_indices")
            partial, full = ([getattr(blocks, x + n) for n in names] for x in ("", "full_"))
            return sparsity(*partial, *full, block_size=(BLOCK, BLOCK))

        return {
            "mask_mod": _mask_mod(),
            "aux_tensors": [torch.cat((runs.begins, runs.ends))],
            "block_sparse_tensors": visited("kv"),
            "block_sparse_tensors_bwd": visited("q"),
        }

    def prepare(self, problem: Problem) -> PreparedRun:
        with _refusing():
            prepared = super().prepare(problem)

        def run() -> Any:
            with _refusing():
                return prepared.run()

        return replace(prepared, run=run)


@cache
def _mask_mod() -> Callable[..., Any]:
    """`RunsOfKeys.mask_mod` as the kernels compile it; its tensor (4, rows): begins, then ends."""
    cute, utils = map(importlib.import_module, ("cutlass.cute", f"{MODULE}.utils"))
    number = importlib.import_module("cutlass").Int32

    def visible(batch, head, row, key, seqlens, tensors):  # type: ignore[no-untyped-def]
        runs = tensors[0]
        begin = utils.scalar_to_ssa(runs[0, row[0]], number)
        begin2 = utils.scalar_to_ssa(runs[1, row[0]], number)
        end = utils.scalar_to_ssa(runs[2, row[0]], number)
        end2 = utils.scalar_to_ssa(runs[3, row[0]], number)
        return ((key >= begin) & (key < end)) | ((key >= begin2) & (key < end2))

    compiled: Callable[..., Any] = cute.jit(visible)
    return compiled


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise UnsupportedCaseError for a case that the library's own checks reject."""
    try:
        yield
    except (AssertionError, NotImplementedError, ValueError) as error:
        lines = str(error).strip().splitlines() or [f"{type(error).__name__} without a message"]
        raise UnsupportedCaseError(lines[0]) from error


def flash_attention_4(folder: Path | None, deterministic: bool = False) -> Fa4 | str:
    """FlashAttention-4 from `folder`, or by import; or why it cannot be imported.

    Raises LoadError where `folder` is given and cannot be imported from.
    """
    if folder is not None:
        if not (folder / "flash_attn" / "cute").is_dir():
            raise LoadError(
                f"--fa4 {folder}: no folder flash_attn/cute in it; unpack the wheels of "
                "flash-attn-4 and of what it requires into one folder"
            )
        for path in (folder, folder / DSL):
            if str(path.resolve()) not in sys.path:
                sys.path.insert(0, str(path.resolve()))
        importlib.invalidate_caches()
    try:
        return Fa4(importlib.import_module(MODULE), folder, deterministic)
    except (ImportError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if folder is not None:
            raise LoadError(f"--fa4 {folder}: {MODULE} cannot be imported: {reason}") from None
        return f"{MODULE} cannot be imported ({reason}) and no --fa4 DIR was given"


def _versions() -> dict[str, str]:
    found = {}
    for key, package in PACKAGES.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[key] = "unknown"
    return found
