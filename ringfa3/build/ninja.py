"""Runs compilers by ninja: one edge for each library, so many at once."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ringfa3.build.cache import BEGAN, NOTICE, log_line, working_folder
from ringfa3.build.toolchain import find_ninja
from ringfa3.errors import BuildError

RULE = """ninja_required_version = 1.5
rule compile
  command = $run
  description = $out_name
"""
LAST_LINES = 20  # of what a program printed, in an error
AGAIN = 2  # seconds from a signal that stops the compilers to the next one
EDGE = """build {library}: compile {source}
  run = {run}
  out_name = {name}
"""


class Edge(NamedTuple):
    """One compile.

    name      of what it makes, in the lines of ninja and of errors
    command   of the compiler, which writes `library` and the depfile `library`.d
    source    the file that it compiles
    folder    for temporary files, which a killed compiler leaves, and what the compiler prints
    """

    name: str
    command: Sequence[str | Path]
    source: Path
    library: Path
    folder: Path

    @property
    def dependencies(self) -> list[Path]:
        """The files that the compiler read, after it has run."""
        depfile = Path(f"{self.library}.d")
        text = depfile.read_text() if depfile.is_file() else ""  # a library without dependencies
        names = text.replace("\\\n", " ").partition(": ")[2]
        return [Path(re.sub(r"\\(.)", r"\1", name)) for name in re.findall(r"(?:\\.|\S)+", names)]

    @property
    def seconds(self) -> float:
        return time.time() - (self.folder / BEGAN).stat().st_mtime

    def errors(self) -> str:
        """What the compiler wrote to stderr. Raises BuildError: it failed; with its last lines."""
        code, out, errors = (self._written(name) for name in ("code", "stdout", "stderr"))
        if (code := code.strip()) != "0":
            last = "".join(f"\n{x}" for x in (out + errors).strip().splitlines()[-LAST_LINES:])
            compiler = Path(self.command[0]).name
            if code:
                raise BuildError(
                    f"{self.name} does not compile, {compiler} exited with {code}:{last}"
                )
            raise BuildError(
                f"{self.name} does not compile, {compiler} left no exit code: something killed it, "
                "perhaps for memory, or the disk is full. Make room, or compile fewer units at "
                f"once by -j 1 or MAX_JOBS=1{last}"
            )
        with self.library.open("rb") as file:
            os.fsync(file)  # before the rename: a crash leaves no truncated library
        return errors

    def interrupt(self) -> None:
        """Sends SIGINT to the compiler, if it runs: to the process group of its shell."""
        if (group := self._written(BEGAN).strip()) and not self._written("code"):
            with suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGINT)

    def _written(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.is_file() else ""

    def text(self) -> str:
        """Its lines in a build.ninja."""
        folder = shlex.quote(str(self.folder))
        begin = f"cd {folder} && echo $$ > {BEGAN}"
        compiler = f"TMPDIR={folder} {shlex.join(map(str, self.command))} > stdout 2> stderr"
        run = f"{begin}; {compiler}; code=$?; echo $code > code; exit $code"
        library, source = (re.sub(r"([$: ])", r"$\1", str(p)) for p in (self.library, self.source))
        return EDGE.format(
            library=library, source=source, run=run.replace("$", "$$"), name=self.name
        )


def run_edges(edges: Sequence[Edge], at_once: int, finish: Callable[[Edge], None]) -> None:
    """Runs all edges, and calls `finish` after each. After a failure it starts no other.

    Raises BuildError: of the first edge that fails; ninja is missing or fails itself. Whatever it
    raises, no compiler runs then.
    """
    left = {edge.name: edge for edge in edges}
    began, failed, other = time.monotonic(), None, deque[str](maxlen=LAST_LINES)
    with working_folder("ninja") as folder, _started(edges, at_once, folder) as process:
        for line in _lines(process):
            if (edge := left.pop(line, None)) is not None:
                try:
                    finish(edge)
                except BuildError as error:
                    failed = failed or error
            elif line:
                other.append(line)
            else:
                ready, seconds = len(edges) - len(left), time.monotonic() - began
                log_line(f"{ready} of {len(edges)} compiled, {seconds:.0f} s so far")
            for edge in left.values():
                os.utime(edge.folder)  # the sign of life, see `Making`
    if failed is not None:
        raise failed
    if left:
        said = "".join(f"\n{line}" for line in other)
        raise BuildError(
            f"ninja exited with {process.returncode}, before {next(iter(left))}:{said}"
        )


@contextmanager
def _started(
    edges: Sequence[Edge], at_once: int, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """ninja, running in `folder`. After an error it ends its compilers, and is awaited."""
    (folder / "build.ninja").write_text(RULE + "".join(edge.text() for edge in edges))
    command: list[str | Path] = [find_ninja(), "-C", folder, "-j", str(at_once)]
    environment = {**os.environ, "NINJA_STATUS": "", "TERM": "dumb"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            yield process
        except BaseException:
            log_line("stopping the compilers")
            process.send_signal(signal.SIGINT)
            # ninja signals each compiler once, and waits for it. A shell that forks at that moment
            # loses the signal before it runs the compiler: without another one it runs to its end.
            while process.poll() is None:
                try:
                    process.communicate(timeout=AGAIN)
                except subprocess.TimeoutExpired:
                    for edge in edges:
                        edge.interrupt()
            raise


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """What a process prints, line by line; an empty line after every NOTICE seconds without."""
    assert process.stdout is not None
    pipe, rest = process.stdout.fileno(), b""
    while True:
        if not select.select([pipe], [], [], NOTICE)[0]:
            yield ""
            continue
        if not (read := os.read(pipe, 65536)):
            break
        *lines, rest = (rest + read).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines if line)
    yield from filter(None, [rest.decode(errors="replace")])
