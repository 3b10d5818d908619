"""Who is measured over several ranks."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringfa3 import plan_context, ring_attn_func
from ringfa3.bench.common.cases import FORWARD, Case, RingCase
from ringfa3.bench.common.implementations import (
    FA3,
    OURS,
    Attend,
    OneDevice,
    PeerError,
    forward_of,
    refuse_executor,
    tensor,
)
from ringfa3.bench.common.problem import (
    Attempt,
    Outputs,
    Problem,
    RefusalError,
    differentiated,
)
from ringfa3.bench.common.ranks import Team
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.group import RingGroup
from ringfa3.symmetric import forward_mode

ZIGZAG = "ring-flash-attn"
ULYSSES = "Ulysses"
TORCH = "PyTorch context_parallel"
PACKAGE = "ring_flash_attn"


class ManyDevices(ABC):
    """An implementation over a team: each rank has some of a problem's tokens."""

    name: str

    def __init__(self, team: Team) -> None:
        self.team = team

    @abstractmethod
    def rows(self, case: RingCase) -> torch.Tensor:
        """(t,) this rank's tokens, in order.

        Raises RefusalError for what it does not do.
        """

    @abstractmethod
    def attend(self, case: Case, device: torch.device) -> Attend:
        """Attention of this rank's q (t, h, d), k and v (t, h_kv, d)."""

    def local(self, problem: Problem) -> Problem:
        """This rank's part of a problem."""
        rows = self.rows(ring_case_of(problem.case)).to(problem.q.device)
        q, k, v = (x[rows] for x in problem.inputs)
        dout = problem.dout if problem.direction == FORWARD else problem.dout[rows]
        return replace(problem, q=q, k=k, v=v, dout=dout)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Around everything that is computed."""
        yield

    def prepare(self, problem: Problem) -> Attempt:
        local, device = self.local(problem), problem.q.device
        attend = self.attend(problem.case, device)
        make = forward_of if problem.direction == FORWARD else differentiated
        rows = self.rows(ring_case_of(problem.case)).to(device)
        with ExitStack() as held:
            held.enter_context(self.on(device))
            return replace(make(local, attend), rows=rows, close=held.pop_all().close)

    def passes(self, problem: Problem) -> Callable[[], object]:
        """A forward and a backward of this rank's part, whose inputs are here already."""
        local, device = self.local(problem), problem.q.device
        attend = self.attend(problem.case, device)
        inputs = tuple(x.detach().requires_grad_() for x in local.inputs)

        def run() -> object:
            with self.on(device):
                return torch.autograd.grad(attend(*inputs), inputs, local.dout)

        return run


def ring_case_of(case: Case) -> RingCase:
    assert isinstance(case, RingCase)
    return case


class Ring(ManyDevices):
    """RingFA3's ring. On a GPU only where a kernel runs it, never the executor."""

    def __init__(self, team: Team, transport: str = "auto", forward: str | None = None) -> None:
        """forward: one of `forward_mode.FORWARD_MODES`; None: by the rule."""
        super().__init__(team)
        self.transport, self.forward = transport, forward
        named = (OURS, "" if transport == "auto" else transport, forward or "")
        self.name = " ".join(filter(None, named))

    @property
    def may_pull(self) -> bool:
        """Whether it may run over peers' memory."""
        return self.transport in ("auto", "symmetric")

    def plan(self, case: Case) -> ContextPlan:
        return plan_context(case.cumulative, self._group, "zigzag", True, (case.window[0], -1))

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.team.group(self.name)

    def rows(self, case: RingCase) -> torch.Tensor:
        return self.plan(case).token_index

    def attend(self, case: Case, device: torch.device) -> Attend:
        plan = self.plan(case)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if self.forward is None:
                return tensor(ring_attn_func(q, k, v, plan, transport=self.transport))
            before = os.environ.get(forward_mode.FORWARD_MODE_ENV)
            os.environ[forward_mode.FORWARD_MODE_ENV] = self.forward
            try:
                return tensor(ring_attn_func(q, k, v, plan, transport=self.transport))
            finally:
                os.environ.pop(forward_mode.FORWARD_MODE_ENV)
                if before is not None:
                    os.environ[forward_mode.FORWARD_MODE_ENV] = before

        return attend

    def prepare(self, problem: Problem) -> Attempt:
        refuse_executor(problem)
        return super().prepare(problem)

    @property
    def moved_by(self) -> str | None:
        """The transport of the latest call; None for one rank."""
        if self._group is None or self.team.world == 1:
            return None
        return RingGroup.of(self._group).moved_by


class Ulysses(ManyDevices):
    """All tokens of some heads on every rank, by all-to-all; attention there on one device."""

    def __init__(self, team: Team, contestant: OneDevice) -> None:
        super().__init__(team)
        self.contestant, self.name = contestant, f"{ULYSSES} on {contestant.name}"

    def rows(self, case: RingCase) -> torch.Tensor:
        if case.kv_heads % case.world:
            raise RefusalError(f"{case.kv_heads} KV heads on {case.world} ranks")
        return torch.arange(case.tokens).view(_ranks(case, 1), -1)[self.team.rank]

    def attend(self, case: Case, device: torch.device) -> Attend:
        group, inner = self.team.group(ULYSSES), self.contestant.attend(case, device)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads = (_ToHeads.apply(x, group) for x in (q, k, v))  # type: ignore[no-untyped-call]
            return tensor(_ToTokens.apply(inner(*heads), group))  # type: ignore[no-untyped-call]

        return attend


