"""The benchmark that counts the rows of a plan, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import sent_rows
from ringfa3 import plan_context
from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.kv_exchange import plan_ring
from ringfa3.planning.sharding import Segments


def test_rows_by_each_rule() -> None:
    """Exactly. Four ranks of 100 tokens, contiguous; the document of 150 tokens spans ranks 1 and
    2, and that of 90 ranks 0 and 1; the last one ends as rank 3 begins."""
    exchange = plan_context([0, 60, 150, 300, 400], (0, 4), "contiguous").kv_exchange
    found = sent_rows.received(exchange)
    assert {rule: rows.tolist() for rule, rows in found.items()} == {
        rule: [0, 40, 50, 0] for rule in ("direct", "bounding", "forwarded")
    }


def test_a_row_between_two_others_and_a_rank_between_owner_and_reader() -> None:
    """Exactly. The first rank needs both ends of the other's segment. Contiguous, 10 later keys:
    rows of rank r are for rank r - 1 alone, and pass all others before."""
    around = Segments(*(np.array(x) for x in ([0, 1000], [1000, 1000], [0, 0], [0, 3000])))
    middle = Segments(*(np.array([x]) for x in (0, 2000, 0, 1000)))
    _, exchange = plan_ring([around, middle], 0, 10, 10)
    found = sent_rows.received(exchange)
    assert found["direct"].tolist() == [20, 20]
    assert found["bounding"].tolist() == [2000, 20]
    assert found["forwarded"].tolist() == [20, 20]
    wide = sent_rows.received(plan_context(4000, (0, 4), "contiguous", False, (0, 10)).kv_exchange)
    assert wide["direct"].tolist() == [10, 10, 10, 0]
    assert wide["forwarded"].tolist() == [30, 20, 20, 20]


def test_rows_by_link() -> None:
    """Exactly. Two hosts of two ranks, of 100 tokens each, all to all: a rank sends its rows to
    three others, or to one on each host, and then passes on the rows of one owner."""
    plan = plan_context(400, (0, 4), "contiguous", False, hosts=2)
    found = sent_rows.by_link(plan.kv_exchange, Landing.of(plan.kv_exchange, plan.hosts))
    assert {name: rows.tolist() for name, (rows, _) in found.items()} == {
        "between hosts, direct": [200] * 4,
        "between hosts, two levels": [100] * 4,
        "inside hosts, direct": [100] * 4,
        "inside hosts, two levels": [200] * 4,
    }


def test_a_run_prints_rules_and_links(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rows", "--ranks", "4", "--per-host", "2", "--draws", "1"])
    sent_rows.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["direct", "bounding", "forwarded"]
    rows = [int(line.split()[1]) for line in lines[:3]]
    assert 0 < rows[0] <= rows[1] <= rows[2]
    assert [line.split(" rows")[0].rsplit(None, 1)[0] for line in lines[3:7]] == [
        f"{link} hosts, {rule}"
        for link in ("between", "inside")
        for rule in ("direct", "two levels")
    ]
