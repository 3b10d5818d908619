"""Runs compilers by ninja: one edge for each library, as many at once as a pool allows."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ringfa3.build.cache import NOTICE, log_line
from ringfa3.build.toolchain import find_ninja
from ringfa3.errors import BuildError

FILE = """ninja_required_version = 1.5
pool compilers
  depth = {at_once}
rule compile
  command = $run
  description = $out_name
  depfile = $out.d
  pool = compilers
"""
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
        return time.time() - (self.folder / "began").stat().st_mtime

    def errors(self) -> str:
        """What the compiler wrote to stderr. Raises BuildError: it failed; with its last lines."""
        code = (self.folder / "code").read_text().strip()
        out, errors = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        if code != "0":
            last = "\n".join((out + errors).strip().splitlines()[-20:])
            compiler = Path(self.command[0]).name
            raise BuildError(
                f"{self.name} does not compile, {compiler} exited with {code}:\n{last}"
            )
        with self.library.open("rb") as file:
            os.fsync(file)  # before the rename: a crash leaves no truncated library
        return errors

    def text(self) -> str:
        """Its lines in a build.ninja."""
        folder = shlex.quote(str(self.folder))
        compiler = f"TMPDIR={folder} {shlex.join(map(str, self.command))} > stdout 2> stderr"
        run = f"cd {folder} && : > began; {compiler}; code=$?; echo $code > code; exit $code"
        library, source = (re.sub(r"([$: ])", r"$\1", str(p)) for p in (self.library, self.source))
        return EDGE.format(
            library=library, source=source, run=run.replace("$", "$$"), name=self.name
        )


def run_edges(edges: Sequence[Edge], at_once: int, finish: Callable[[Edge], None]) -> None:
    """Runs all edges, and calls `finish` after each. After a failure it starts no other.

    The edges have folders of their own in one folder, where build.ninja is written.

    Raises BuildError: of the first edge that fails; ninja is missing or fails itself.
    """
    ninja = find_ninja()
    left = {edge.name: edge for edge in edges}
    file = edges[0].folder / "build.ninja"
    file.write_text(FILE.format(at_once=at_once) + "".join(edge.text() for edge in edges))
    command: list[str | Path] = [ninja, "-C", file.parent, "-j", str(at_once)]
    environment = {**os.environ, "NINJA_STATUS": "", "TERM": "dumb"}
    began, failed, said = time.monotonic(), None, ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        try:
            while True:
                if not select.select([pipe], [], [], NOTICE)[0]:
                    ready, seconds = len(edges) - len(left), time.monotonic() - began
                    log_line(f"{ready} of {len(edges)} compiled, {seconds:.0f} s so far")
                    continue
                if not (read := os.read(pipe, 65536)):
                    break
                said += read.decode(errors="replace")
                *lines, rest = said.split("\n")
                for line in lines:
                    if (edge := left.pop(line, None)) is not None:
                        try:
                            finish(edge)
                        except BuildError as error:
                            failed = failed or error
                said = rest
        except KeyboardInterrupt:
            log_line("interrupted: stopping the compilers")
            process.send_signal(signal.SIGINT)
            raise
    if failed is not None:
        raise failed
    if left:
        raise BuildError(f"{ninja} exited with {process.returncode}: {said}")
