"""One small benchmark case of each kind of mask, for tests of the implementations."""

from __future__ import annotations

from ringfa3.bench.common.cases import CAUSAL, FULL, Case

CASES = [
    Case("any", "causal", (30, 30), 4, 2, 16, CAUSAL),
    Case("any", "full", (30, 30), 4, 2, 16, FULL),
    Case("any", "packed", (5, 40, 1), 4, 2, 16, CAUSAL, packed=True),
    Case("any", "window", (50,), 4, 2, 16, (7, 0)),
    Case("any", "rectangle", (40, 40), 4, 2, 16, FULL, keys=(25, 25)),
]
