"""A call of an op as a program: buffers to allocate, then launches, tensor operations and, in a
ring, calls of the driver.

The host library replays the program for calls with equal shapes, strides and settings, on other
tensors. csrc/host/program.h has its structure, csrc/host/read_program.h reads
`ProgramRecorder.words`.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringfa3.kernels import backward, forward, local_kv
from ringfa3.kernels.launch import entry_address, pointer_offsets

if TYPE_CHECKING:
    from ringfa3.build.units import Unit

aten: Any = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.new_empty.default)
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "forward": forward.ForwardArgs,
    "preprocess": backward.PreprocessArgs,
    "backward": backward.BackwardArgs,
    "postprocess": backward.PostprocessArgs,
    "publish": local_kv.PublishArgs,
    "add_returns": local_kv.AddReturnsArgs,
    "round_gradients": local_kv.RoundGradientsArgs,
}
# Kinds of steps.
LAUNCH, ZERO, COPY, DRIVER_CALL, MEMORY_OPS, SUM_COLUMNS = range(6)
POINTER = 8  # bytes
DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType
DRIVER_WORDS = 4  # arguments of a driver call, at most


class Place(NamedTuple):
    """A byte in an input or a buffer; inputs have the first numbers."""

    tensor: int
    offset: int


class ProgramError(Exception):
    """A call does what no program can repeat."""


class ProgramRecorder(TorchDispatchMode):
    """Records a call that runs inside `with`, and inside `kernels.recording.recording`.

    Every address that a launch reads must belong to an input, to a tensor that the call allocates,
    or to memory of `uses`. A call that does anything else raises ProgramError at `words`, after it
    has run as without a recorder.
    """

    def __init__(self, inputs: Sequence[torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = inputs
        self._buffers: list[torch.Tensor] = []  # held, so that no address is used twice
        self._sizes: list[torch.Size] = []
        self._allocated_at: list[int] = []  # how many steps the call had taken
        self._views: list[torch.Tensor] = []  # of inputs and buffers; held as these
        self._owners: dict[int, tuple[int, torch.Tensor]] = {}  # of views, by id
        self._steps: list[list[int]] = []
        self._problem: str | None = None
        self.names: list[str] = []
        self.tables: list[torch.Tensor] = []
        self.kept: list[object] = []
        self.posts: list[tuple[int, Sequence[str]]] = []

    @staticmethod
    def can_tell_apart(inputs: Sequence[torch.Tensor | None]) -> bool:
        """Whether an address tells which input it belongs to."""
        begins = [x.data_ptr() for x in inputs if x is not None]
        return 0 not in begins and len(set(begins)) == len(begins)

    # What the call does

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self:  # below autograd composite ops come whole
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        try:
            self._follow(func, args, kwargs or {}, result)
        except ProgramError as problem:
            self._problem = self._problem or str(problem)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        if func in ALLOCATIONS:
            self._allocated(result)
            return
        known = [x for x in _tensors(args) if self._is_known(x)]
        if not known:
            return  # an upload of a table
        if func is aten.clone.default:
            self._allocated(result)
            self._steps.append([COPY, *self._view(result), *self._view(args[0])])
        elif func is aten.copy_.default:
            self._steps.append([COPY, *self._view(args[0]), *self._view(args[1])])
        elif func is aten._to_copy.default:
            self._allocated(result)
            self._steps.append([COPY, *self._view(result), *self._view(args[0])])
        elif func is aten.zero_.default:
            self._steps.append([ZERO, *self._view(args[0])])
        elif func is aten.sum.dim_IntList and args[1:] == ([1],) and not kwargs:
            self._allocated(result)
            self._steps.append([SUM_COLUMNS, *self._view(result), *self._view(args[0])])
        else:
            made = list(_tensors((result,)))
            if func._schema.is_mutable or not made or not all(map(self._is_known, made)):
                raise ProgramError(f"it calls {func}")
            place = self._place_of(known[0])
            if place is not None:
                owner = list(self._all())[place.tensor]
                assert owner is not None
                self._views += made
                self._owners |= {id(x): (place.tensor, owner) for x in made}

    def _allocated(self, x: torch.Tensor) -> None:
        if not x.numel():
            return  # nothing reads it
        if not x.is_contiguous() or x.dtype not in DTYPES:
            raise ProgramError(f"it allocates {x.dtype} with strides {x.stride()}")
        self._buffers.append(x)
        self._sizes.append(x.shape)
        self._allocated_at.append(len(self._steps))

    def launched(self, unit: Unit, name: str, args: bytes) -> None:
        structure = STRUCTURES.get(name)
        if structure is None or ctypes.sizeof(structure) != len(args):
            self._problem = self._problem or f"it launches {name}"
            return
        patches: list[int] = []
        for at in pointer_offsets(structure):
            address = int.from_bytes(args[at : at + POINTER], "little")
            place = self._place(address)
            if place is not None:
                patches += (at, *place)
            elif address and not any(_contains(x, address) for x in self.tables):
                self._problem = self._problem or f"{name} reads memory of unknown origin"
        self.names.append(f"{name} of {unit.name}")
        words = _integers(args + bytes(-len(args) % POINTER))
        entry = entry_address(unit, name)
        head = [LAUNCH, entry, len(self.names) - 1, len(args), *words]
        self._steps.append([*head, len(patches) // 3, *patches])

    def called(
        self, call: tuple[Any, tuple[Any, ...]], counts: Sequence[tuple[int, ctypes.Structure]]
    ) -> None:
        entry, arguments = call
        address = cast(int, ctypes.cast(entry, ctypes.c_void_p).value)
        self.names.append(entry.__name__)
        arrays = [x for x in arguments if isinstance(x, ctypes.Array)]
        if arrays:
            begin, (stream, number, operations, _) = ctypes.addressof(arrays[0]), arguments
            data = bytes(operations)
            words = [stream.value or 0, number.value, len(data), *_integers(data)]
            here = [(x, ctypes.addressof(x) - begin, on) for on, x in counts]
            patches = [(at + type(x).value.offset, on) for x, at, on in here if 0 <= at < len(data)]
            words += (len(patches), *(word for patch in patches for word in patch))
            self._steps.append([MEMORY_OPS, address, len(self.names) - 1, *words])
        else:
            values = [x.value or 0 for x in arguments]
            values += [0] * (DRIVER_WORDS - len(values))
            self._steps.append([DRIVER_CALL, address, len(self.names) - 1, *values])

    def uses(self, memory: object) -> None:
        self.tables.extend(_tensors((memory,)))

    def posted(self, stream: int, names: Sequence[str]) -> None:
        self.posts.append((stream, names))

    def keeps(self, plan: object) -> None:
        self.kept.append(plan)

    # Where tensors lie

    def _place(self, address: int) -> Place | None:
        for number, x in enumerate(self._inputs):
            if x is not None and x.data_ptr() == address:
                return Place(number, 0)
        # inputs may lie between each other's rows, so only the first row of one tells
        rows = [
            Place(number, address - x.data_ptr())
            for number, x in enumerate(self._inputs)
            if x is not None and 0 <= address - x.data_ptr() < _row_bytes(x)
        ]
        if rows:
            return rows[0] if len(rows) == 1 else None
        for number, x in enumerate(self._buffers, len(self._inputs)):
            if _contains(x, address):
                return Place(number, address - x.data_ptr())
        return None

    def _is_known(self, x: torch.Tensor) -> bool:
        storage = _storage(x)
        known = (*self._all(), *self.tables)
        return any(y is not None and _storage(y) == storage for y in known)

    def _all(self) -> Iterator[torch.Tensor | None]:
        yield from self._inputs
        yield from self._buffers

    def _view(self, x: torch.Tensor) -> list[int]:
        place = self._place_of(x)
        if place is None:  # memory of other calls, too
            self.tables.append(x)
            return [-len(self.tables), 0, 0, 0]
        owner = list(self._all())[place.tensor]
        assert owner is not None
        if x.dtype != owner.dtype:
            raise ProgramError(f"it copies or fills {owner.dtype} as {x.dtype}")
        offset, shape = place.offset // x.element_size(), x.shape
        return [place.tensor, offset, len(shape), *shape, len(shape), *x.stride()]

    def _place_of(self, x: torch.Tensor) -> Place | None:
        """Of the first element of a tensor; None: it is in a table.

        Raises ProgramError: it is in no memory that is known.
        """
        owner = self._owners.get(id(x))
        if owner is not None:
            number, y = owner
            return Place(number, x.data_ptr() - y.data_ptr())
        place = self._place(x.data_ptr())
        if place is not None:
            return place
        if any(_storage(y) == _storage(x) for y in self.tables):
            return None
        raise ProgramError(f"it uses a tensor of unknown origin, {tuple(x.shape)}")

    # The program

    def words(self, results: tuple[torch.Tensor, ...]) -> bytes:
        """The program of a call that returned `results`, as 64-bit integers.

        Raises ProgramError: no program repeats the call.
        """
        if self._problem:
            raise ProgramError(self._problem)
        if not any(step[0] == LAUNCH for step in self._steps):
            raise ProgramError("it launches no kernel")
        outputs = [self._output(x) for x in results]
        if len({number for number, *_ in outputs}) < len(outputs):
            raise ProgramError("two results share memory")
        whole: list[int] = [len(self._buffers)]
        for x, first, sizes in zip(self._buffers, self._allocated_at, self._sizes, strict=True):
            whole += (DTYPES[x.dtype], first, len(sizes), *sizes)
        whole += (len(self._inputs), len(self._steps))
        for step in self._steps:
            whole += step
        whole.append(len(outputs))
        for output in outputs:
            whole += output
        return array.array("q", _signed(whole)).tobytes()

    def _output(self, x: torch.Tensor) -> list[int]:
        """A result, which fills a buffer; from now on the buffer has its shape."""
        place = self._place(x.data_ptr())
        first = len(self._inputs)
        if place is None or place.tensor < first or place.offset or not x.is_contiguous():
            raise ProgramError("a result is a part of another tensor")
        number = place.tensor - first
        if self._buffers[number].numel() != x.numel() or self._buffers[number].dtype != x.dtype:
            raise ProgramError("a result is a part of another tensor")
        self._sizes[number] = x.shape
        return self._view(x)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _contains(x: torch.Tensor, address: int) -> bool:
    return 0 <= address - x.data_ptr() < x.numel() * x.element_size()


def _row_bytes(x: torch.Tensor) -> int:
    """From the first byte of x[0] to its last one."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return (last + 1) * x.element_size()


def _integers(data: bytes) -> Sequence[int]:
    return array.array("q", data)


def _signed(values: Sequence[int]) -> Iterator[int]:
    """Addresses of 64 bits as the signed integers with the same bits."""
    return (x - (1 << 64) if x >= 1 << 63 else x for x in values)
