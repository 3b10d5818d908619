"""If this fails, results of earlier versions cannot be read. Committed result files: their keys are
those of format 1, whatever the attributes are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfa3.bench.common.results import FILE, Results

RESULTS = Path(__file__).parent.parent.parent.parent / "docs" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob(f"*/*/{FILE}")), ids=lambda p: p.parent.name)
def test_a_committed_file_is_written_back_with_the_same_keys_and_values(
    path: Path, tmp_path: Path
) -> None:
    """Rows may gain keys; the means of the summary are computed anew, within 1e-12."""
    before = json.loads(path.read_text())
    after = json.loads(Results.load(path).save(tmp_path).read_text())
    for old, new in zip(before["summary"], after["summary"], strict=True):
        assert new.pop("geometric_mean") == pytest.approx(old.pop("geometric_mean"), rel=1e-12)
    for old, new in zip(before["rows"], after["rows"], strict=True):
        assert {key: new[key] for key in old} == old
    assert after | {"rows": before["rows"]} == before
