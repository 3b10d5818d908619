"""Whether this machine can build the kernels and run them: each finding with its remedy.

``python -m ringfa3.doctor`` changes nothing and fetches nothing. Exit code 0 if kernels can run.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringfa3.build.cache import cache_folder, cache_path
from ringfa3.build.compile import JOB_BYTES, default_jobs, find_library, free_memory
from ringfa3.build.cutlass import REMEDY, cutlass_version, find_include_folder
from ringfa3.build.toolchain import find_host_compiler, find_program
from ringfa3.build.units import UNITS
from ringfa3.errors import BuildError

CAPABILITY = (9, 0)  # the kernels are sm_90a code, which runs on nothing else
DRIVER = 13000  # CUDA that the driver must know: the libraries carry the runtime of CUDA 13
ROOM = 100 << 20  # bytes on the disk that a build may take


class Finding(NamedTuple):
    """What was found. No remedy: it is as it should be.

    stops   what cannot be done as it is: "build", "run", both, or nothing, which is a warning
    """

    name: str
    text: str
    remedy: str = ""
    stops: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        return "ok" if not self.remedy else "missing" if self.stops else "warning"


def python() -> Finding:
    return Finding("python", f"{sys.version.split()[0]}, {sys.executable}")


def pytorch() -> Finding:
    if torch.version.cuda is None:
        remedy = "install PyTorch's CUDA build (pytorch.org/get-started)"
        return Finding("torch", f"{torch.__version__}, without CUDA", remedy, ("run",))
    return Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")


def gpus() -> Finding:
    needed = "the kernels need compute capability 9.0 (H100, H200, GH200)"
    if torch.version.cuda is None or not torch.cuda.is_available():
        remedy = f"{needed}; see nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return Finding("gpu", "PyTorch sees none", remedy, ("run",))
    found = [
        (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]
    text = ", ".join(
        f"{n} x {name} ({'.'.join(map(str, capability))})"
        for (name, capability), n in Counter(found).items()
    )
    fit = sum(capability == CAPABILITY for _, capability in found)
    if fit == len(found):
        return Finding("gpu", text)
    remedy = f"{needed}; on others attention runs on the executor"
    return Finding("gpu", text, remedy, () if fit else ("run",))


def driver() -> Finding:
    version = driver_cuda()
    needed = "the kernels need driver 580 or later (CUDA 13)"
    if version is None:
        return Finding("driver", "no libcuda.so.1", f"{needed}: install it", ("run",))
    text = f"for CUDA {version // 1000}.{version % 1000 // 10}"
    if version < DRIVER:
        return Finding("driver", text, f"{needed}: update it", ("run",))
    return Finding("driver", text)


def driver_cuda() -> int | None:
    """The CUDA version of the driver, 13010 for 13.1; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else version.value


def nvcc() -> Finding:
    try:
        path, version = find_program("nvcc")
    except BuildError as error:
        return _told("nvcc", error, "build")
    return Finding("nvcc", f"{version}, {path}")


def cplusplus() -> Finding:
    try:
        return Finding("c++", find_host_compiler())
    except BuildError as error:
        return _told("c++", error, "build")


def cuobjdump() -> Finding:
    """Only `python -m ringfa3.build --check` needs it."""
    try:
        path, version = find_program("cuobjdump")
    except BuildError as error:
        return _told("cuobjdump", error)
    return Finding("cuobjdump", f"{version}, {path}")


def cutlass() -> Finding:
    try:
        include = find_include_folder()
    except BuildError as error:
        return _told("cutlass", error, "build")
    if include:
        return Finding("cutlass", f"{cutlass_version(include)}, {include}")
    if importlib.util.find_spec("pip"):
        remedy = "the first build fetches them, about 6 MB; python -m ringfa3.build --headers now"
        return Finding("cutlass", "no headers here", remedy)
    return Finding("cutlass", "no headers here, and no pip to fetch them", REMEDY, ("build",))


def folder() -> Finding:
    """The cache: whose it is, who may write, how much room it has. `units` says what can run."""
    path = cache_path()
    place = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(place).free
    room = f"{free / 2**30:.1f} GiB free"
    if place == path:
        status = path.stat()
        text = f"{path}, of {_user(status.st_uid)}, mode {status.st_mode & 0o777:04o}, {room}"
        try:
            cache_folder()
        except BuildError as error:
            return Finding("cache", text, str(error).partition(": ")[2], ("build",))
    else:
        text = f"{path}, not made yet, {room}"
    remedy = "set RINGFA3_CACHE to a folder of yours"
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("cache", f"{text}, not writable", remedy, ("build",))
    if free < ROOM:
        return Finding("cache", text, f"make room, or {remedy}", ("build",))
    return Finding("cache", text)


def units(can_build: bool) -> Finding:
    """Which libraries are there. Without a compiler the rest cannot be had."""
    try:
        there = [u.name for u in UNITS if cache_path().is_dir() and find_library(u)]
    except (BuildError, OSError):
        there = []
    text = f"{len(there)} of {len(UNITS)} built" + (f": {', '.join(there)}" if there else "")
    if len(there) == len(UNITS):
        return Finding("units", text)
    if can_build:
        return Finding("units", text, "python -m ringfa3.build, or the first use builds one")
    remedy = "build them here (see above), or copy the cache of a machine that has built them"
    return Finding("units", text, remedy, () if there else ("run",))


def nccl() -> Finding:
    if not dist.is_available() or not dist.is_nccl_available():
        remedy = "a ring over GPUs needs it: install PyTorch's CUDA build"
        return Finding("nccl", "not in this PyTorch", remedy)
    return Finding("nccl", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]


def connections() -> Finding:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value == "1":
        remedy = "unset it: with one queue the transfers of a ring wait for its kernels"
        return Finding("queues", f"{name}=1", remedy, ("run",))
    return Finding("queues", f"{name} {'is not set' if value is None else f'= {value}'}")


def memory() -> Finding:
    free = free_memory()
    text = f"{free / 2**30:.0f} GiB free, {len(os.sched_getaffinity(0))} cores"
    try:
        text += f": -j {default_jobs()}"
    except BuildError as error:
        return _told("memory", error, "build")
    if free < JOB_BYTES:
        return Finding("memory", text, f"a compile may take {JOB_BYTES >> 30} GiB: free some")
    return Finding("memory", text)


def _told(name: str, error: BuildError, *stops: str) -> Finding:
    text, _, remedy = str(error).rpartition(": ")
    return Finding(name, text, remedy, stops)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container without a name for it
        return f"user {uid}"


LOOK: tuple[Callable[[], Finding], ...] = (
    python,
    pytorch,
    gpus,
    driver,
    nccl,
    connections,
    nvcc,
    cplusplus,
    cuobjdump,
    cutlass,
    memory,
    folder,
)


def survey() -> tuple[list[Finding], bool, bool]:
    """(all findings, whether this machine can build, whether it can run the kernels)."""
    findings = [look() for look in LOOK]
    can_build = not any("build" in f.stops for f in findings)
    findings.append(units(can_build))
    return findings, can_build, not any("run" in f.stops for f in findings)


def main() -> None:
    findings, can_build, can_run = survey()
    for finding in findings:
        print(f"{finding.state:<9}{finding.name:<11}{finding.text}")
        if finding.remedy:
            print(f"{'':<20}-> {finding.remedy}")
    said = {True: "yes", False: "no"}
    print(f"This machine can build: {said[can_build]}; run the kernels: {said[can_run]}.")
    sys.exit(0 if can_run else 1)


if __name__ == "__main__":
    main()
