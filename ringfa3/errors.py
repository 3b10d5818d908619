"""What RingFA3 raises beside ValueError and TypeError."""

from __future__ import annotations


class RingError(RuntimeError):
    """A ring call could not be finished: a peer died, stopped, or gave up first."""


class BuildError(RuntimeError):
    """A kernel cannot be compiled here; the message says what is missing and how to get it."""


class StepError(RuntimeError):
    """A step that all ranks take together has failed on one; all know, and raise the same."""


def first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0]
