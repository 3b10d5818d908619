"""Checks whether this machine can build the kernels and run them; a problem comes with a remedy.

``python -m ringfa3.doctor`` changes nothing and downloads nothing. Exit code 0 if kernels can run.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringfa3.build.cache import cache_folder, cache_path
from ringfa3.build.compile import JOB_BYTES, default_jobs, find_library, free_memory
from ringfa3.build.cutlass import REMEDY, cutlass_version, find_include_folder, pip_is_installed
from ringfa3.build.toolchain import find_host_compiler, find_ninja, find_program
from ringfa3.build.units import UNITS, Unit
from ringfa3.errors import BuildError

CAPABILITY = (9, 0)  # sm_90a code runs on no other
MIN_DRIVER = 13000  # CUDA version: the libraries contain the runtime of CUDA 13
MIN_DISK = 100 << 20  # bytes that a build may take


class Check(NamedTuple):
    """The result of one check.

    name    the first column of the report
    text    what the machine has
    remedy  what to do; empty if nothing is wrong
    blocks  what the machine cannot do as it is: "build", "run", both, or nothing, for a warning
    """

    name: str
    text: str
    remedy: str = ""
    blocks: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        return "ok" if not self.remedy else "missing" if self.blocks else "warning"


def python() -> Check:
    return Check("python", f"{sys.version.split()[0]}, {sys.executable}")


def pytorch() -> Check:
    if torch.version.cuda is None:
        remedy = "install PyTorch's CUDA build (pytorch.org/get-started)"
        return Check("torch", f"{torch.__version__}, without CUDA", remedy, ("run",))
    return Check("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")


def gpus() -> Check:
    needed = "the kernels need compute capability 9.0 (H100, H200, GH200)"
    if torch.version.cuda is None or not torch.cuda.is_available():
        remedy = f"{needed}; see nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return Check("gpu", "PyTorch finds none", remedy, ("run",))
    devices = [
        (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]
    text = ", ".join(
        f"{n} x {name} ({'.'.join(map(str, capability))})"
        for (name, capability), n in Counter(devices).items()
    )
    fit = sum(capability == CAPABILITY for _, capability in devices)
    if fit == len(devices):
        return Check("gpu", text)
    remedy = f"{needed}; on other GPUs attention uses the PyTorch fallback (exact, slow)"
    return Check("gpu", text, remedy, () if fit else ("run",))


def driver() -> Check:
    version = driver_cuda()
    needed = "the kernels need driver 580 or later (CUDA 13)"
    if version is None:
        return Check("driver", "no libcuda.so.1", f"{needed}: install it", ("run",))
    text = f"for CUDA {version // 1000}.{version % 1000 // 10}"
    if version < MIN_DRIVER:
        return Check("driver", text, f"{needed}: update it", ("run",))
    return Check("driver", text)


def driver_cuda() -> int | None:
    """The newest CUDA version that the driver supports, 13010 for 13.1; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else version.value


def nvcc() -> Check:
    try:
        path, version = find_program("nvcc")
    except BuildError as error:
        return _failed("nvcc", error, "build")
    return Check("nvcc", f"{version}, {path}")


def cplusplus() -> Check:
    try:
        return Check("c++", find_host_compiler())
    except BuildError as error:
        return _failed("c++", error, "build")


def ninja() -> Check:
    try:
        path = find_ninja()
    except BuildError as error:
        return _failed("ninja", error, "build")
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Check("ninja", f"{answer.stdout.strip() or 'unknown version'}, {path}")


def cuobjdump() -> Check:
    """Only `python -m ringfa3.build --check` needs it."""
    try:
        path, version = find_program("cuobjdump")
    except BuildError as error:
        return _failed("cuobjdump", error)
    return Check("cuobjdump", f"{version}, {path}")


def cutlass() -> Check:
    try:
        include = find_include_folder()
    except BuildError as error:
        return _failed("cutlass", error, "build")
    if include:
        return Check("cutlass", f"{cutlass_version(include)}, {include}")
    if pip_is_installed():
        remedy = "the first build fetches them, about 6 MB; python -m ringfa3.build --headers now"
        return Check("cutlass", "no headers here", remedy)
    return Check("cutlass", "no headers here, and no pip to fetch them", REMEDY, ("build",))


