"""Whether the blocks of a run are compiled: ``train.compile`` with its other settings."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from train.config import Config
from train.sections.training import AUTO


def obstacle(config: Config) -> tuple[str, str]:
    """Why the settings of ``config`` exclude compiled blocks, and the setting that does not.

    The first is a clause that begins with a key; both are empty if blocks can be compiled.
    """
    offload, attention = config.memory.offload, config.train.attention
    if offload != "none":
        clause = "moves tensors while a block runs, which a compiled block cannot"
        return f"memory.offload={offload} {clause}", "memory.offload=none"
    if attention != "ringfa3":
        return f"train.attention={attention} is not one node of a graph", "train.attention=ringfa3"
    if config.train.deterministic:
        clause = "excludes compiled kernels, which PyTorch chooses by timing them"
        return f"train.deterministic=true {clause}", "train.deterministic=false"
    return "", ""


def why_uncompiled(config: Config, cuda: bool, here: bool = True) -> str:
    """Why ``train.compile=auto`` compiles no block on a device; "" if it compiles them.

    ``here``: the job runs on this machine, whose compilers count.
    """
    if not cuda:
        return "the device is a CPU"
    problem, _ = obstacle(config)
    if problem:
        return problem
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
