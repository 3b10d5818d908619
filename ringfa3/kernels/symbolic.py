"""Tensors without memory, on which the host code of a call runs to build its schedule.

A symbolic tensor has a shape, strides and a dtype. Its address names a base, which is an input of
the call, a buffer that the call allocates or a symbol, and an offset. Code that only does
arithmetic with shapes and addresses therefore runs on it unchanged, and every address that a launch
gets tells where it comes from. What would compute appends a step to the schedule.

A symbol stands for an address that only the process has that runs the call: an entry point, a table
in device memory, memory of a peer. So another process can build a schedule.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from ringfa3.build.units import Unit

Shape = tuple[int, ...]

# What an address is of: its type, then what tells it from others of that type.
Symbol: TypeAlias = tuple[Any, ...]
COUNTER: Symbol = ("counter",)  # the work counter of a forward

# An address is base << OFFSET_BITS | offset. Addresses of the user space have 47 bits, so a memory
# address has base 0. Inputs and buffers have bases from 1 on, symbols from 1 + SYMBOLS on.
OFFSET_BITS = 48
SYMBOLS = 1 << 15
ALIGNMENT = 16  # bytes that TMA addresses


class ScheduleError(Exception):
    """A call does what no schedule can say."""


class Address(NamedTuple):
    """A byte in an input or a buffer; inputs have the first numbers. Or, from `SYMBOLS` on, of a
    symbol."""

    tensor: int
    offset: int


class Builder(Protocol):
    """What takes the steps of a call while its host code runs on symbolic tensors."""

    def new_buffer(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the call allocates, contiguous."""

    def zero(self, target: SymbolicTensor) -> None: ...

    def copy(self, target: SymbolicTensor, source: SymbolicTensor) -> None: ...

    def sum_columns(self, target: SymbolicTensor, source: SymbolicTensor) -> None:
        """Stores the sum of source[i] in target[i]."""

    def add_to(self, target: SymbolicTensor, source: SymbolicTensor) -> None: ...

    def gather_rows(
        self, target: SymbolicTensor, source: SymbolicTensor, index: SymbolicTensor
    ) -> None:
        """Stores source[index[i]] in target[i]."""

    def add_rows(
        self, target: SymbolicTensor, source: SymbolicTensor, index: SymbolicTensor
    ) -> None:
        """Adds source[i] to target[index[i]]; no row comes twice."""

    def launch(self, unit: Unit, name: str, args: bytes) -> None:
        """A launch of ringfa3_NAME of a unit, whose addresses may be symbolic."""

    def table(self, table: Any) -> int:
        """The symbolic address of tables, an `uploads.TableRef`."""

    def memory(
        self,
        symbol: Symbol,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
    ) -> torch.Tensor:
        """Contiguous memory that begins `offset` elements after a symbol."""

    def hold_reference(self, plan: object) -> None:
        """The plan of the call, whose uploads a captured call reads."""


class Gpu(NamedTuple):
    """A GPU that a build in a process without it is for; it has all kernels. num_sms: SMs."""

    num_sms: int


class _Thread(threading.local):
    builder: Any = None
    gpu: Gpu | None = None


_thread = _Thread()


def current_builder() -> Any:
    """The builder for which this thread runs a call's host code; None: the call itself runs."""
    return _thread.builder


def gpu_elsewhere() -> Gpu | None:
    """The GPU that this thread builds for; None: that of its tensors."""
    return _thread.gpu


@contextmanager
def building(builder: Builder, gpu: Gpu | None = None) -> Iterator[None]:
    """Inside, this thread launches nothing: a builder takes all steps."""
    outer = _thread.builder, _thread.gpu
    _thread.builder, _thread.gpu = builder, gpu
    try:
        yield
    finally:
        _thread.builder, _thread.gpu = outer


class Base(NamedTuple):
    """Where symbolic tensors lie.

    number  of the input or buffer; `SYMBOLS` + n: the n-th symbol; -1: nowhere, without elements
    begin   address of the first element
    """

    number: int
    begin: int

    @classmethod
    def of(cls, number: int, remainder: int = 0) -> Base:
        """remainder: of the run-time address, modulo `ALIGNMENT`, on which steps depend."""
        return cls(number, (number + 1) << OFFSET_BITS | remainder)


