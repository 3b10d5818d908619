"""If this fails, `python -m ringfa3.doctor` overlooks what is missing, or names a wrong remedy.
Every check of the doctor, passed and failed, on stand-ins for the machine."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringfa3 import doctor
from ringfa3.build import toolchain
from ringfa3.build.compile import default_jobs, ensure_library
from ringfa3.build.units import UNITS
from ringfa3.doctor import Check
from tests.support import fake_tools


@pytest.fixture
def hopper(tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a fault: two H200, a compiler, every unit built."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5)))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor, "driver_cuda", lambda: 13010)
    monkeypatch.setattr(doctor, "free_memory", lambda: 64 << 30)
    monkeypatch.setattr("ringfa3.build.compile.free_memory", lambda: 64 << 30)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    gpus(monkeypatch, (9, 0), (9, 0))
    answer = 'echo "release, V13.4.92"'
    fake_tools.script(tools / "bin/cuobjdump", answer)
    for unit in UNITS:
        ensure_library(unit)
    (tools / "host" / "ninja").unlink(missing_ok=True)
    fake_tools.script(tools / "host" / "ninja", "echo 1.99")
    return tools


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    names = {(9, 0): "NVIDIA H200", (8, 0): "NVIDIA A100"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[capabilities[i]])


def checks() -> dict[str, Check]:
    return {check.name: check for check in doctor.check_machine()[0]}


def verdict() -> tuple[bool, bool]:
    """(can build, can run)"""
    return doctor.check_machine()[1:]


def test_a_good_machine(hopper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    assert ended.value.code == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "This machine can build: yes; run the kernels: yes."
    assert all(line.startswith("ok ") for line in lines)
    text = {name: check.text for name, check in checks().items()}
    number, user = len(UNITS), pwd.getpwuid(os.getuid()).pw_name
    assert text["python"].startswith(sys.version.split()[0])
    assert text["torch"] == f"{torch.__version__}, CUDA 13.0"
    assert text["gpu"] == "2 x NVIDIA H200 (9.0)"
    assert text["driver"] == "for CUDA 13.1"
    assert text["nccl"] == "2.27.5"
    assert text["queues"] == "CUDA_DEVICE_MAX_CONNECTIONS is not set"
    assert text["nvcc"] == f"V13.2.5, {hopper}/bin/nvcc"
    assert text["c++"] == "g++"
    assert text["ninja"] == f"1.99, {hopper}/host/ninja"
    assert text["cutlass"] == f"unknown, {hopper}/include"
    assert text["memory"].startswith("64 GiB free, ")
    assert text["memory"].endswith(f" -j {default_jobs()}")
    assert text["cache"].startswith(f"{hopper}/cache, of {user}, mode 0700, ")
    assert text["units"] == f"{number} of {number} built"  # one line, without their names


def test_torch_without_cuda_can_build_and_not_run(
    hopper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor does not ask PyTorch's CPU build about GPUs."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delattr(torch.cuda, "is_available")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    found = checks()
    assert found["torch"].state == found["gpu"].state == "missing"
    assert found["torch"].text == f"{torch.__version__}, without CUDA"
    assert found["gpu"].text == "PyTorch finds none"
    assert found["nccl"].state == "warning"
    assert verdict() == (True, False)


def test_a_hidden_gpu(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks()["gpu"].state == "missing"
    assert "CUDA_VISIBLE_DEVICES" in checks()["gpu"].remedy
    assert verdict() == (True, False)


@pytest.mark.parametrize(
    ("capabilities", "state", "text"),
    [
        ([(8, 0)], "missing", "1 x NVIDIA A100 (8.0)"),
        ([(9, 0), (8, 0), (9, 0)], "warning", "2 x NVIDIA H200 (9.0), 1 x NVIDIA A100 (8.0)"),
    ],
)
def test_other_gpus(
    hopper: Path,
    monkeypatch: pytest.MonkeyPatch,
    capabilities: list[tuple[int, int]],
    state: str,
    text: str,
) -> None:
    gpus(monkeypatch, *capabilities)
    check = checks()["gpu"]
    assert (check.state, check.text) == (state, text)
    assert "compute capability 9.0" in check.remedy
    assert verdict() == (True, state != "missing")


@pytest.mark.parametrize(("version", "text"), [(12080, "for CUDA 12.8"), (None, "no libcuda.so.1")])
def test_an_old_or_missing_driver(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, version: int | None, text: str
) -> None:
    monkeypatch.setattr(doctor, "driver_cuda", lambda: version)
    check = checks()["driver"]
    assert (check.state, check.text) == ("missing", text)
    assert "driver 580 or later" in check.remedy
    assert verdict() == (True, False)


def test_the_version_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(version: ctypes.c_int) -> int:
        version._obj.value = 13020
        return 0

    def load(name: str) -> SimpleNamespace:
        assert name == "libcuda.so.1"
        return SimpleNamespace(cuDriverGetVersion=answer)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert doctor.driver_cuda() == 13020

    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=lambda version: 100)
    )
    assert doctor.driver_cuda() is None  # the call failed

    def fail(name: str) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert doctor.driver_cuda() is None


def test_one_queue_is_a_warning(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run, and rings run over NCCL."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert checks()["queues"].state == "warning"
    assert checks()["queues"].remedy.startswith("unset it")
    assert verdict() == (True, True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert checks()["queues"] == Check("queues", "CUDA_DEVICE_MAX_CONNECTIONS = 8")


def test_a_file_in_place_of_the_cache_blocks_builds(
    hopper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setenv("RINGFA3_CACHE", str(path))
    check = checks()["cache"]
    assert (check.state, check.remedy) == ("missing", "set RINGFA3_CACHE to a folder of yours")
    assert check.text.startswith(str(path))
    assert check.text.endswith("File exists")
    assert verdict()[0] is False


def test_an_old_nvcc_blocks_builds_but_not_built_units(hopper: Path) -> None:
    fake_tools.nvcc(hopper, "12.8.93")
    check = checks()["nvcc"]
    assert check.state == "missing"
    assert check.text.endswith(f"found {hopper}/bin/nvcc (V12.8.93)")
    assert check.remedy == "pip install 'ringfa3[build]', or set CUDA_HOME to a toolkit that has it"
    assert verdict() == (False, True)


def test_a_missing_cplusplus_compiler_blocks_builds(hopper: Path) -> None:
    (hopper / "host/g++").unlink()
    assert checks()["c++"].state == "missing"
    assert "apt-get install g++" in checks()["c++"].remedy
    assert verdict() == (False, True)


def test_a_missing_ninja_blocks_builds(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hopper / "host/ninja").unlink()
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")
    check = checks()["ninja"]
    assert (check.state, check.text) == ("missing", "ninja not found")
    assert check.remedy == "pip install 'ringfa3[build]', or pip install ninja"
    assert verdict() == (False, True)


def test_a_missing_cuobjdump_is_a_warning(hopper: Path) -> None:
    (hopper / "bin/cuobjdump").unlink()
    toolchain.find_program.cache_clear()
    assert checks()["cuobjdump"].state == "warning"
    assert verdict() == (True, True)


def test_cutlass_headers(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong CUTLASS_PATH; no headers, and pip can fetch them; no headers and no pip."""
    monkeypatch.setenv("CUTLASS_PATH", "/nowhere")
    assert checks()["cutlass"].state == "missing"
    assert checks()["cutlass"].text.startswith("CUTLASS_PATH=/nowhere has no include")
    assert verdict() == (False, True)
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(doctor, "find_include_folder", lambda: None)
    monkeypatch.setattr(doctor, "pip_is_installed", lambda: True)
    assert checks()["cutlass"].state == "warning"
    assert "python -m ringfa3.build --headers" in checks()["cutlass"].remedy
    assert verdict() == (True, True)
    monkeypatch.setattr(doctor, "pip_is_installed", lambda: False)
    assert checks()["cutlass"].state == "missing"
    assert "CUTLASS_PATH" in checks()["cutlass"].remedy
    assert verdict() == (False, True)


