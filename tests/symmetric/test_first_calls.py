"""If this fails, the first call of a prepared plan computes something else than later ones. The
first call of a prepared plan, which the launcher issues: Python begins it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringfa3 import KernelSpec, host
from ringfa3.kernels.streams import CurrentStream
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import op
from ringfa3.schedules import link
from ringfa3.schedules.encoded import EncodedSchedule
from tests.support.fake_kernels import SMS, FakeKernels
from tests.support.host_calls import equal
from tests.support.python_frames import frames
from tests.symmetric.test_kernel_spec import host_stream, plain, sent
from tests.symmetric.test_replayable_calls import TRANSPORTS, OpRank, on_op_ranks
from tests.symmetric.test_ring_program import SCALE, Call, Rank, on_ranks

MAX_FRAMES = 52  # of Python in a first forward; it has 114 if the op runs in Python


def test_a_first_call_enters_few_frames_of_python(kernels: FakeKernels) -> None:
    """Of a prepared plan, whose kernels an earlier plan has loaded. The launcher asks Python to
    agree and begin, and not for the op. What the device is asked for is what Python asks for."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> list[list[str]]:
        me, spec = rank.rank.group.rank, KernelSpec(4, 2, 64, num_sms=SMS, softmax_scale=SCALE)
        types = [x[0] for x in sent(spec, me, 2).prepared]
        for pass_type in 2 * types:  # room in the shared memory
            rank.call(pass_type, 1, plain(me, 2))
        unprepared = plain(me, 2)
        wanted = [rank.call(pass_type, 1, unprepared) for pass_type in types]
        choose("cpp")
        earlier = sent(spec, me, 2)
        for pass_type in types:
            for _ in range(2):  # both parities look up their symbols
                rank.call(pass_type, 1, earlier)
        plan = sent(spec, me, 2)
        for pass_type, (log, results) in zip(types, wanted, strict=True):
            found = rank.call(pass_type, 1, plan)
            assert found[0] in (log, log[1:])
            assert all(map(equal, found[1], results))
        of_others, before = sent(KernelSpec(8, 2, 64, num_sms=SMS), me, 2), rank.prepared
        found = rank.call("backward", 1, of_others)  # its op runs in Python
        assert all(map(equal, found[1], wanted[-1][1]))
        assert rank.prepared == before + 1
        plan = sent(spec, me, 2)
        q, k, v, dout, out, lse = rank.rank.inputs(1, plan)
        settings, transport = (plan.handle, SCALE, False, "native"), TRANSPORTS[types[0]]
        with torch.no_grad():
            with frames() as of_forward:
                _, lse = op.ring_attention(q, k, v, None, *settings, transport)
            below = torch._C._AutoDispatchBelowAutograd  # as a node's backward
            given = dout, None, q, k, v, out, lse, None
            with below(), frames() as of_backward:
                backward = torch.ops.ringfa3.ring_attention_backward
                backward(*given, *settings, transport)
        return [of_forward, of_backward]

    for of_forward, of_backward in on_op_ranks(kernels, 2, work):
        assert "_prepared_calls" in of_forward
        assert "ring_attention" not in of_forward
        assert len(of_forward) <= MAX_FRAMES, chr(10).join(of_forward)
        assert of_backward == []  # the forward has prepared it


def test_a_first_call_runs_on_its_own_stream(kernels: FakeKernels) -> None:
    """Not on that of the latest call, which the launcher has begun on another stream."""

    def work(rank: OpRank, choose: Callable[[str], None]) -> None:
        ranks, me = rank.rank.group.meeting, rank.rank.group.rank
        spec = KernelSpec(4, 2, 64, num_sms=SMS, softmax_scale=SCALE)
        types = [x[0] for x in sent(spec, me, 2).prepared]
        assert len(types) == 2  # so parities of calls that follow each other are alike
        streams = ranks._current[me], rank.rank.cuda.stream(compute=True)

        def call(number: int, plan: ContextPlan) -> list[Call]:
            ranks._current[me] = streams[number]
            kernels.use(7 + number)
            return [rank.call(pass_type, 1, plan) for pass_type in types]

        for _ in range(2):  # room in the shared memory
            call(0, plain(me, 2))
        unprepared = plain(me, 2)
        wanted = [call(number, unprepared) for number in range(2)]
        assert wanted[0] != wanted[1]
        choose("cpp")
        for number in (0, 1, 0, 0, 1, 1):
            for (log, results), found in zip(
                wanted[number], call(number, sent(spec, me, 2)), strict=True
            ):
                assert found[0] in (log, log[1:])
                assert all(map(equal, found[1], results))
        kernels.use()

    on_op_ranks(kernels, 2, work)