def _ranks(case: RingCase, chunks: int) -> int:
    """The world, if `chunks` equal ones of a case's tokens can be given to each rank."""
    if case.tokens % (case.world * chunks):
        raise RefusalError(f"{case.tokens} tokens are no multiple of {case.world * chunks}")
    return case.world


class _ToHeads(torch.autograd.Function):
    """(t, h, d) of this rank's tokens to (world * t, h / world, d) of its heads."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return to_heads(x, group)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return to_tokens(dx, ctx.group), None


class _ToTokens(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return to_tokens(x, group)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return to_heads(dx, ctx.group), None


def to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    world, (t, h, d) = dist.get_world_size(group), x.shape
    by_rank = x.view(t, world, h // world, d).transpose(0, 1).contiguous()
    mine = torch.empty_like(by_rank)
    dist.all_to_all_single(mine, by_rank, group=group)
    return mine.flatten(0, 1)


def to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    world = dist.get_world_size(group)
    x = x.contiguous()
    by_heads = torch.empty_like(x)
    dist.all_to_all_single(by_heads, x, group=group)
    return by_heads.view(world, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


class HeadTail(ManyDevices):
    """The zigzag of one causal sequence: chunks r and 2 * world - 1 - r on rank r."""

    def rows(self, case: RingCase) -> torch.Tensor:
        if len(case.lengths) > 1:
            raise RefusalError("no packed documents")
        if not case.causal:
            raise RefusalError("no window")
        chunks = torch.arange(case.tokens).view(2 * _ranks(case, 2), -1)
        return chunks[[self.team.rank, 2 * case.world - 1 - self.team.rank]].flatten()


class Zigzag(HeadTail):
    """ring-flash-attn's zigzag on FlashAttention-3's operators."""

    name = f"{ZIGZAG} on {FA3}"

    def __init__(self, team: Team, function: Callable[..., Any]) -> None:
        super().__init__(team)
        self.function = function
        self.identity = {"version": _installed_version(ZIGZAG)}

    def attend(self, case: Case, device: torch.device) -> Attend:
        group = self.team.group(ZIGZAG)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch = (x.unsqueeze(0) for x in (q, k, v))
            return tensor(self.function(*batch, causal=True, group=group)).squeeze(0)

        return attend


class TorchRing(HeadTail):
    """PyTorch's context_parallel on cuDNN, K/V expanded to all heads beforehand."""

    name = TORCH

    def rows(self, case: RingCase) -> torch.Tensor:
        if not torch.cuda.is_available():
            raise RefusalError("needs a GPU")
        return super().rows(case)

    def local(self, problem: Problem) -> Problem:
        local = super().local(problem)
        shared = problem.case.heads // problem.case.kv_heads
        k, v = (x.repeat_interleave(shared, 1) for x in (local.k, local.v))
        return replace(local, k=k, v=v)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        group = self.team.group(TORCH)
        assert group is not None
        mesh = DeviceMesh.from_group(group, device.type)
        shortest = torch.zeros(1, 2 * self.team.world, device=device)  # it wants one to shard
        with context_parallel(mesh, buffers=[shortest], buffer_seq_dims=[1]):
            yield

    def attend(self, case: Case, device: torch.device) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.squeeze(0).transpose(0, 1)

        return attend

    def prepare(self, problem: Problem) -> Attempt:
        attempt, case = super().prepare(problem), problem.case
        given = attempt.outputs
        assert given is not None

        def outputs(result: Any) -> Outputs:
            """With the gradients of a shared head summed up."""
            found = given(result)
            for name in found.keys() & {"dk", "dv"}:
                x = found[name]
                shared = x.view(len(x), case.kv_heads, -1, case.head_dim)
                found[name] = shared.sum(2, dtype=torch.float32).to(problem.q.dtype)
            return found

        return replace(attempt, outputs=outputs)


def zigzag_function() -> Callable[..., Any] | None:
    """ring-flash-attn's zigzag with FlashAttention-3's operators in place of FlashAttention-2.

    None where it is not installed. Raises PeerError where it, or the operators, cannot be had.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.submodule_search_locations is None:
        return None
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        raise PeerError("FlashAttention-3 is not there as torch.ops.flash_attn_3")
    package = ModuleType(PACKAGE)  # without its __init__, which imports transformers
    package.__path__ = list(found.submodule_search_locations)
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_forward=_fa2_forward, _flash_attn_backward=_fa2_backward)
    stand_ins = {"flash_attn": ModuleType("flash_attn"), interface.__name__: interface}
    with _modules({PACKAGE: package, **stand_ins}):
        try:
            module = importlib.import_module(f"{PACKAGE}.zigzag_ring_flash_attn")
            function: Callable[..., Any] = module.zigzag_ring_flash_attn_func
        except (ImportError, AttributeError) as error:
            raise PeerError(f"{ZIGZAG} cannot be imported: {error}") from None
        return function


@contextmanager
def _modules(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """`stand_ins` among the loaded modules, and afterwards everything as it was."""
    before = dict(sys.modules)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.split(".")[0] in {n.split(".")[0] for n in stand_ins}:
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in stand_ins if name in before})


# Named and ordered as in FlashAttention-2, which are read from them.
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


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