def test_after_a_check_setuptools_is_imported_as_before() -> None:
    """It replaces distutils before Python 3.12, unless a module `pip` has been looked for."""
    code = "from ringfa3 import doctor; doctor.cutlass(); import setuptools"
    environment = {**os.environ, "RINGFA3_CACHE": "/nowhere"}  # without headers
    environment.pop("CUTLASS_PATH", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_little_memory_and_a_wrong_max_jobs(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 5 << 30)
    assert checks()["memory"].state == "warning"
    assert verdict() == (True, True)
    monkeypatch.setenv("MAX_JOBS", "many")
    assert checks()["memory"].state == "missing"
    assert verdict() == (False, True)


def test_a_cache_that_others_can_write(hopper: Path) -> None:
    (hopper / "cache").chmod(0o777)
    found = checks()
    assert found["cache"].state == "missing"
    assert ", mode 0777, " in found["cache"].text
    assert found["cache"].remedy == "chmod 700 it, or set RINGFA3_CACHE"
    assert verdict() == (False, False)


def test_a_missing_cache(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor does not create it."""
    monkeypatch.setenv("RINGFA3_CACHE", str(hopper / "a/b"))
    found = checks()
    assert found["cache"].state == "ok"
    assert found["cache"].text.startswith(f"{hopper}/a/b, not made yet, ")
    assert not (hopper / "a").exists()
    assert found["units"].state == "warning"
    assert found["units"].text == f"0 of {len(UNITS)} built"
    assert verdict() == (True, True)


def test_a_user_without_a_home_directory(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("RINGFA3_CACHE")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    check = doctor.folder()
    assert check.state == "missing"
    assert check.text == "~/.cache/ringfa3/kernels needs HOME, which is not set"
    assert check.remedy == "set RINGFA3_CACHE"


@pytest.mark.parametrize("made", [True, False])
def test_a_read_only_cache(hopper: Path, monkeypatch: pytest.MonkeyPatch, made: bool) -> None:
    """Units in it still run."""
    if not made:
        monkeypatch.setenv("RINGFA3_CACHE", str(hopper / "a"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert checks()["cache"].state == "missing"
    assert checks()["cache"].text.endswith("not writable")
    assert verdict() == (False, made)


def test_a_full_disk(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20 << 20))
    assert checks()["cache"].state == "missing"
    assert checks()["cache"].remedy.startswith("make room")
    assert verdict() == (False, True)


def test_units_without_a_compiler(hopper: Path) -> None:
    """One that the cache has runs; without any, none does."""
    (hopper / "bin/nvcc").unlink()
    toolchain.find_program.cache_clear()
    first, *rest = UNITS
    for unit in rest:
        shutil.rmtree(ensure_library(unit).parent)
    check = checks()["units"]
    assert (check.state, check.text) == (
        "warning",
        f"1 of {len(UNITS)} built: {first.name}",
    )
    assert verdict() == (False, True)
    shutil.rmtree(ensure_library(first).parent)
    assert checks()["units"].state == "missing"
    assert verdict() == (False, False)


def test_the_program_on_this_machine(tools: Path) -> None:
    """The program prints a line for each check, remedies, a last sentence; without GPUs."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ringfa3.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == "This machine can build: yes; run the kernels: no."
    states = [line.split()[0] for line in lines[:-1]]
    assert set(states) == {"ok", "warning", "missing", "->"}
    assert states.count("->") == states.count("warning") + states.count("missing")
