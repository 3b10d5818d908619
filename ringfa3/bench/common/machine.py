"""The machine of a run: device, clocks, and the versions of the software."""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import ringfa3
from ringfa3.build.compile import source_folder

# Fields of nvidia-smi. Before a slash the name in recent drivers, behind it in older ones.
QUERY = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active/clocks_throttle_reasons.active",
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BenchError(Exception):
    """The run cannot start. The message is one line: why, and what to do."""


def find_device(name: str, index: int = 0) -> torch.device:
    """The host's device `index`; name: "cuda" or "cpu". Raises BenchError."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BenchError(
            "no CUDA GPU is visible; --device cpu tries the machinery on small shapes, "
            "without any figure of a kernel"
        )
    if index >= torch.cuda.device_count():
        raise BenchError(
            f"process {index} of this host has no GPU: {torch.cuda.device_count()} are visible"
        )
    found = torch.device("cuda", index)
    if torch.cuda.get_device_capability(found) != (9, 0):
        name = torch.cuda.get_device_name(found)
        raise BenchError(f"{name} is not a Hopper GPU: there are no kernels for it")
    torch.cuda.set_device(found)
    return found


def describe(device: torch.device, implementations: Iterable[object]) -> dict[str, Any]:
    """Device and versions; never raises. Unknown values are absent, None or an error text."""
    described: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "git": git_commit(Path(ringfa3.__file__).parent.parent),
        "sources": source_hash(),
    }
    if device.type == "cuda":
        described["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        described["capability"] = list(torch.cuda.get_device_capability(device))
    for implementation in implementations:
        if identity := getattr(implementation, "identity", None):
            described[str(getattr(implementation, "name", implementation))] = identity
    described["before"] = clocks(device)
    return described


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def slug(name: str) -> str:
    """A folder name: lower case, words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def clocks(device: torch.device) -> dict[str, str]:
    """Clocks, power, temperature and throttle reasons from nvidia-smi, with units."""
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    problem = ""
    for form in (0, -1):
        names = [name.split("/")[form] for name in QUERY]
        command = ["nvidia-smi", *which, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": f"nvidia-smi: {error}"}
        if done.returncode == 0:
            values = done.stdout.strip().splitlines()[0].split(", ")
            return dict(zip(names, values, strict=False))
        problem = (done.stdout + done.stderr).strip().splitlines()[0] if done.stdout else ""
    return {"error": f"nvidia-smi: {problem or 'no answer'}"}


def git_commit(root: Path) -> str | None:
    """The commit of the checkout `root`, followed by "+" if files differ; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def source_hash() -> str:
    """A hash of the package and the kernels' sources; identifies them without git."""
    digest = hashlib.sha256()
    package = Path(ringfa3.__file__).parent
    kernels = (path for path in source_folder().rglob("*") if path.is_file())
    for path in (*sorted(package.rglob("*.py")), *sorted(kernels)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
