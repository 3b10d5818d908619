"""Installs wheels as users do, and runs programs there without any compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import torch


def install(wheel: Path, folder: Path) -> Path:
    """Makes an environment with the wheel over the packages of this one; its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    subprocess.run([*pip, "--no-compile", wheel], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "below.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def run_without_compilers(python: Path, program: str, cache: Path) -> tuple[str, str]:
    """What a program prints to stdout and stderr: nothing on PATH, an empty cache."""
    gone = ("PYTHONPATH", "CUDA_HOME", "CUTLASS_PATH", "NVCC_CCBIN", "RINGFA3_HOST")
    environment = {k: v for k, v in os.environ.items() if k not in gone}
    environment |= {"PATH": str(cache.parent / "no-programs"), "RINGFA3_CACHE": str(cache)}
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=False, env=environment,
        cwd=cache.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr
