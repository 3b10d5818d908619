"""If this fails, driver calls pass other arguments than CUDA expects. Driver calls as a library
built with CUDA's own header receives them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from ringfa3.build.toolchain import find_compiler, find_host_compiler
from ringfa3.schedules import steps
from ringfa3.symmetric import cuda_driver

RECEIVER = r"""
#include <cuda.h>

extern "C" {
unsigned long long received[8][4];
unsigned int handle_bytes = sizeof(CUipcMemHandle);

CUresult CUDAAPI cuStreamBatchMemOp_v2(
    CUstream, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags) {
  for (unsigned int i = 0; i < count; ++i) {
    bool const wait = operations[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
    bool const write = operations[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
    if (flags != 0 || !(wait || write)) return CUDA_ERROR_INVALID_VALUE;
    auto const &waits = operations[i].waitValue;
    auto const &writes = operations[i].writeValue;
    received[i][0] = wait;
    received[i][1] = wait ? waits.address : writes.address;
    received[i][2] = wait ? waits.value : writes.value;
    received[i][3] = wait ? waits.flags == CU_STREAM_WAIT_VALUE_EQ
                          : writes.flags == CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  return CUDA_SUCCESS;
}
}
"""


@pytest.mark.kernels
def test_memory_ops_have_the_layout_of_cuda_h(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, addresses, values and flags, also of a value that was changed; the size of an IPC
    handle."""
    source, library = tmp_path / "receiver.cpp", tmp_path / "receiver.so"
    source.write_text(RECEIVER)
    include = find_compiler()[0].resolve().parent.parent / "include"
    flags = ("-shared", "-fPIC", f"-I{include}")
    subprocess.run([find_host_compiler(), *flags, source, "-o", library], check=True)
    receiver = ctypes.CDLL(str(library))
    handle_bytes = ctypes.c_uint.in_dll(receiver, "handle_bytes").value
    assert ctypes.sizeof(cuda_driver.IpcHandle) == handle_bytes
    entry = receiver.cuStreamBatchMemOp_v2
    entry.argtypes = cuda_driver._ARGUMENTS["cuStreamBatchMemOp_v2"]
    monkeypatch.setattr(cuda_driver, "_entries", lambda: {"cuStreamBatchMemOp_v2": entry})
    high, most = 0x7FFF_1234_5678_9ABC, (1 << 32) - 1
    call, read = cuda_driver.batch_memory_ops(
        1, [cuda_driver.wait(high, 1), cuda_driver.write(8, 0), cuda_driver.write(4, 3)]
    )
    read[2].value = most
    cuda_driver.issue([call])
    received = (ctypes.c_uint64 * 4 * 3).in_dll(receiver, "received")
    assert [tuple(x) for x in received] == [(1, high, 1, 1), (0, 8, 0, 1), (0, 4, most, 1)]


def test_schedules_have_the_layout_of_memory_ops() -> None:
    assert ctypes.sizeof(cuda_driver.MemoryOp) == steps.OPERATION_WORDS * steps.POINTER
    assert cuda_driver.MemoryOp.value.offset == steps.VALUE * steps.POINTER
