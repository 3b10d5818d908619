"""If this fails, plans that a worker prepares build again in the step, or compute other bits. Plans
that a worker prepares: calls build nothing, and their results have the same bits."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ringfa3 import KernelSpec, Mask, RingFA3Attention, host, plan_context
from ringfa3.kernels import backward, forward, uploads
from ringfa3.kernels.streams import CurrentStream
from ringfa3.planning import context_plan, token_shards
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import prepare_call
from ringfa3.schedules import link
from ringfa3.schedules.encoded import EncodedSchedule
from ringfa3.schedules.schedule import Schedule
from ringfa3.schedules.settings import Heads, Settings, ring_settings
from ringfa3.symmetric import kernel_spec
from tests.ring.test_one_rank import step
from tests.support.fake_kernels import SMS, FakeKernels
from tests.support.host_calls import equal
from tests.symmetric.test_ring_program import SCALE, Rank, on_ranks

CU_SEQLENS = [0, 30, 41, 130]
CLIPPED = Mask.documents(CU_SEQLENS).with_bidirectional([50, 70, 90], [60, 80, 100])
Given = list[int] | Mask


def sent(spec: KernelSpec, rank: int, world: int, given: Given = CU_SEQLENS) -> ContextPlan:
    """A prepared plan as another process sends it: it shares no object with plans of this one."""
    made = plain(rank, world, given)
    spec.prepare(made)
    plan: ContextPlan = pickle.loads(pickle.dumps(made))
    return plan


def plain(rank: int, world: int, given: Given = CU_SEQLENS) -> ContextPlan:
    """A further plan, which no loader has prepared."""
    plan: ContextPlan = pickle.loads(pickle.dumps(plan_context(given, (rank, world))))
    plan.prepared.clear()
    return plan


@contextmanager
def builds() -> Iterator[list[int]]:
    """Threads that build a schedule."""
    made: list[int] = []
    build = link.build

    def counted(*given: Any) -> Any:
        made.append(threading.get_ident())
        return build(*given)

    with mock.patch.object(link, "build", counted):
        yield made


def test_a_worker_needs_no_gpu() -> None:
    """Nothing stands in for CUDA here: two schedules and the tilings travel with the plan."""
    spec = KernelSpec(4, 2, 128, torch.float16)
    plan = pickle.loads(pickle.dumps(plan_context(CU_SEQLENS, (1, 3), prepare=[spec])))
    codes = list(plan.prepared.values())
    assert len(codes) == 2
    assert units_of(plan) >= {"backward-d128-fp16"}
    assert all(len(code.tables) for code in codes)
    assert plan.hops._tilings
    assert "digest" in vars(plan)


def same_as_built(prepared: list[EncodedSchedule], built: list[EncodedSchedule]) -> None:
    """Words, the addresses among them, names and tables."""
    for x, y in zip(prepared, built, strict=True):
        for name in ("words", "at", "symbol_of"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name), name)
        assert x.symbols == y.symbols
        for a, b in zip(x.tables, y.tables, strict=True):
            assert (a.name, a.key) == (b.name, b.key)
            np.testing.assert_array_equal(a.copy.host.packed.data, b.copy.host.packed.data)


def units_of(plan: ContextPlan) -> set[str]:
    """The names of the units that prepared calls launch."""
    codes = plan.prepared.values()
    return {x[1].name for code in codes for x in code.symbols if x[0] == "entry"}


@pytest.mark.parametrize(
    ("given", "sink"), [(CU_SEQLENS, False), (CU_SEQLENS, True), (CLIPPED, False)]
)
def test_a_call_of_one_rank_builds_nothing(kernels: FakeKernels, given: Given, sink: bool) -> None:
    """Words, tables and results are those of a plan that nobody prepared."""
    spec = KernelSpec(4, 2, 64, num_sms=SMS, lse_gradient=True, sink=sink)
    kernels.take()
    with mock.patch.object(host, "link", wraps=link.link) as linked:
        wanted = step(plain(0, 1, given), sink)
    found = [given.args[1] for given in linked.call_args_list]
    launched = [x.name for x in kernels.take()]
    with builds() as built:
        plan = sent(spec, 0, 1, given)
        assert (given is CLIPPED) == ("forward-d64-bf16-clips" in units_of(plan))
        assert all(map(equal, step(plan, sink), wanted))
        same_as_built(list(plan.prepared.values()), found)
        assert not built
        assert [x.name for x in kernels.take()] == launched
        before = link.schedules_built()
        step(sent(KernelSpec(8, 2, 64, num_sms=SMS), 0, 1), sink)
        assert len(built) == 2  # of other heads
        assert link.schedules_built() == before + 2


@pytest.mark.parametrize(("given", "world"), [(CU_SEQLENS, 2), (CU_SEQLENS, 3), (CLIPPED, 2)])
def test_a_call_of_several_ranks_builds_nothing(
    kernels: FakeKernels, given: Given, world: int
) -> None:
    """Both parities, every driver call, launch and result as of a plan that nobody prepared."""
    spec = KernelSpec(4, 2, 64, num_sms=SMS, softmax_scale=SCALE, sink=world > 2)

    def work(rank: Rank, choose: Callable[[str], None]) -> None:
        rank.grow()
        choose("cpp")
        me = rank.group.rank
        unprepared = plain(me, world, given)
        (mode,) = {x[0] for x in sent(spec, me, world, given).prepared} - {"backward"}
        types = [mode] * 2 + (["backward"] * 2 if world == 2 else [])
        for pass_type in types:  # room in the shared memory
            rank.call(pass_type, 1, plain(me, world, given))
        wanted = [rank.call(pass_type, 1, unprepared) for pass_type in types]
        before = built.count(threading.get_ident())
        assert before >= 1
        plan = sent(spec, me, world, given)
        assert (given is CLIPPED) == ("forward-d64-bf16-clips" in units_of(plan))
        for pass_type, (log, results) in zip(types, wanted, strict=True):
            found = rank.call(pass_type, 1, plan)
            assert found[0] == log
            assert all(map(equal, found[1], results))
        assert built.count(threading.get_ident()) == before

    with builds() as built:
        on_ranks(kernels, world, work)


def test_ranks_agree_whether_a_worker_has_prepared_their_plan_or_not() -> None:
    """On equal settings: those that travel with a plan, and those of `prepare_call`."""
    spec = KernelSpec(4, 2, 64, softmax_scale=SCALE, deterministic=True, sink=True)
    plan, group, settings = sent(spec, 0, 2), mock.MagicMock(), (SCALE, True, "native", "auto")
    plan._group = group
    (schedule,) = (x for signature, x in plan.prepared.items() if signature[0] == "backward")
    q, k = (torch.empty(plan.local_tokens, n, 64, dtype=torch.bfloat16) for n in (4, 2))
    with (
        mock.patch.multiple(prepare_call, RingGroup=group, connection=lambda *_: (None, None)),
        mock.patch.multiple(prepare_call, is_fake=lambda _: False, _build_kernels=mock.Mock()),
        mock.patch.object(token_shards, "require_alive"),
        mock.patch.object(prepare_call, "ring_settings", of_gpu),
    ):
        prepare_call.prepare_call(q, k, k, plan, *settings, "backward", sink=True)
    agreed, called = group.of().agree.call_args.args[0], group.of().begin.call_args.args[0]
    values = {"deterministic": "True", "transport": "auto"}
    prepared = schedule.settings.with_values(values)
    assert dict(agreed) == dict(prepared)
    assert agreed.fingerprint == vars(prepared)["fingerprint"]  # a worker has made it
    assert called.digest == prepared.of_pass("backward").digest


def of_gpu(plan: ContextPlan, heads: Heads, _: str, *others: Any) -> Settings:
    return ring_settings(plan, heads, "cuda", *others)


def test_captures_find_the_tables_of_a_prepared_plan(kernels: FakeKernels) -> None:
    """Python runs captures; the C++ launcher has uploaded what they read."""
    context_plan._cached_plan.cache_clear()
    plan = sent(KernelSpec(4, 2, 64, num_sms=SMS, lse_gradient=True), 0, 1)
    step(plan, False)
    captured = CurrentStream(torch.device("cpu"), 7, True, 0)
    tables = [code.tables[0] for code in plan.prepared.values()]
    uploads = {"forward": forward._tables, "backward": backward._tables}
    for x in tables:
        found = uploads[x.name]._of_capture(x.owner, captured.device, x.key)
        stream = CurrentStream(captured.device, 7, False, host_stream(kernels))
        assert found is x.copy.on(stream).tables


def test_the_first_call_uploads_all_tables_of_its_plan(kernels: FakeKernels) -> None:
    """By one copy; the backward of a prepared plan uploads nothing."""
    with mock.patch.object(uploads, "to_device", wraps=uploads.to_device) as made:
        step(sent(KernelSpec(4, 2, 64, num_sms=SMS, lse_gradient=True), 0, 1), False)
    assert made.call_count == 1


def test_a_group_finds_the_tables_of_a_plan_that_is_prepared_later() -> None:
    """A capture of a gathered forward finds tables by `gathered`."""
    plan = plain(0, 2)
    with mock.patch.object(token_shards, "warn_of_hosts"):
        bound = plan.bound_to(mock.Mock())
    KernelSpec(4, 2, 64).prepare(plan)
    (code,) = (x for signature, x in bound.prepared.items() if signature[0] == "gathered")
    ((tiling,),) = bound.gathered._tilings.values()
    assert [x.owner for x in code.tables] == [tiling.schedule]


def test_a_plan_of_two_hosts_has_nothing_to_prepare() -> None:
    """Its calls run over "nccl"."""
    assert not plan_context(CU_SEQLENS, (0, 2), hosts=2, prepare=[KernelSpec(4, 2, 64)]).prepared


def test_a_line_names_what_differs(kernels: FakeKernels) -> None:
    """For all shapes one text; none if the plan was prepared and a kernel cannot be built."""
    with mock.patch.object(link, "log_once") as logged:
        for tokens in (70, 90):
            plan = plan_context([0, tokens], (0, 1))
            KernelSpec(4, 2, 64, torch.float16, num_sms=SMS + 1).prepare(plan)
            step(plan, False)
    texts = [x.args[0] for x in logged.call_args_list]
    assert len(texts) == 4
    assert len(set(texts)) == 2  # a forward and a backward
    for text, pass_type in zip(texts, ["forward", "backward"] * 2, strict=True):
        assert text.startswith(f"{pass_type}: the KernelSpecs of a plan differ from a call in num_")
        assert "num_sms, " in text
        assert "dtype, " in text
        assert ("sink, gradient of LSE" in text) == (pass_type == "backward")
        assert "strides" not in text
        assert "settings" not in text
    with (
        mock.patch.object(link, "has_kernels", return_value=False),
        mock.patch.object(link, "log_once") as logged,
        builds() as built,
    ):
        step(sent(KernelSpec(4, 2, 64, num_sms=SMS, lse_gradient=True), 0, 1), False)
    assert len(built) == 2
    assert not logged.called


def host_stream(kernels: FakeKernels) -> int:
    return kernels._stream_id(7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 3}, "heads is 3: it must be a multiple of kv_heads, 2"),
        ({"num_sms": 0}, "num_sms is 0: it must be an integer above 0"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"softmax_scale": -1}, "softmax_scale=-1: it must be positive and finite"),
        ({"softmax_scale": 1e40}, r"softmax_scale=1e\+40: it must be positive and finite"),
        ({"token_strides": (1,)}, r"token_strides is \(1,\): give 3 integers, of q, k and v"),
    ],
)
def test_a_wrong_setting_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        KernelSpec(**{"heads": 4, "kv_heads": 2, "head_dim": 64, **changed})


def test_a_layer_describes_its_calls() -> None:
    layer = RingFA3Attention(8, 2, 64, softmax_scale=0.3, deterministic=True)
    spec = layer.kernel_spec(torch.float16, 100)
    assert spec == KernelSpec(8, 2, 64, torch.float16, 100, 0.3, True)
    layer = RingFA3Attention(8, 2, 64)
    assert not layer.kernel_spec().deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert layer.kernel_spec().deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ValueError, match="precision is 'fp8': only calls in 'native'"):
        RingFA3Attention(8, 2, 64, precision="fp8").kernel_spec()


def test_a_picture_has_a_row_for_each_stream_of_a_rank() -> None:
    pytest.importorskip("matplotlib")
    made: list[Schedule] = []
    build = kernel_spec.build

    def kept(*given: Any) -> Schedule:
        made.append(build(*given))
        return made[-1]

    with mock.patch.object(kernel_spec, "build", kept):
        KernelSpec(4, 2, 64).prepare(plain(0, 2))
    (axes,) = made[1].plot(made[1]).axes
    names = [f"rank {rank} {s}" for rank in range(2) for s in ("COMPUTE", "GRADIENTS", "KV")]
    assert [x.get_text() for x in axes.get_yticklabels()] == names
    assert len(axes.patches) == 2 * len(made[1].steps)
    texts = [x.get_text() for x in axes.texts]
    assert "launch" not in texts
    assert {"publish", "preprocess", "backward", "postprocess", "round_gradients"} <= {*texts}
