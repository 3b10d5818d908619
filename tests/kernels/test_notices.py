"""If this fails, attention runs slowly without a line that names the cause. Lines on stderr that
say what runs in place of a kernel."""

from __future__ import annotations

import pytest

from ringfa3.kernels.dispatch import log_fallback, log_once


@pytest.mark.parametrize(("local_rank", "who"), [("0", ""), ("3", "local rank 3: ")])
def test_every_rank_says_that_the_fallback_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, who: str
) -> None:
    """Once for each reason: a rank may be the only one that has it."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    log_once.cache_clear()
    for _ in range(2):
        log_fallback("the kernel cannot be built (no space)")
    line = "using the PyTorch fallback (exact, slow): the kernel cannot be built"
    assert capsys.readouterr().err == f"ringfa3: {who}{line} (no space)\n"