def linked(schedule: EncodedSchedule, stream: CurrentStream, resolve: link.Resolvers) -> bytes:
    """The reference of `link`: symbol by symbol."""
    words = list(schedule.words)
    for at, number in zip(schedule.at, schedule.symbol_of, strict=True):
        name, *rest = schedule.symbols[number]
        if name == "table":
            words[at] += schedule.tables[rest[0]].copy.on(stream).memory.data_ptr()
        else:
            words[at] += resolve[name](*rest)
    return b"".join((x % (1 << 64)).to_bytes(8, "little") for x in words)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_launcher_links_the_words_of_python(kernels: FakeKernels, world: int) -> None:
    """Every word, bit for bit, for both parities."""
    library: Any = host._library
    stream = CurrentStream(torch.device("cpu"), 7, False, host_stream(kernels))
    spec = KernelSpec(4, 2, 64, num_sms=SMS)

    def work(rank: Rank, _: Callable[[str], None]) -> None:
        backend = rank.backend
        for schedule in sent(spec, rank.group.rank, world).prepared.values():
            backend.begin(schedule.spec)  # room in the shared memory
            found = []
            for parity in range(2):
                program = link.link(library, schedule, stream, backend.addresses(stream, parity))
                found.append(library.words(program))
                assert found[-1] == linked(schedule, stream, backend._resolvers(stream, parity))
            assert len(schedule.at) > 20
            assert found[0] != found[1]

    if world > 1:
        on_ranks(kernels, world, work)
        return
    for schedule in sent(spec, 0, 1).prepared.values():
        program = link.link(library, schedule, stream, link.Addresses.of_one_gpu(stream))
        assert library.words(program) == linked(schedule, stream, link.kernel_resolvers(stream))


def test_a_program_with_a_wrong_number_is_refused(kernels: FakeKernels) -> None:
    """Nothing outside its words is read or written; without an address there is no program."""
    library: Any = host._library

    def made(at: int, symbol: int, *addresses: int) -> Any:
        numbers = [array("q", x) for x in ([0, 5], [at], [symbol], addresses)]
        return library.program(*numbers, (torch.zeros(1),), None)

    assert library.words(made(1, 0, 2)) == array("q", [0, 7]).tobytes()
    for unknown in ((), (link.UNKNOWN,)):
        assert made(1, 0, *unknown) is None
    for at, symbol in ((2, 0), (-1, 0), (1, -2)):
        with pytest.raises(RuntimeError, match=f"links word {at} to symbol {symbol}, beyond"):
            made(at, symbol, 2)


def test_a_line_of_the_launcher_is_that_of_python(kernels: FakeKernels) -> None:
    """Layouts of inputs, by which a call finds its schedule."""
    found: list[bytes] = []

    def begin(_: str, layouts: bytes, *__: object) -> list[object]:
        found.append(layouts)
        return []

    q, k, v = (torch.randn(130, n, 64).bfloat16() for n in (4, 2, 2))
    v = torch.randn(131, 3, 64).bfloat16()[1:, :2]
    sink = torch.randn(4)
    library: Any = host._library
    library.on_first_call(begin)
    try:
        plan = plain(0, 1)
        for given in (None, sink):
            op.ring_attention(q, k, v, given, plan.handle, SCALE, False, "native", "auto")
    finally:
        library.on_first_call(host._prepared_calls)
    assert found == [link.layouts_of((q, k, v, given)) for given in (None, sink)]
    layouts = link._decoded(found[0])
    assert layouts[3] is None
    assert layouts[2] == ((130, 2, 64), (192, 64, 1), 15, 0)
