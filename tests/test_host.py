"""If this fails, calls that start in C++ launch something else than Python's. The host library on
CPU tensors, with kernels that keep their arguments: what it launches equals what Python launches,
byte for byte, and so do results, gradients and errors."""

from __future__ import annotations

import array
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfa3 import flash_attn_func, flash_attn_varlen_func, host
from ringfa3.kernels.backward import PreprocessArgs
from ringfa3.schedules.schedule import DTYPES
from ringfa3.schedules.steps import ALLOCATE, FREE, POINTER, ZERO
from tests.support.both_hosts import in_threads
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import Outcome, Shape, call, equal

PROGRAMS = 256  # kMaxPrograms of csrc/host/programs.h
PACKAGE = str(Path(host.__file__).parent)


def counted(what: str) -> int:
    return host.counts()[what]


def in_python(*arguments: Any, **options: Any) -> Outcome:
    host.select("python")
    try:
        return call(*arguments, **options)
    finally:
        host.select("cpp")


WINDOWS = st.tuples(st.sampled_from([-1, 0, 5]), st.sampled_from([-1, 0, 9]))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 1)]))
    d = draw(st.sampled_from([40, 64, 128]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    layout = draw(st.sampled_from(["plain", "packed", "heads first"]))
    if draw(st.booleans()):
        lengths = tuple(draw(st.lists(st.integers(0, 90), min_size=1, max_size=4)))
        total = max(1, sum(lengths))
        lengths = lengths if sum(lengths) else (1,)
        return Shape(1, total, total, heads, d, dtype, layout, documents=lengths)
    tokens = draw(st.integers(1, 300))
    keys = tokens if layout == "packed" else draw(st.integers(1, 300))
    v_dim = None if layout == "packed" else draw(st.sampled_from([None, 32]))
    return Shape(draw(st.integers(1, 3)), tokens, keys, heads, d, dtype, layout, v_dim)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(),
    causal=st.booleans(),
    window=WINDOWS,
    scale=st.sampled_from([None, 0.3]),
    deterministic=st.booleans(),
    dlse=st.booleans(),
    with_sink=st.booleans(),
)
def test_a_replayed_call_launches_what_python_launches(
    kernels: FakeKernels, shape: Shape, causal: bool, window: tuple[int, int], scale: float | None,
    deterministic: bool, dlse: bool, with_sink: bool,
) -> None:  # fmt: skip
    """Words, streams, and tensors behind addresses; results and gradients bit for bit, of the call
    that builds the program and of a later one, on other tensors."""
    options: dict[str, Any] = {
        "causal": causal, "window_size": window, "softmax_scale": scale,
        "deterministic": deterministic, "dlse": dlse,
    }  # fmt: skip
    sink, another = (torch.arange(shape.heads[0]) + x if with_sink else None for x in (0.5, 0.25))
    wanted = in_python(kernels, shape, shape.inputs(), sink=sink, **options)
    assert len(wanted.results) == 5 + with_sink
    others = shape.inputs(1)
    found = call(kernels, shape, others, sink=another, **options)
    host.select("python")
    assert not found.differences(call(kernels, shape, others, sink=another, **options))
    host.select("cpp")
    before = counted("replayed")
    assert not call(kernels, shape, shape.inputs(), sink=sink, **options).differences(wanted)
    launched = [name for name, *_ in wanted.launches]
    if launched == ["forward", "preprocess", "backward", "postprocess"]:
        assert counted("replayed") == before + 2


BASE = Shape(tokens=200, keys=200)
VARIATIONS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "batch": (Shape(2, 200, 200), {}),
    "tokens": (Shape(tokens=201, keys=200), {}),
    "keys": (Shape(tokens=200, keys=201), {}),
    "heads": (Shape(tokens=200, keys=200, heads=(2, 2)), {}),
    "head dim": (Shape(tokens=200, keys=200, head_dim=128), {}),
    "head dim of v": (Shape(tokens=200, keys=200, v_dim=48), {}),
    "dtype": (Shape(tokens=200, keys=200, dtype=torch.float16), {}),
    "strides": (Shape(tokens=200, keys=200, layout="packed"), {}),
    "more strides": (Shape(tokens=200, keys=200, layout="heads first"), {}),
    "documents": (Shape(tokens=200, keys=200, documents=(150, 50)), {}),
    "causal": (BASE, {"causal": True}),
    "left": (BASE, {"window_size": (7, -1)}),
    "right": (BASE, {"window_size": (-1, 7)}),
    "scale": (BASE, {"softmax_scale": 0.5}),
    "nearly the same scale": (BASE, {"softmax_scale": float(np.nextafter(0.125, 1))}),
    "deterministic": (BASE, {"deterministic": True}),
    "sink": (BASE, {"sink": torch.ones(4)}),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_call_that_differs_is_of_another_kind(kernels: FakeKernels, name: str) -> None:
    shape, options = VARIATIONS[name]
    wanted = in_python(kernels, shape, shape.inputs(), **options)
    for _ in range(3):
        call(kernels, BASE, BASE.inputs())
    before = host.counts()
    assert not call(kernels, shape, shape.inputs(), **options).differences(wanted)
    after = host.counts()
    assert (after["built"], after["replayed"]) == (before["built"] + 2, before["replayed"])


def test_the_first_call_of_a_kind_builds_its_program(kernels: FakeKernels) -> None:
    """Forward and backward."""
    made = ("built", "replayed", "programs")
    for expected in ((2, 0, 2), (2, 2, 2), (2, 4, 2)):
        call(kernels, BASE, BASE.inputs())
        assert tuple(map(counted, made)) == expected
    assert counted("python") == 0


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_sink_is_replayed_with_and_without_its_gradient(
    kernels: FakeKernels, differentiated: bool
) -> None:
    """dsink of the later calls is that of Python; without gradient nothing computes it."""
    leaves = [x.requires_grad_() for x in BASE.inputs()[:3]]
    sink = torch.arange(4.0).requires_grad_(differentiated)
    wanted, found = [*leaves, *([sink] if differentiated else [])], []
    for which in ("python", "cpp", "cpp"):
        host.select(which)
        out = flash_attn_func(*leaves, sink=sink)
        assert isinstance(out, torch.Tensor)
        found.append(torch.autograd.grad(out.sum(), wanted))
    assert (counted("built"), counted("replayed")) == (2, 2)
    assert all(map(equal, found[0], found[1]))
    assert all(map(equal, found[0], found[2]))
    written = [x for x in kernels.take() if x.name == "preprocess"]
    at = PreprocessArgs.dsink.offset
    assert {any(x.words[at : at + POINTER]) for x in written} == {differentiated}


def test_streams_have_programs_of_their_own(kernels: FakeKernels) -> None:
    """Also two with one handle; a launch gets the handle of the stream that is current."""
    for stream, generation in ((7, 0), (8, 0), (7, 1)):
        kernels.use(stream, generation)
        before = counted("built")
        outcomes = [call(kernels, BASE, BASE.inputs()) for _ in range(3)]
        assert counted("built") == before + 2
        assert {launched[3] for x in outcomes for launched in x.launches} == {stream}
    kernels.use(8)
    before = counted("replayed")
    assert {x[3] for x in call(kernels, BASE, BASE.inputs()).launches} == {8}
    assert counted("replayed") == before + 2


def test_inputs_that_begin_elsewhere_in_16_bytes_are_copied(kernels: FakeKernels) -> None:
    """By Python, by the call that builds the program and by a later one."""
    inputs = BASE.inputs()
    for _ in range(3):
        call(kernels, BASE, inputs)
    room = torch.zeros(inputs[0].numel() + 1, dtype=torch.bfloat16)
    shifted = room[1:].view(inputs[0].shape)
    shifted.copy_(inputs[0])
    moved = [shifted, *inputs[1:]]
    wanted = in_python(kernels, BASE, moved)
    built = counted("built")
    for _ in range(3):
        assert not call(kernels, BASE, moved).differences(wanted)
        assert counted("built") == built + 2


def test_a_steady_call_enters_one_frame_of_python(kernels: FakeKernels) -> None:
    """Of this package: flash_attn_func, and none in the backward."""
    leaves = [x.requires_grad_() for x in BASE.inputs()[:3]]
    dout = BASE.inputs()[3]
    seen: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code.co_name)

    for _ in range(3):
        seen.clear()
        sys.setprofile(profile)
        try:
            out = flash_attn_func(*leaves, causal=True)
            forward = list(seen)
            assert isinstance(out, torch.Tensor)
            torch.autograd.grad(out, leaves, dout)
        finally:
            sys.setprofile(None)
    assert (forward, seen) == (["flash_attn_func"], ["flash_attn_func"])


