"""If this fails, schedules have other addresses than the tensors of a call. Symbolic tensors have
the shapes, strides and addresses of PyTorch's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ringfa3.kernels.symbolic import ScheduleError, decode, viewed_stride
from ringfa3.schedules.schedule import ScheduleBuilder


def random_view(rng: random.Random) -> torch.Tensor:
    """Of up to four dimensions, some with one element, in any order, some with gaps."""
    dims = rng.randint(1, 4)
    shape = [rng.choice([1, 1, 2, 3, 4]) for _ in range(dims)]
    room = [size + rng.choice([0, 0, 1]) for size in shape]
    order = rng.sample(range(dims), dims)
    whole = torch.empty([room[i] for i in order]).permute([order.index(i) for i in range(dims)])
    return whole[tuple(slice(size) for size in shape)]


def test_views_have_the_strides_of_pytorch() -> None:
    """Also those of dimensions with one element, which launches get."""
    rng, viewed = random.Random(0), 0
    for _ in range(2000):
        x = random_view(rng)
        first = rng.randrange(x.dim())
        end = rng.randint(first, x.dim() - 1) + 1
        shape = [*x.shape[:first], x[(0,) * first].numel(), *x.shape[end:]]
        shape[first] = torch.Size(x.shape[first:end]).numel()
        if rng.random() < 0.3:
            shape = list(x.shape)
            shape.insert(rng.randint(0, x.dim()), 1)
        try:
            expected = x.view(shape).stride()
        except RuntimeError:
            expected = None
        assert viewed_stride(x.shape, x.stride(), shape) == expected, (x.shape, x.stride(), shape)
        viewed += expected is not None
    assert 0 < viewed < 2000


OPERATIONS: dict[str, Any] = {
    "slices": lambda x: x[1:, :, 8:24],
    "an ellipsis": lambda x: x[..., :8],
    "a number": lambda x: x[2, :, -1],
    "unbind": lambda x: x.unbind(1)[1],
    "transpose": lambda x: x.transpose(0, 1)[1:],
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(2, 3, -1)[1:],
    "as_strided": lambda x: x[1:].as_strided((2, 8), (32, 1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("begin", [0, 3])
def test_an_operation_gives_the_address_of_pytorch(name: str, begin: int) -> None:
    """Input 1 of a call begins at any address with the remainder of the given tensor."""
    x = torch.empty(6 * 2 * 32 + begin)[begin:].view(6, 2, 32)
    operation = OPERATIONS[name]
    given = [None, x]
    wanted, found = operation(x), operation(ScheduleBuilder(given).symbolic(given)[1])
    assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
    address = decode(found.data_ptr())
    assert address is not None
    remainder = x.data_ptr() % 16
    assert address == (1, wanted.data_ptr() - x.data_ptr() + remainder)
    assert found.data_ptr() % 16 == wanted.data_ptr() % 16


def test_what_no_step_says_is_refused() -> None:
    """By functions and methods of PyTorch alike, and with what they are called."""
    given = [torch.empty(4, 4)]
    (x,) = ScheduleBuilder(given).symbolic(given)
    assert x is not None
    for call, name in (
        (lambda: torch.zeros_like(x), "zeros_like"),
        (lambda: torch.nn.functional.pad(x, (0, 1)), "pad"),
        (lambda: x.exp(), "exp"),
    ):
        with pytest.raises(ScheduleError, match=name):
            call()
