"""`python -m ringfa3.bench tables`: the tables of the pages in docs/.

In: docs/results/*/*/results.json and the pages' markers. Out: the pages, or what differs in them.
Imports ringfa3.bench.{common,attention,ring}.
"""
