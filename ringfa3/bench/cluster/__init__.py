"""The time model of a cluster, `python -m ringfa3.bench cluster`.

In: options of the command line. Out: predicted steps, bytes and memory of several strategies.
Imports ringfa3.bench.common, and nothing of the other benchmarks.
"""