def test_lengths_on_the_cpu_count_by_their_values(kernels: FakeKernels) -> None:
    """A numpy array changes its tensor's values, and not its version."""
    array = np.array([0, 150, 200], np.int32)
    lengths = torch.from_numpy(array)
    shape = Shape(tokens=200, keys=200, documents=(150, 50))
    for _ in range(3):
        call(kernels, shape, shape.inputs(), lengths, causal=True)
    array[1] = 70
    other = Shape(tokens=200, keys=200, documents=(70, 130))
    wanted = in_python(kernels, other, other.inputs(), causal=True)
    before = counted("replayed")
    assert not call(kernels, shape, shape.inputs(), lengths, causal=True).differences(wanted)
    assert counted("replayed") == before
    again = torch.tensor([0, 150, 200])  # other type, the first values
    call(kernels, shape, shape.inputs(), again, causal=True)
    assert counted("replayed") == before + 2


def test_lengths_on_a_gpu_count_by_tensor_and_version(
    fake_kernels: FakeKernels, host_library: Any
) -> None:
    """And their programs go with them."""
    fake = fake_kernels
    host.start(host_library, "cpu", fake.driver(), lengths_by_value=False)
    host.select("cpp")
    try:
        shape = Shape(tokens=200, keys=200, documents=(150, 50))
        lengths = shape.cumulative()
        inputs = shape.inputs()
        for _ in range(2):
            call(fake, shape, inputs, lengths, backward=False)
        before = counted("replayed")
        assert before > 0
        lengths[1] = 70
        other = Shape(tokens=200, keys=200, documents=(70, 130))
        wanted = in_python(fake, other, inputs, backward=False)
        for number in range(3):
            found = call(fake, shape, inputs, lengths, backward=False)
            assert not found.differences(wanted), number
        assert counted("replayed") == before + 2
        assert host.counts()["programs"] == 1  # the first version's has gone
        del lengths
        call(fake, BASE, BASE.inputs(), backward=False)
        assert host.counts()["programs"] == 1
    finally:
        host.stop()


