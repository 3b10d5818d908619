"""Launches on fewer SMs than a GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ringfa3.kernels import launch


@contextmanager
def leave_sms(count: int) -> Iterator[None]:
    """Launches have one CTA less for each of `count` SMs, as on a smaller GPU."""
    num_sms = launch._num_sms
    with mock.patch.object(launch, "_num_sms", lambda device: num_sms(device) - count):
        yield