def decode(address: int) -> Address | None:
    """The base and offset of a symbolic address, as it would be without remainder; None: it is an
    address of memory."""
    tensor = (address >> OFFSET_BITS) - 1
    return None if tensor < 0 else Address(tensor, address & ((1 << OFFSET_BITS) - 1))


class SymbolicTensor:
    """Stands for a `torch.Tensor` in the host code of a call. Methods are those of tensors.

    Raises ScheduleError: a function of PyTorch is called with it.
    """

    requires_grad = False

    def __init__(
        self,
        builder: Builder,
        base: Base,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
    ) -> None:
        """offset: of the first element, in elements."""
        self.builder, self.base, self.offset = builder, base, offset
        self.shape, self._stride = torch.Size(shape), tuple(stride)
        self.dtype, self.device, self.itemsize = dtype, device, dtype.itemsize
        self.is_cuda = device.type == "cuda"

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, given: Any, options: Any = None) -> Any:
        if func is torch.index_select:
            source, dim, index = given
            if dim == 0:
                return options["out"]._gather(source, index)
        raise ScheduleError(f"it calls {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        raise ScheduleError(f"it uses Tensor.{name}")

    # Shape and address

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def stride(self, dim: int | None = None) -> Any:
        return self._stride if dim is None else self._stride[dim]

    def data_ptr(self) -> int:
        return self.base.begin + self.offset * self.itemsize if self.numel() else 0

    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self._stride), strict=True):
            if size != 1 and stride != expected:
                return not self.numel()
            expected *= size
        return True

    # Views

    def as_strided(self, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Any:
        """offset: relative to the first element of this tensor, unlike PyTorch's."""
        place = self.offset + offset
        return SymbolicTensor(
            self.builder, self.base, shape, stride, self.dtype, self.device, place
        )

    def __getitem__(self, index: Any) -> Any:
        """Slices of step 1, numbers and an ellipsis."""
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in given:
            at = given.index(Ellipsis)
            whole = (slice(None),) * (self.dim() - len(given) + 1)
            given = given[:at] + whole + given[at + 1 :]
        shape, stride, offset = [], [], 0
        for dim, (size, step) in enumerate(zip(self.shape, self._stride, strict=True)):
            part = given[dim] if dim < len(given) else slice(None)
            if isinstance(part, slice):
                begin, end, every = part.indices(size)
                if every != 1:
                    raise ScheduleError("it takes a slice with steps")
                shape.append(max(0, end - begin))
                stride.append(step)
            elif isinstance(part, int):
                begin = part % size
            else:
                raise ScheduleError(f"it takes elements by {type(part).__name__}")
            offset += begin * step
        return self.as_strided(shape, stride, offset)

    def unbind(self, dim: int) -> tuple[Any, ...]:
        before = [slice(None)] * dim
        return tuple(self.__getitem__((*before, i)) for i in range(self.shape[dim]))

    def transpose(self, a: int, b: int) -> Any:
        shape, stride = list(self.shape), list(self._stride)
        shape[a], shape[b], stride[a], stride[b] = shape[b], shape[a], stride[b], stride[a]
        return self.as_strided(shape, stride)

    def view(self, *shape: Any) -> Any:
        sizes = list(shape[0] if isinstance(shape[0], Sequence) else shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.numel() // -math.prod(sizes)
        stride = viewed_stride(self.shape, self._stride, sizes)
        if stride is None:
            raise ScheduleError("it views a tensor whose strides do not allow that")
        return self.as_strided(sizes, stride)

    def flatten(self, first: int, last: int = -1) -> Any:
        """A view if strides allow that, else a copy."""
        end = last % self.dim() + 1
        if end == first + 1:
            return self
        shape = *self.shape[:first], math.prod(self.shape[first:end]), *self.shape[end:]
        allowed = viewed_stride(self.shape, self._stride, shape) is not None
        return (self if allowed else self.clone()).view(shape)

    # What the call allocates and computes

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> Any:
        sizes = tuple(shape[0] if isinstance(shape[0], Sequence) else shape)
        return self.builder.new_buffer(sizes, dtype or self.dtype, self.device)

    def clone(self, memory_format: object = torch.contiguous_format) -> Any:
        made = self.new_empty(self.shape)
        made.copy_(self)
        return made

    def contiguous(self) -> Any:
        return self if self.is_contiguous() else self.clone()

    def copy_(self, source: Any) -> Any:
        if not isinstance(source, SymbolicTensor) or source.shape != self.shape:
            raise ScheduleError("it copies what is no tensor of the call, or broadcasts")
        self.builder.copy(self, source)
        return self

    def zero_(self) -> Any:
        self.builder.zero(self)
        return self

    def add_(self, other: Any) -> Any:
        if not isinstance(other, SymbolicTensor) or other.shape != self.shape:
            raise ScheduleError("it adds what is no tensor of the call, or broadcasts")
        self.builder.add_to(self, other)
        return self

    def index_add_(self, dim: int, index: Any, source: Any) -> Any:
        if dim or not isinstance(index, SymbolicTensor):
            raise ScheduleError("it adds rows by an index that is no table, or not along rows")
        self.builder.add_rows(self, source, index)
        return self

    def _gather(self, source: Any, index: Any) -> Any:
        if not isinstance(index, SymbolicTensor):
            raise ScheduleError("it gathers rows by an index that is no table")
        self.builder.gather_rows(self, source, index)
        return self

    def sum(self, dim: int) -> Any:
        if self.dim() != 2 or dim != 1:
            raise ScheduleError("it sums what is no matrix, or not along its rows")
        made = self.new_empty(self.shape[:1])
        self.builder.sum_columns(made, self)
        return made


def viewed_stride(
    shape: Sequence[int], stride: Sequence[int], viewed: Sequence[int]
) -> Shape | None:
    """The strides of a view with another shape, as PyTorch's `computeStride`; None: there is none.

    A dimension with one element gets the stride that PyTorch gives it: launches have it, too.
    """
    if not math.prod(shape):
        return contiguous_stride(viewed)
    made = [0] * len(viewed)
    at, taken, elements, step = len(viewed) - 1, 1, 1, stride[-1]
    for dim in reversed(range(len(shape))):
        elements *= shape[dim]
        if dim and (shape[dim - 1] == 1 or stride[dim - 1] == elements * step):
            continue  # the run of dimensions that lie in one row goes on
        while at >= 0 and (taken < elements or viewed[at] == 1):
            made[at] = taken * step
            taken *= viewed[at]
            at -= 1
        if taken != elements:
            return None
        if dim:
            step, elements, taken = stride[dim - 1], 1, 1
    return None if at >= 0 else tuple(made)


def contiguous_stride(shape: Sequence[int]) -> Shape:
    """As PyTorch's, which counts a dimension without elements as one with one."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride)) if shape else ()


def symbolic_input(builder: Builder, number: int, x: torch.Tensor | None) -> torch.Tensor | None:
    """The input of a call that is like x, with any address of equal remainder."""
    if x is None:
        return None
    base = Base.of(number, x.data_ptr() % ALIGNMENT)
    return as_tensor(SymbolicTensor(builder, base, x.shape, x.stride(), x.dtype, x.device))


def indices_at(address: int, count: int) -> torch.Tensor:
    """(count,) int64 in a table at a symbolic address, for the builder of this thread."""
    base, device = Base((address >> OFFSET_BITS) - 1, address), torch.device("cpu")
    begin = address & ((1 << OFFSET_BITS) - 1)
    base = Base(base.number, address - begin)
    whole = SymbolicTensor(current_builder(), base, (count,), (1,), torch.int64, device)
    return as_tensor(whole.as_strided((count,), (1,), begin // whole.itemsize))


def as_tensor(x: SymbolicTensor) -> torch.Tensor:
    """For code that is typed for tensors."""
    return cast(torch.Tensor, x)