def test_programs_are_bounded(kernels: FakeKernels) -> None:
    """The one that was used least recently goes."""
    shape, inputs = Shape(tokens=4, keys=4), Shape(tokens=4, keys=4).inputs()
    scales = [0.1 + n / 1000 for n in range(PROGRAMS + 1)]
    for scale in scales:
        for each in (scale, scales[0]):
            call(kernels, shape, inputs, backward=False, softmax_scale=each)
    assert host.counts()["programs"] == PROGRAMS
    assert counted("built") == PROGRAMS + 1  # the first one stayed
    before = counted("built")
    call(kernels, shape, inputs, backward=False, softmax_scale=scales[0])
    assert counted("built") == before
    call(kernels, shape, inputs, backward=False, softmax_scale=scales[1])
    assert counted("built") == before + 1


def test_threads_replay_and_record_at_once(kernels: FakeKernels) -> None:
    """Each gets the results of its own tensors."""
    problems: list[str] = []

    def work(number: int) -> None:
        shape = Shape(tokens=64 + 8 * (number % 3), keys=80)
        inputs = shape.inputs(number)
        expected = None
        for turn in range(40):
            leaves = [x.detach().requires_grad_() for x in inputs[:3]]
            scale = 0.1 + turn % 4
            out = flash_attn_func(*leaves, softmax_scale=scale)
            assert isinstance(out, torch.Tensor)
            found = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
            if expected is None:
                expected = found
            elif not all(map(equal, found, expected)):
                problems.append(f"thread {number}, turn {turn}")

    in_threads(work)
    assert not problems
    assert counted("replayed") > 0


BAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({"dtype": torch.int32}, {}),
    "head dim": ({"k": (1, 8, 2, 32)}, {}),
    "heads": ({"k": (1, 8, 3, 64)}, {}),
    "narrow v": ({"v": (1, 8, 2, 20)}, {}),
    "wide v": ({"v": (1, 8, 2, 72)}, {}),
    "keys of v": ({"v": (1, 9, 2, 64)}, {}),
    "batch": ({"k": (2, 8, 2, 64)}, {}),
    "dims": ({"q": (8, 4, 64)}, {}),
    "no heads": ({"q": (1, 8, 0, 64)}, {}),
    "scale": ({}, {"softmax_scale": 0.0}),
    "no number": ({}, {"softmax_scale": "1"}),
    "infinite": ({}, {"softmax_scale": float("inf")}),
    "window": ({}, {"window_size": (-2, 0)}),
    "three sides": ({}, {"window_size": (1, 1, 1)}),
    "fraction": ({}, {"window_size": (0.5, 0)}),
    "precision": ({}, {"precision": "fp4"}),
    "sink": ({}, {"sink": torch.zeros(3)}),
    "no tensor": ({"q": None}, {}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_python(kernels: FakeKernels, name: str) -> None:
    """Type and text."""
    given, options = BAD[name]
    dtype = given.get("dtype", torch.bfloat16)
    defaults = {"q": (1, 8, 4, 64), "k": (1, 8, 2, 64), "v": given.get("k", (1, 8, 2, 64))}
    made: Any = {
        key: None if (size := given.get(key, usual)) is None else torch.zeros(size, dtype=dtype)
        for key, usual in defaults.items()
    }
    raised = []
    for which in host.HOSTS:
        host.select(which)
        with pytest.raises((TypeError, ValueError)) as caught:
            flash_attn_func(made["q"], made["k"], made["v"], **options)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


def test_errors_of_lengths_are_those_of_python(kernels: FakeKernels) -> None:
    q, k = torch.zeros(8, 4, 64).bfloat16(), torch.zeros(8, 2, 64).bfloat16()
    for lengths in ([0, 9], [1, 8], [0, 5, 3, 8], [0.0, 8.0]):
        raised = []
        for which in host.HOSTS:
            host.select(which)
            cu = torch.tensor(lengths)
            for _ in range(2):
                with pytest.raises(ValueError, match="cu_seqlens_q") as caught:
                    flash_attn_varlen_func(q, k, k, cu, cu)
                raised.append(str(caught.value))
        assert len(set(raised)) == 1


def test_a_refused_launch_raises_the_error_of_python(kernels: FakeKernels) -> None:
    call(kernels, BASE, BASE.inputs()), call(kernels, BASE, BASE.inputs())
    kernels.library.fake_fail(719)
    texts = []
    for which in host.HOSTS:
        host.select(which)
        with pytest.raises(RuntimeError) as caught:
            flash_attn_func(*BASE.inputs()[:3])
        texts.append(str(caught.value))
    expected = "forward of forward-d64-bf16-short could not be launched: CUDA error 719"
    assert texts == [expected, expected]
    kernels.library.fake_fail(0)
    assert not call(kernels, BASE, BASE.inputs()).differences(
        in_python(kernels, BASE, BASE.inputs())
    )


def test_a_buffer_is_freed_behind_its_last_step(host_library: Any) -> None:
    """Of two buffers that steps use one after the other one is there at a time."""
    n, float32 = 1 << 16, DTYPES[torch.float32]
    allocate = [ALLOCATE, float32, 1, n]
    first, second = ([number, 0, 1, n, 1] for number in (1, 2))
    steps = [*allocate, ZERO, *first, FREE, 1, *allocate, ZERO, *second]
    words = array.array("q", [5, *steps, 1, *second])
    program = host_library.program(words, b"", b"", b"", (), ())
    with torch.profiler.profile(profile_memory=True) as profile:
        (out,) = host_library.run(program, (torch.zeros(1),), 0, (0, 0, 0))
    events = profile.profiler.kineto_results.events()
    sizes = [x.nbytes() for x in events if x.name() == "[memory]" and abs(x.nbytes()) == 4 * n]
    assert sizes == [4 * n, -4 * n, 4 * n]
    assert torch.equal(out, torch.zeros(n))
