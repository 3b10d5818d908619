"""If this fails, calls of two threads with one plan raise a KeyError. What `prepare_call` remembers
of valid calls may be cleared at any time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringfa3 import plan_context
from ringfa3.ring import prepare_call


class Cleared(dict[Any, Any]):
    """Another thread clears it after each new entry."""

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.clear()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_holds_what_another_thread_forgets(direction: str) -> None:
    plan, q = plan_context(8), torch.ones(8, 2, 16)
    prepare_call._validated[plan] = Cleared()
    settings = 1.0, False, "native", "auto", direction
    assert prepare_call.prepare_call(q, q, q, plan, *settings).pass_type == direction
