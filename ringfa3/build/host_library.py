"""Compiles the C++ launcher, which starts calls on a GPU (csrc/host).

It is C++ against PyTorch's headers, whose ABI is that of one build: the name of its entry in the
cache holds the architecture, the C library, the build of PyTorch and the version of Python.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sysconfig
from pathlib import Path

from ringfa3.build.cache import cache_folder, log_line, make_once
from ringfa3.build.compile import source_folder
from ringfa3.build.ninja import Edge, run_edges
from ringfa3.build.toolchain import find_host_compiler
from ringfa3.errors import BuildError

MODULE = "ringfa3_host"
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
COMPILE_SECONDS = 20  # on two cores, about


def host_folder() -> Path:
    """The folder of its sources."""
    return source_folder() / "host"


def _stem() -> str:
    """The first part of the entry's name: machine, C library, sources, flags, PyTorch, Python."""
    import torch

    host = platform.machine(), *platform.libc_ver()  # a home may serve several
    python = sysconfig.get_config_var("SOABI")
    against = torch.__version__, torch.version.git_version, python
    given = hashlib.sha256(repr((FLAGS, host, against)).encode())
    for path in sorted(host_folder().iterdir()):
        given.update(path.name.encode() + path.read_bytes())
    return f"host-{given.hexdigest()[:16]}"


def find_host_library() -> Path | None:
    """The library for this PyTorch and Python, if the cache has it."""
    return next(iter(sorted(cache_folder().glob(f"{_stem()}-*/{MODULE}.so"))), None)


def ensure_host_library() -> Path:
    """The compiled library, built first if the cache does not have it.

    Raises BuildError: no compiler, no headers of Python, or the compiler's own error. OSError: of
    the cache's folder.
    """
    if found := find_host_library():
        return found
    named = Path(find_host_compiler())
    compiler = str(named / "g++" if named.is_dir() else named)
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise BuildError(
            f"{headers / 'Python.h'} not found: install Python's headers, for "
            "example by apt-get install python3-dev"
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    tools = hashlib.sha256(version.stdout.encode()).hexdigest()[:8]
    return make_once(
        "host-library",
        f"{_stem()}-{tools}",
        find_host_library,
        lambda entry: _compile(compiler, headers, entry),
    )


def _compile(compiler: str, headers: Path, entry: Path) -> None:
    import torch

    log_line(
        f"compiling the C++ launcher for PyTorch {torch.__version__}, about {COMPILE_SECONDS} s"
    )
    library = entry / f"{MODULE}.so"
    root = Path(torch.__file__).parent
    folders = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include", headers)
    options = (*FLAGS, f"-I{source_folder()}", *(f"-isystem{folder}" for folder in folders))
    command: list[str | Path] = [
        compiler,
        *options,
        "-shared",
        host_folder() / "module.cpp",
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
        *("-MMD", "-MF", f"{library}.d"),
        "-o",
        library,
    ]
    edge = Edge("the C++ launcher", command, host_folder() / "module.cpp", library, entry.parent)

    def finish(edge: Edge) -> None:
        edge.errors()
        log_line(f"compiled the C++ launcher in {edge.seconds:.0f} s")

    run_edges([edge], 1, finish)
