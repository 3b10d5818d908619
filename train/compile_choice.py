"""Whether the blocks of a run are compiled: ``train.compile`` with its other settings."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from train.config import Config
from train.sections.training import AUTO


def obstacle(config: Config) -> str:
    """Why blocks of ``config`` cannot be compiled, a clause that begins with a key; "" if none."""
    if config.memory.offload != "none":
        return (
            f"memory.offload={config.memory.offload} moves tensors while a block runs, which a "
            "compiled block cannot"
        )
    if config.train.attention != "ringfa3":
        return f"train.attention={config.train.attention} is not one node of a graph"
    return ""


def why_uncompiled(config: Config, cuda: bool, here: bool = True) -> str:
    """Why ``train.compile=auto`` compiles no block on a device; "" if it compiles them.

    ``here``: the job runs on this machine, whose compilers count.
    """
    if not cuda:
        return "the device is a CPU"
    if problem := obstacle(config):
        return problem
    if config.train.deterministic:
        return "train.deterministic=true: PyTorch chooses compiled kernels by timing them"
    if here and find_spec("triton") is None:
        return "the package triton is not installed"
    if here and not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))):
        return "Triton needs a C compiler, and neither CC, gcc nor clang is one"
    return ""


def compiles(config: Config, cuda: bool, here: bool = True) -> bool:
    """Whether the blocks of ``config`` are compiled; the arguments are as in ``why_uncompiled``."""
    if config.train.compile == AUTO:
        return not why_uncompiled(config, cuda, here)
    return config.train.compile == "block"
