"""The exceptions of RingFA3 besides ValueError and TypeError, and texts that two modules share."""

from __future__ import annotations

from collections.abc import Sequence


class RingError(RuntimeError):
    """A ring call cannot finish: a peer died, stopped, or gave up first."""


class BuildError(RuntimeError):
    """A kernel cannot be compiled here; the message says what is missing and how to get it."""


class StepError(RuntimeError):
    """A step that all ranks take together failed on one rank; every rank raises this."""


def first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0]


IF_SLOW = "; if it is only slow, raise the process group's timeout"


def timed_out(what: str, seconds: float) -> str:
    """The message of a rank that waited for `what` in vain."""
    return f"{what}: timed out after {seconds:g} s: see that rank's log{IF_SLOW}"


def disconnected(what: str) -> str:
    """The message of a rank whose peer has closed their connection."""
    return f"{what}: connection closed by peer: that rank's process has probably ended, see its log"


def gave_up(what: str, failure: str) -> str:
    """The message of a rank that stops waiting for `what` because another rank failed."""
    return f"{what}: aborted: {failure}"


def listed(ranks: Sequence[int]) -> str:
    """Numbers of ranks, for a message."""
    return ", ".join(map(str, ranks))
