"""Runs attention's host path on the CPU, with kernels and a driver that only keep what they are
given (fake_kernels.cpp)."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ringfa3.build.compile import source_folder
from ringfa3.build.toolchain import find_host_compiler
from ringfa3.build.units import Unit
from ringfa3.kernels import dispatch, launch, streams, uploads

SMS = 132


class Launched(NamedTuple):
    """A launch: its name, its arguments with every address in place, its stream."""

    name: str
    words: bytes
    stream: int


def compile_kernels(folder: Path) -> Path:
    made = folder / "fake_kernels.so"
    source = Path(__file__).with_suffix(".cpp")
    command = [find_host_compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]
    subprocess.run([*command, f"-I{source_folder()}", source, "-o", made], check=True)
    return made


class FakeKernels:
    """The library, and what tests set and read of it. `stands_in` makes attention use it."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fake_name.restype = ctypes.c_char_p
        self.library.fake_words.restype = ctypes.c_void_p
        self.library.fake_stream_of.restype = ctypes.c_int64
        self.library.fake_stream.argtypes = (ctypes.c_int64, ctypes.c_int64)
        self.library.fake_stream_id.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def driver(self) -> list[int]:
        """Addresses for `host.start`."""
        found = []
        for name in ("current_stream", "current_context", "is_capturing", "stream_id"):
            address = ctypes.cast(getattr(self.library, f"fake_{name}"), ctypes.c_void_p).value
            assert address is not None
            found.append(address)
        return found

    def use(self, stream: int = 7, generation: int = 0) -> None:
        """Makes a stream the current one of this thread; its id depends on both numbers."""
        self.library.fake_stream(stream, generation)

    def reset(self) -> None:
        """No launch, no failure, no capture; the first stream."""
        self.take()
        self.use()
        for what in ("fail", "capture", "without_context", "idle"):
            self.library[f"fake_{what}"](0)

    def take(self) -> list[Launched]:
        """The launches since the last call."""
        lib = self.library
        found = [
            Launched(
                lib.fake_name(i).decode(),
                ctypes.string_at(lib.fake_words(i), lib.fake_bytes(i)),
                lib.fake_stream_of(i),
            )
            for i in range(lib.fake_calls())
        ]
        lib.fake_forget()
        return found

    def _handle(self, _device: int | None) -> int:
        found = ctypes.c_void_p()
        self.library.fake_current_stream(0, ctypes.byref(found))
        return found.value or 0

    def _stream_id(self, handle: int) -> int:
        number = ctypes.c_uint64()
        self.library.fake_stream_id(handle, ctypes.byref(number))
        return number.value

    def _captured(self) -> bool:
        status = ctypes.c_int()
        self.library.fake_is_capturing(None, ctypes.byref(status))
        return bool(status.value)

    @contextmanager
    def stands_in(self) -> Iterator[None]:
        """Attention of CPU tensors of 16 bits launches these kernels."""

        @cache
        def entry(unit: Unit, name: str) -> object:
            function = self.library[f"ringfa3_{name}_{unit.head_dim}"]
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            return function

        def unit_for(
            direction: str, q: torch.Tensor, precision: str = "native", v_dim: int | None = None
        ) -> Unit | None:
            dtype = str(q.dtype).removeprefix("torch.")
            return dispatch.narrowest_unit(direction, dtype, q.shape[-1], precision, v_dim)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_entry", entry)
            patch.setattr(launch, "_num_sms", lambda _: SMS)
            patch.setattr(dispatch, "unit_for", unit_for)
            patch.setattr(dispatch, "_build_problem", lambda _: None)
            patch.setattr(streams, "_handle", self._handle)
            patch.setattr(streams, "_stream_id", self._stream_id)
            patch.setattr(uploads, "record_event", lambda _: None)
            patch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
            patch.setattr(torch.cuda, "is_current_stream_capturing", self._captured)
            yield
