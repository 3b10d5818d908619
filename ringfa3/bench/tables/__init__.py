"""`python -m ringfa3.bench tables`: the tables of docs/benchmarks.md.

In: docs/results/*/*/results.json and the page's markers. Out: the page, or what differs in it.
Imports ringfa3.bench.{common,attention,ring}.
"""
