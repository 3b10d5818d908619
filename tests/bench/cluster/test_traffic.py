"""If this fails, predicted bytes between hosts are wrong. Rows that ranks exchange by the rule of
each transport, against figures worked out by hand."""

from __future__ import annotations

import numpy as np

from ringfa3 import plan_context
from ringfa3.bench.cluster.traffic import (
    bounding_rows,
    forwarded_rows,
    rows_to,
)
from ringfa3.planning.kv_exchange import KVExchange, plan_ring
from ringfa3.planning.sharding import Segments


def received(exchange: KVExchange) -> list[list[int]]:
    """Rows that each rank receives: of direct sends, of bounding ranges, forwarded."""
    ranks = np.arange(len(exchange.tokens))
    by_rule = rows_to(exchange, ranks), bounding_rows(exchange), forwarded_rows(exchange)
    return [rows.sum(0).tolist() for rows in by_rule]


def test_rows_by_each_rule() -> None:
    """Exactly. Four ranks of 100 tokens, contiguous; the document of 150 tokens spans ranks 1 and
    2, and that of 90 ranks 0 and 1; the last one ends as rank 3 begins."""
    exchange = plan_context([0, 60, 150, 300, 400], (0, 4), "contiguous").kv_exchange
    assert received(exchange) == [[0, 40, 50, 0]] * 3


def test_a_row_between_two_others_and_a_rank_between_owner_and_reader() -> None:
    """Exactly. The first rank needs both ends of the other's segment. Contiguous, 10 later keys:
    rows of rank r are for rank r - 1 alone, and pass all others before."""
    around = Segments(*(np.array(x) for x in ([0, 1000], [1000, 1000], [0, 0], [0, 3000])))
    middle = Segments(*(np.array([x]) for x in (0, 2000, 0, 1000)))
    _, exchange = plan_ring([around, middle], 0, 10, 10)
    assert received(exchange) == [[20, 20], [2000, 20], [20, 20]]
    wide = plan_context(4000, (0, 4), "contiguous", False, (0, 10)).kv_exchange
    assert received(wide) == [[10, 10, 10, 0], [10, 10, 10, 0], [30, 20, 20, 20]]


def test_a_row_counts_once_for_each_host() -> None:
    """Exactly. One document of 400 tokens, contiguous, on 4 ranks, 2 of them on each host: rank r
    needs all rows of the ranks before it."""
    exchange = plan_context(400, (0, 4), "contiguous").kv_exchange
    rows = rows_to(exchange, np.array([0, 0, 1, 1]))
    assert rows.tolist() == [[100, 100], [0, 100], [0, 100], [0, 0]]