def folder() -> Check:
    """The cache's folder: owner, mode, free space. `units` checks what lies in it."""
    try:
        path, remedy = cache_path(), "set RINGFA3_CACHE to a folder of yours"
    except BuildError as error:
        return _failed("cache", error, "build")
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    space = f"{free / 2**30:.1f} GiB free"
    if existing == path:
        status = path.stat()
        text = f"{path}, of {_user(status.st_uid)}, mode {status.st_mode & 0o777:04o}, {space}"
        try:
            cache_folder()
        except BuildError as error:
            return Check("cache", text, str(error).partition(": ")[2], ("build",))
        except OSError as error:
            return Check("cache", f"{text}: {error.strerror}", remedy, ("build",))
    else:
        text = f"{path}, not made yet, {space}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check("cache", f"{text}, not writable", remedy, ("build",))
    if free < MIN_DISK:
        return Check("cache", text, f"make room, or {remedy}", ("build",))
    return Check("cache", text)


def units(can_build: bool) -> Check:
    """Which libraries the wheel and the cache have. Without a compiler the others are missing."""
    built = [u.name for u in UNITS if _is_built(u)]
    text = f"{len(built)} of {len(UNITS)} built"
    if len(built) == len(UNITS):
        return Check("units", text)
    text += f": {', '.join(built)}" if built else ""
    if can_build:
        return Check("units", text, "python -m ringfa3.build, or the first use builds one")
    remedy = (
        "build them here (see above), or install a wheel that has them "
        "(python -m ringfa3.build --wheel), or copy the cache of a machine that has built them"
    )
    return Check("units", text, remedy, () if built else ("run",))


def _is_built(unit: Unit) -> bool:
    try:
        return find_library(unit) is not None
    except (BuildError, OSError):  # of the cache's folder, which `folder` reports
        return False


def nccl() -> Check:
    if not dist.is_available() or not dist.is_nccl_available():
        remedy = "a ring over GPUs needs it: install PyTorch's CUDA build"
        return Check("nccl", "not in this PyTorch", remedy)
    return Check("nccl", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]


def connections() -> Check:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value == "1":
        remedy = "unset it: with one queue a ring cannot use `symmetric`, and runs over NCCL"
        return Check("queues", f"{name}=1", remedy)
    return Check("queues", f"{name} {'is not set' if value is None else f'= {value}'}")


def memory() -> Check:
    free = free_memory()
    text = f"{free / 2**30:.0f} GiB free, {len(os.sched_getaffinity(0))} cores"
    try:
        text += f": -j {default_jobs()}"
    except BuildError as error:
        return _failed("memory", error, "build")
    if free < JOB_BYTES:
        return Check("memory", text, f"a compile may take {JOB_BYTES >> 30} GiB: free some")
    return Check("memory", text)


def _failed(name: str, error: BuildError, *blocks: str) -> Check:
    """The check that raised `error`, whose text ends with the remedy."""
    text, _, remedy = str(error).rpartition(": ")
    return Check(name, text, remedy, blocks)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container may have no name for it
        return f"user {uid}"


CHECKS: tuple[Callable[[], Check], ...] = (
    python,
    pytorch,
    gpus,
    driver,
    nccl,
    connections,
    nvcc,
    cplusplus,
    ninja,
    cuobjdump,
    cutlass,
    memory,
    folder,
)


def check_machine() -> tuple[list[Check], bool, bool]:
    """(all checks, whether this machine can build, whether it can run the kernels)."""
    checks = [check() for check in CHECKS]
    can_build = not any("build" in check.blocks for check in checks)
    checks.append(units(can_build))
    return checks, can_build, not any("run" in check.blocks for check in checks)


def main() -> None:
    checks, can_build, can_run = check_machine()
    for check in checks:
        print(f"{check.state:<9}{check.name:<11}{check.text}")
        if check.remedy:
            print(f"{'':<20}-> {check.remedy}")
    answer = {True: "yes", False: "no"}
    print(f"This machine can build: {answer[can_build]}; run the kernels: {answer[can_run]}.")
    sys.exit(0 if can_run else 1)


if __name__ == "__main__":
    main()
