"""Offload: tensors that checkpointed blocks save for their backward wait in host memory.

They are a block's input, the residual stream, and attention's (O, LSE). A side stream copies them
to the host while the block and the next one run, and back during the backward of the next one.
Shapes are written as suffixes, as in ``transformer.py``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ringfa3 import keep_attention
from ringfa3.custom_op import checkpointed

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process


def host_buffer(n_bytes: int, device: torch.device) -> Tensor:
    """New host memory, (n_bytes,) uint8; for a GPU it is pinned until it is freed.

    It has exactly ``n_bytes``. PyTorch would round its own pinned memory up to a power of two.
    """
    buffer = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
    if device.type == "cuda" and n_bytes:
        address = buffer.data_ptr()
        with torch.cuda.device(device):
            code = torch.cuda.cudart().cudaHostRegister(address, n_bytes, PORTABLE)
        torch.cuda.check_error(int(code))
        weakref.finalize(buffer, _unpin, address, device)
    return buffer


def _unpin(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


class Copies:
    """Synchronous copies, for the CPU."""

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Begin to copy, after all work that has been issued. Returns an event for ``wait``."""
        to.copy_(source)

    def wait(self, event: Any) -> None:
        """Let work that is issued later start only after that copy has ended."""


class StreamCopies(Copies):
    """Asynchronous copies on a separate CUDA stream, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, to: Tensor, source: Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(event)


class HostPool:
    """Host buffers for tensors of up to ``tokens`` tokens; never freed, pinned for a GPU."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.buffers: list[Tensor] = []  # all of them, (bytes,) uint8
        self._free: dict[int, list[Tensor]] = {}  # by bytes of a token

    def take(self, like: Tensor, tokens: int) -> Tensor:
        """A buffer that holds ``like``, of ``tokens`` tokens; ``ValueError`` if they are too many.

        Allocates only if no buffer is free.
        """
        if tokens > self.tokens:
            raise ValueError(f"{tokens} tokens do not fit buffers for {self.tokens}")
        row = like.nbytes // tokens
        free = self._free.setdefault(row, [])
        if not free:
            free.append(self._allocate(row * self.tokens, like.device))
        return free.pop()

    def give(self, buffer: Tensor) -> None:
        """Return a buffer. Its copies that have begun run before those of its next user."""
        self._free[len(buffer) // self.tokens].append(buffer)

    def _allocate(self, n_bytes: int, device: torch.device) -> Tensor:
        buffer = host_buffer(n_bytes, device)
        self.buffers.append(buffer)
        return buffer


class HostTensor:
    """A tensor in a host buffer; the buffer returns to the pool when this object is deleted."""

    def __init__(self, source: Tensor, tokens: int, pool: HostPool, copies: Copies) -> None:
        self._here: tuple[Tensor, Any] | None = None
        self._buffer: Tensor | None = None
        self._pool, self._copies, self._device = pool, copies, source.device
        self._buffer = pool.take(source, tokens)
        self._host = self._buffer[: source.nbytes].view(source.dtype).view(source.shape)
        self.copied = copies.copy(self._host, source)  # the event of the copy to the host

    def __del__(self) -> None:
        if self._here is not None:  # fetched but not used: no copy may outlive its tensor
            self._copies.wait(self._here[1])
        if self._buffer is not None:
            self._pool.give(self._buffer)

    def prefetch(self) -> None:
        """Begin to copy the tensor back to its device, unless that has begun."""
        if self._here is None:
            here = torch.empty_like(self._host, device=self._device)
            self._here = here, self._copies.copy(here, self._host)

    def get(self) -> Tensor:
        """The tensor on its device, for work that is issued after this call."""
        self.prefetch()
        assert self._here is not None
        (here, event), self._here = self._here, None
        self._copies.wait(event)
        return here


class Offload:
    """Runs blocks under activation checkpoints whose saved tensors are offloaded to the host.

    Args:
        blocks: how many blocks offload, the first ones; the others use device memory.
        tokens: the most tokens of a micro-batch that this rank holds.
        keeps_attention: selective checkpoints, which save (O, LSE), so that attention runs once.
        attention: whether (O, LSE) are offloaded too; needs ``keeps_attention``.
    """

    def __init__(self, blocks: int, tokens: int, keeps_attention: bool, attention: bool) -> None:
        self.blocks, self.pool = blocks, HostPool(tokens)
        self.keeps_attention, self.attention = keeps_attention, attention
        self.copies: Copies | None = None
        self._sources: deque[tuple[Tensor, Any]] = deque()  # of copies to the host, with events
        self._block: list[weakref.ref[HostTensor]] = []  # tensors of the latest block

    def checkpoint(
        self, number: int, block: Callable[..., Tensor], x_TD: Tensor, *rest: Any
    ) -> Tensor:
        """``block(x_TD, *rest)`` for block ``number``, from 0.

        No element of ``rest`` may be a tensor. Raises ``ValueError`` for more than ``tokens``
        tokens.
        """
        tokens = len(x_TD)
        on_device = number >= self.blocks or not tokens
        before = self._block if number else []
        own = self._block = []

        def store(tensor: Tensor) -> HostTensor:
            stored = self._store(tensor, tokens)
            own.append(weakref.ref(stored))
            return stored

        def pack(x_TD: Tensor) -> Callable[[], Tensor]:
            if not x_TD.numel():  # some versions of PyTorch save an empty tensor, on the CPU
                return lambda: x_TD
            saved = x_TD if on_device else store(x_TD)
            return lambda: self._load(saved, before)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if self.attention and not on_device:
                stored: list[list[HostTensor]] = []
                return _Store(stored, store), _Load(stored)
            return keep_attention() if self.keeps_attention else (nullcontext(), nullcontext())

        with saved_tensors_hooks(pack, lambda unpack: unpack()):
            return checkpoint(block, x_TD, *rest, use_reentrant=False, context_fn=contexts)

    def _store(self, tensor: Tensor, tokens: int) -> HostTensor:
        """Begin to copy a tensor to the host.

        The device holds at most one block's sources of copies that may still run. Before a further
        copy begins, the device waits for the oldest one.
        """
        if self.copies is None:
            cuda = tensor.device.type == "cuda"
            self.copies = StreamCopies(tensor.device) if cuda else Copies()
        self._release(keep=2 if self.attention else 0)
        stored = HostTensor(tensor, tokens, self.pool, self.copies)
        self._sources.append((tensor, stored.copied))
        return stored

    def _release(self, keep: int) -> None:
        """Wait for the copies of all sources but the latest ``keep``, and free these sources."""
        while len(self._sources) > keep:
            assert self.copies is not None
            self.copies.wait(self._sources[0][1])
            self._sources.popleft()

    def _load(self, saved: Tensor | HostTensor, before: list[weakref.ref[HostTensor]]) -> Tensor:
        """A block's input for its backward; starts to fetch the tensors of the block ``before``."""
        self._release(keep=0)
        if isinstance(saved, HostTensor):
            saved.prefetch()
        for reference in before:
            if (stored := reference()) is not None:
                stored.prefetch()
        return saved.get() if isinstance(saved, HostTensor) else saved


class _Store(TorchDispatchMode):
    """In the forward: stores the outputs of attention."""

    def __init__(
        self, stored: list[list[HostTensor]], store: Callable[[Tensor], HostTensor]
    ) -> None:
        super().__init__()
        self.stored, self.store = stored, store

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = op(*args, **(kwargs or {}))
        if op in checkpointed:
            self.stored.append([self.store(output.detach()) for output in outputs])
        return outputs


class _Load(TorchDispatchMode):
    """In the recomputation: returns the stored outputs in place of attention."""

    def __init__(self, stored: list[list[HostTensor]]) -> None:
        super().__init__()
        self.next = iter(stored)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in checkpointed:
            return tuple(output.get() for output in next(self.next))
        return op(*args, **(kwargs or {}))
