"""A ring pass over peers' memory: the operations of a schedule, with tensors for its buffers.

The first call of a plan, pass type and shape prepares driver calls and tensors; later calls
issue them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import torch

from ringfa3 import host
from ringfa3.attention_op import with_columns
from ringfa3.kernels.dispatch import select_local_kv
from ringfa3.kernels.local_kv import LocalKV, Returns
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import current_builder
from ringfa3.pass_interface import Attend, HopTensors, HostCode, LocalHeads
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.tiling import Plan
from ringfa3.schedules.encoded import EncodedSchedule
from ringfa3.schedules.link import (
    Signature,
    schedule_of,
    signature_of,
    upload_tables,
)
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric import schedule
from ringfa3.symmetric.ring_program import (
    Beginner,
    CachedCalls,
    Inputs,
    ReplayableCall,
    RingProgram,
    ScheduleBackend,
    Tensors,
)
from ringfa3.symmetric.stream_ops import (
    AddToSum,
    AttendGathered,
    AttendHop,
    Buffer,
    BufferSlice,
    BufferSpec,
    EndStart,
    Event,
    Operation,
    Part,
    Publish,
    Work,
)


class Memory(Protocol):
    """What steps need of one rank's streams and memory, or of symbols in their place."""

    @property
    def arrivals(self) -> torch.Tensor:
        """(world,) int32: flag t is 1 from the event "arrived" of number t on, until the kernel
        that waited for it has ended."""

    def adapt(self, operations: list[Operation]) -> list[Operation]:
        """The operations of the call under way, changed as CUDA graphs require."""

    def rows(self, part: BufferSlice, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rows of this rank's own memory: (n, *shape)."""

    def prepare(self, operations: Sequence[Operation], in_kernel: frozenset[Event]) -> Any:
        """Prepares for `issue` all that the backend does for these operations.

        in_kernel: events for which kernels wait on `arrivals`, in place of their stream.
        """


class Backend(Memory, Beginner, Protocol):
    """What a pass needs of one rank's streams and of the group's memory.

    joins       whether calls fork and join their streams: CUDA graphs have captured some
    """

    joins: bool

    def begin(self, spec: BufferSpec, stream: CurrentStream | None = None) -> int:
        """Begins a call, the same on all ranks, and returns its parity: its number modulo 2.

        stream: the current one, if the C++ launcher has looked it up. No graph captures it.
        """

    def issue(self, prepared: Any) -> None:
        """Puts prepared operations into their streams."""

    def compute(self, operation: Operation, work: Callable[[], None]) -> None:
        """Runs `work`, which performs the operation, on the compute stream."""

    def replay(self, program: RingProgram, inputs: Inputs, stream: CurrentStream) -> Tensors:
        """Issues the whole call under way by a program on the compute stream, and returns its
        results."""


class Step(NamedTuple):
    """Prepared operations, then work on tensors; the last step has none."""

    prepared: Any
    work: Work | None
    tensors: tuple[Any, ...]


class PreparedSteps(NamedTuple):
    """The steps that `start` issues, and those that `run` issues.

    local_kv      what moves the rank's local K/V in them
    splits_heads  whether some heads of the rank's own keys run first
    """

    start: list[Step]
    run: list[Step]
    local_kv: LocalKV
    splits_heads: bool


_specs: weakref.WeakKeyDictionary[Plan, dict[object, BufferSpec]] = weakref.WeakKeyDictionary()


class SymmetricRingPass:
    """`ringfa3.pass_interface.RingPass` over peers' memory.

    make_local_kv  as `select_local_kv`
    """

    make_local_kv: Callable[..., LocalKV] = staticmethod(select_local_kv)
    grads: tuple[torch.Tensor, torch.Tensor]
    precision = "native"
    first_heads = 0

    def __init__(self, backend: Backend | None, plan: ContextPlan, pass_type: str) -> None:
        """backend: a `Backend`; None: the pass only builds schedules. pass_type: the operations to
        run: "forward", "gathered" or "backward"."""
        self._own_backend = backend
        self._adapt = list[Operation] if backend is None else backend.adapt
        self._plan, self._pass_type = plan, pass_type
        self._parity: int | None = None  # before the call begins

    @property
    def _backend(self) -> Backend:
        assert self._own_backend is not None, "a pass without a backend only builds schedules"
        return self._own_backend

    @property
    def hops(self) -> Plan:
        """As `RingPass.hops`."""
        return self._plan.gathered if self._pass_type == "gathered" else self._plan.hops

    def _spec_of(self, k: torch.Tensor) -> BufferSpec:
        self._key = key = (self._pass_type, k.dtype, k.shape[1], k.shape[2])
        specs = _specs.setdefault(self._plan.hops, {})
        if key not in specs:
            specs[key] = BufferSpec(self._plan, self._pass_type, k)
        return specs[key]

    def _begin(self, spec: BufferSpec, stream: CurrentStream | None = None) -> int:
        """Begins the call, as `Backend.begin`. Returns its parity."""
        self._spec = spec
        self._parity = parity = self._backend.begin(spec, stream)
        self._known = CachedCalls.of(self._backend, self._plan)
        return parity

    def run_schedule(
        self, k: torch.Tensor, inputs: Inputs, settings: Hashable, code: HostCode
    ) -> Tensors | None:
        """As `RingPass.run_schedule`; begins the call if the C++ launcher starts calls."""
        library = host.library()
        if library is None or torch.cuda.is_current_stream_capturing():
            return None
        stream = CurrentStream.of(k.device)
        parity = self._begin(self._spec_of(k), stream)
        signature = signature_of(self._pass_type, inputs, settings)
        schedule = self._known.programs.schedule(
            signature,
            lambda: schedule_of(self._plan, signature, inputs, code, not self._backend.joins),
        )
        if schedule is None:
            return None
        call = self._replayable(library, signature, schedule, stream)
        program = call.program(parity)
        if library.ring_wanted():
            library.keep_ring(call)
        return self._backend.replay(program, inputs, stream)

    def _replayable(
        self, library: Any, signature: Signature, schedule: EncodedSchedule, on: CurrentStream
    ) -> ReplayableCall:
        """Calls like the one under way, which begin with its agreement from now on."""
        made = self._known.call(self._backend, library, signature, schedule, on)
        made.agreed = self._backend.group.agreement_snapshot()
        return made

    def start(self, k: torch.Tensor, v: torch.Tensor, waits_in_kernel: bool = False) -> None:
        """As `RingPass.start`; publishes k and v."""
        plan, builder = self._plan, current_builder()
        self._local, self._v_dim = (k, with_columns(v, k.shape[2])), v.shape[2]
        if builder is None:
            steps = self._known_steps(k, waits_in_kernel)
            spec = self._spec
        else:
            spec = BufferSpec(plan, self._pass_type, k)
            memory = ScheduleBackend(builder, plan.world, k.device, spec.row_bytes, self._adapt)
            steps = self._prepare(memory, k, spec, 0, waits_in_kernel)
        self._local_kv = steps.local_kv
        self._dkv_shape = (plan.local_keys, *spec.row)
        self._dkv_dtype = spec.dtypes.get(Buffer.DKV_OUT)
        if steps.splits_heads:
            self.first_heads = LocalHeads.of(k).first
        self._issue(steps.start)
        self._rest = steps.run

    def _known_steps(self, k: torch.Tensor, waits_in_kernel: bool) -> PreparedSteps:
        """The steps of a call that Python issues; begins the call."""
        parity = self._begin(self._spec_of(k)) if self._parity is None else self._parity
        prepared, key = self._known.steps, (self._key, waits_in_kernel, parity)
        if key not in prepared:
            backend = self._backend
            prepared[key] = self._prepare(backend, k, self._spec, parity, waits_in_kernel)
        steps: PreparedSteps = prepared[key]
        return steps

    def _prepare(
        self, memory: Memory, k: torch.Tensor, spec: BufferSpec, parity: int, waits_in_kernel: bool
    ) -> PreparedSteps:
        direction = "backward" if self._pass_type == "backward" else "forward"
        local_kv = self.make_local_kv(direction, k, self._plan, self.precision, self._v_dim)
        given = self._plan, self._pass_type, spec, parity, local_kv, waits_in_kernel
        return _prepare_steps(memory, *given)

    def run(self, attend: Attend) -> None:
        """As `RingPass.run`. Hop 0 comes last; some of its KV heads may come first.

        The peers' contributions to dK/dV are added after it.
        """
        self._attend = attend
        dkv: torch.Tensor | None = None
        if self._dkv_dtype is not None:  # allocated after the caller's tensors, which are larger
            dkv = self._local[0].new_empty(self._dkv_shape, dtype=self._dkv_dtype)
        self._issue(self._rest, dkv)

    def _issue(self, steps: Iterable[Step], dkv: torch.Tensor | None = None) -> None:
        builder = current_builder()
        for prepared, work, tensors in steps:
            if builder is None:
                self._backend.issue(prepared)
            else:
                prepared.add()
            if work is None:
                continue
            if builder is None:
                self._backend.compute(work, partial(self._do, work, tensors, dkv))
            else:
                self._do(work, tensors, dkv)

    def _do(self, work: Work, tensors: tuple[Any, ...], dkv: torch.Tensor | None) -> None:
        """Performs `work` on the tensors that `_prepare_steps` has made for it.

        dkv: (n, 2, hk, d) dK and dV of the rank's own keys; None in a forward.
        """
        if isinstance(work, Publish):
            self._local_kv.publish(*self._local, *tensors)
        elif isinstance(work, AttendHop):
            self._do_hop(work, tensors, dkv)
        elif isinstance(work, AttendGathered):
            k, v, *arrivals = tensors
            self._attend(0, HopTensors(k, v, arrivals=arrivals[0] if arrivals else None))
        elif isinstance(work, AddToSum):
            self._local_kv.add_returns(*tensors)
        else:
            assert dkv is not None
            (returns,) = tensors
            dtype = self._local[0].dtype
            self.grads = self._local_kv.round_gradients(dkv, returns, dtype)

    def _do_hop(self, work: AttendHop, tensors: tuple[Any, ...], dkv: torch.Tensor | None) -> None:
        if work.kv is not None:
            self._attend(work.hop, HopTensors.of(tensors))
            return
        local = (*self._local, *(() if dkv is None else dkv.unbind(1)))
        if work.part is Part.ALL:
            self._attend(0, HopTensors.of(local))
        elif work.part is Part.FIRST:
            LocalHeads.of(local[0]).attend_first(self._attend, *local)
        else:
            LocalHeads.of(local[0]).attend_last(self._attend, *local)


def prepared_calls(
    backend: Backend,
    library: Any,
    plan: ContextPlan,
    signatures: Iterable[Signature],
    settings: Settings,
    stream: CurrentStream,
) -> list[tuple[int, bytes, ReplayableCall]]:
    """Calls of a prepared plan on a stream, with settings on which the ranks have agreed, for the
    C++ launcher to begin them. Each comes after the number of its op and the layouts of its inputs.

    signatures: the first one is that of the call under way; without it there is none.

    Raises OutOfMemoryError: there is no memory for the plan's tables, which are uploaded.
    """
    upload_tables(plan.prepared.values(), stream)
    known, found = CachedCalls.of(backend, plan), []
    addresses = backend.addresses(stream, 0), backend.addresses(stream, 1)
    for signature in signatures:
        schedule = plan.prepared[signature]
        backward = signature.pass_type == "backward"
        agreed = backend.group.agreed(settings, "backward" if backward else "forward")
        if agreed is not None and backend.is_ready(schedule, stream):
            made = known.call(backend, library, signature, schedule, stream)
            made.agreed = agreed
            made.prepare_links(*addresses)
            found.append((int(backward), signature.layouts, made))
        elif not found:
            break
    return found


def _prepare_steps(
    backend: Memory,
    plan: ContextPlan,
    pass_type: str,
    spec: BufferSpec,
    parity: int,
    local_kv: LocalKV,
    waits_in_kernel: bool,
) -> PreparedSteps:
    """The steps of a call on the memory that the backend has now."""
    operations = getattr(schedule, pass_type)(plan.kv_exchange, plan.rank, parity)
    operations = backend.adapt(operations)
    in_kernel = frozenset(_arrivals(operations) if waits_in_kernel else ())

    def rows(part: BufferSlice, end: int | None = None) -> torch.Tensor:
        """(n, 2, hk, d): the slice's rows; with `end`, rows [0, end) of its slot, of this rank."""
        part = part if end is None else part._replace(begin=0, end=end)
        return backend.rows(part, spec.row, spec.dtypes[part.buffer])

    def returns(received: Sequence[BufferSlice]) -> Returns:
        published = len(plan.kv_exchange.published)
        total = BufferSlice(plan.rank, Buffer.DKV_SUM, 0, 0, published)
        last = max((part.end for part in received), default=0)
        returned = BufferSlice(plan.rank, Buffer.DKV_RECV, 0, 0, last)
        runs = tuple((part.begin, part.end) for part in received)
        return Returns(rows(total), rows(returned), runs)

    def tensors(work: Work) -> tuple[Any, ...]:
        """Publish: where published rows go, where all go or None. AttendHop: K, V, dK, dV.
        AttendGathered: K, V, arrivals. AddToSum: returns. RoundGradients: returns or None."""
        if isinstance(work, Publish):
            return rows(work.target), None if work.gathered is None else rows(work.gathered)
        if isinstance(work, AttendGathered):
            both = rows(work.own, plan.kv_exchange.gathered_layout(plan.rank)[1]).unbind(1)
            return *both, *((backend.arrivals,) if waits_in_kernel else ())
        if isinstance(work, AttendHop):
            slices = [x for x in (work.kv, work.dkv) if x is not None]
            return tuple(x for part in slices for x in rows(part, part.end).unbind(1))
        if isinstance(work, AddToSum):
            return (returns(work.slices),)
        return (returns(work.slices[1:]) if work.slices else None,)

    steps: list[Step] = []
    count = 0
    pending: list[Operation] = []
    for operation in operations:
        if isinstance(operation, EndStart):
            steps.append(Step(backend.prepare(pending, in_kernel), None, ()))
            count, pending = len(steps), []
            continue
        pending.append(operation)
        if isinstance(operation, get_args(Work)):
            prepared = backend.prepare(pending, in_kernel)
            steps.append(Step(prepared, operation, tensors(operation)))
            pending = []
    steps.append(Step(backend.prepare(pending, in_kernel), None, ()))
    splits = any(isinstance(x, AttendHop) and x.part is Part.FIRST for x in operations)
    return PreparedSteps(steps[:count], steps[count:], local_kv, splits)


def _arrivals(operations: Iterable[Operation]) -> Iterator[Event]:
    """Events for which kernels can wait themselves."""
    for work in operations:
        if isinstance(work, AttendGathered):
            yield from (block.arrived for block in work.blocks)
