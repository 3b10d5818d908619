"""The other libraries: ring-flash-attn, Ulysses, and PyTorch's context_parallel."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringfa3.bench.common.cases import Case
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.implementations import FA3, Attend, LoadError, SingleDevice, tensor
from ringfa3.bench.common.problem import Outputs, PreparedRun, Problem, UnsupportedCaseError
from ringfa3.bench.ring.cases import RingCase
from ringfa3.bench.ring.implementations import Distributed

ZIGZAG = "ring-flash-attn"
ZIGZAG_FUNCTION = "zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func"  # module and name
ULYSSES = "Ulysses"
TORCH = "PyTorch context_parallel"
PACKAGE = "ring_flash_attn"


class Ulysses(Distributed):
    """DeepSpeed Ulysses: all-to-all to all tokens of some heads, on which one device attends."""

    def __init__(self, comm: Communicator, implementation: SingleDevice) -> None:
        super().__init__(comm)
        self.implementation, self.name = implementation, f"{ULYSSES} on {implementation.name}"

    def rows(self, case: RingCase) -> torch.Tensor:
        if case.kv_heads % case.world:
            raise UnsupportedCaseError(f"{case.kv_heads} KV heads on {case.world} ranks")
        return torch.arange(case.tokens).view(_ranks(case, 1), -1)[self.comm.rank]

    def attend(self, case: Case, device: torch.device) -> Attend:
        group = self.comm.process_group(ULYSSES)
        inner = self.implementation.attend(case, device)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            move = _AllToAll.apply
            heads = (move(x, group, to_heads, to_tokens) for x in (q, k, v))  # type: ignore[no-untyped-call]
            return tensor(move(inner(*heads), group, to_tokens, to_heads))  # type: ignore[no-untyped-call]

        return attend


def _ranks(case: RingCase, chunks: int) -> int:
    """The world size. Raises UnsupportedCaseError unless each rank gets `chunks` equal chunks."""
    if case.tokens % (case.world * chunks):
        raise UnsupportedCaseError(
            f"{case.tokens} tokens are not a multiple of {case.world * chunks}"
        )
    return case.world


class _AllToAll(torch.autograd.Function):
    """apply(x, group, move, back): `move` is `to_heads` or `to_tokens`, and `back` its inverse."""

    @staticmethod
    def forward(ctx, x, group, move, back):  # type: ignore[no-untyped-def]
        ctx.group, ctx.back = group, back
        return move(x, group)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return ctx.back(dx, ctx.group), None, None, None


def to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(t, h, d) of this rank's tokens to (world * t, h / world, d) of its heads."""
    world, (t, h, d) = dist.get_world_size(group), x.shape
    by_rank = x.view(t, world, h // world, d).transpose(0, 1).contiguous()
    mine = torch.empty_like(by_rank)
    dist.all_to_all_single(mine, by_rank, group=group)
    return mine.flatten(0, 1)


def to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of `to_heads`."""
    world = dist.get_world_size(group)
    x = x.contiguous()
    by_heads = torch.empty_like(x)
    dist.all_to_all_single(by_heads, x, group=group)
    return by_heads.view(world, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


class HeadTail(Distributed):
    """The zigzag of one causal sequence: chunks r and 2 * world - 1 - r on rank r."""

    def rows(self, case: RingCase) -> torch.Tensor:
        if len(case.lengths) > 1:
            raise UnsupportedCaseError("no packed documents")
        if not case.causal:
            raise UnsupportedCaseError("no window")
        chunks = torch.arange(case.tokens).view(2 * _ranks(case, 2), -1)
        return chunks[[self.comm.rank, 2 * case.world - 1 - self.comm.rank]].flatten()


class Zigzag(HeadTail):
    """ring-flash-attn's zigzag on FlashAttention-3's operators."""

    name = f"{ZIGZAG} on {FA3}"

    def __init__(self, comm: Communicator, function: Callable[..., Any]) -> None:
        super().__init__(comm)
        self.function = function
        self.identity = {"version": _installed_version(ZIGZAG)}

    def attend(self, case: Case, device: torch.device) -> Attend:
        group = self.comm.process_group(ZIGZAG)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch = (x.unsqueeze(0) for x in (q, k, v))
            return tensor(self.function(*batch, causal=True, group=group)).squeeze(0)

        return attend


class TorchRing(HeadTail):
    """PyTorch's context_parallel on cuDNN, with K/V expanded to all heads beforehand."""

    name = TORCH

    def rows(self, case: RingCase) -> torch.Tensor:
        if not torch.cuda.is_available():
            raise UnsupportedCaseError("needs a GPU")
        return super().rows(case)

    def local(self, problem: Problem) -> Problem:
        local = super().local(problem)
        shared = problem.case.heads // problem.case.kv_heads
        k, v = (x.repeat_interleave(shared, 1) for x in (local.k, local.v))
        return replace(local, k=k, v=v)

    @contextmanager
    def context(self, device: torch.device) -> Iterator[None]:
        group = self.comm.process_group(TORCH)
        assert group is not None
        mesh = DeviceMesh.from_group(group, device.type)
        # context_parallel requires a buffer to shard.
        shortest = torch.zeros(1, 2 * self.comm.world, device=device)
        with context_parallel(mesh, buffers=[shortest], buffer_seq_dims=[1]):
            yield

    def attend(self, case: Case, device: torch.device) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.squeeze(0).transpose(0, 1)

        return attend

    def prepare(self, problem: Problem) -> PreparedRun:
        prepared, case = super().prepare(problem), problem.case
        of_all_heads = prepared.outputs
        assert of_all_heads is not None

        def outputs(result: Any) -> Outputs:
            """With the gradients of a shared KV head summed."""
            found = of_all_heads(result)
            for name in found.keys() & {"dk", "dv"}:
                x = found[name]
                shared = x.view(len(x), case.kv_heads, -1, case.head_dim)
                found[name] = shared.sum(2, dtype=torch.float32).to(problem.q.dtype)
            return found

        return replace(prepared, outputs=outputs)


def ring_flash_attn_functions(module: str, *names: str) -> list[Callable[..., Any]] | None:
    """Functions of a module of ring-flash-attn, on FlashAttention-3's operators in place of 2's.

    None where it is not installed. Raises LoadError where it or the operators cannot be loaded.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.submodule_search_locations is None:
        return None
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        raise LoadError("FlashAttention-3 is not there as torch.ops.flash_attn_3")
    package = ModuleType(PACKAGE)  # its __init__ would import transformers
    package.__path__ = list(found.submodule_search_locations)
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(
        _flash_attn_forward=_fa2_forward,
        _flash_attn_backward=_fa2_backward,
        _flash_attn_varlen_forward=_fa2_varlen_forward,
        _flash_attn_varlen_backward=_fa2_varlen_backward,
    )
    stand_ins = {"flash_attn": ModuleType("flash_attn"), interface.__name__: interface}
    with _modules({PACKAGE: package, **stand_ins}):
        try:
            loaded = importlib.import_module(f"{PACKAGE}.{module}")
            return [getattr(loaded, name) for name in names]
        except (ImportError, AttributeError) as error:
            raise LoadError(f"{ZIGZAG} cannot be imported: {error}") from None


@contextmanager
def _modules(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Put `stand_ins` into sys.modules; restore it at the end."""
    before = dict(sys.modules)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.split(".")[0] in {n.split(".")[0] for n in stand_ins}:
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in stand_ins if name in before})


# ring-flash-attn reads the names and the order of these parameters: they are FlashAttention-2's.
def _fa2_forward(  # type: ignore[no-untyped-def]
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q, k, v, num_splits=1, softmax_scale=softmax_scale, is_causal=causal
    )
    return out, lse, None, None


def _fa2_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # fmt: skip
    torch.ops.flash_attn_3.bwd(
        dout.contiguous(), q, k, v, out, softmax_lse, dq, dk, dv,
        softmax_scale=softmax_scale, is_causal=causal,
    )  # fmt: skip


def _fa2_varlen_forward(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    return_softmax=False,
):  # fmt: skip
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, num_splits=1, softmax_scale=softmax_scale, is_causal=causal,
    )  # fmt: skip
    return out, lse, None, None


def _fa2_varlen_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    torch.ops.flash_attn_3.bwd(
        dout.contiguous(), q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale, is_causal=causal,
    )  # fmt: skip


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
