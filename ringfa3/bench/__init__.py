"""Benchmarks against other attention implementations; see `python -m ringfa3.bench --help`.

`import ringfa3` imports nothing of it.
"""
