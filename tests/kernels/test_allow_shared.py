"""If this fails, kernels do not start on the second GPU of a process. Every kernel may use its
dynamic shared memory on every device of a process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from ringfa3.build.compile import source_folder
from tests.support.both_hosts import in_threads

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BYTES = 200 * 1024
DEVICES = 64  # beyond, the runtime is asked at every launch


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    (tmp_path / "cuda_runtime.h").touch()  # the source has what the header needs of it
    made = tmp_path / "allow_shared.so"
    options = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")
    of_kernels = "-fno-gnu-unique"  # else two of these libraries would share their flags
    source = Path(__file__).with_name("allow_shared.cpp")
    folders = (f"-I{tmp_path}", f"-I{source_folder()}")
    subprocess.run(["g++", *options, of_kernels, *folders, source, "-o", made], check=True)
    return ctypes.CDLL(str(made))


def test_the_runtime_is_asked_for_each_kernel_and_device(library: ctypes.CDLL) -> None:
    """Once for each, by kernels of one type, on devices in any order; after a refusal again."""
    library.fake_refuse(1)
    assert library.fake_allow(0, 0, BYTES) != 0
    library.fake_refuse(0)
    for device in (0, 1, 0, 63, 1):
        for kernel in (0, 1, 0):
            assert library.fake_allow(kernel, device, BYTES) == 0
    asked = [[library.fake_asked(kernel, x) for x in (0, 1, 2, 63)] for kernel in (0, 1)]
    assert asked == [[2, 1, 0, 1], [1, 1, 0, 1]]
    for _ in range(2):
        assert library.fake_allow(1, DEVICES, BYTES) == 0
    assert library.fake_asked(1, DEVICES) == 2


def test_threads_with_devices_of_their_own_ask_at_once(library: ctypes.CDLL) -> None:
    def work(number: int) -> None:
        for device in range(DEVICES):
            for kernel in (0, 1):
                library.fake_allow(kernel, (device + number) % DEVICES, BYTES)

    in_threads(work, 8)
    assert all(library.fake_asked(k, x) >= 1 for k in (0, 1) for x in range(DEVICES))
