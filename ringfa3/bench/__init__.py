"""Benchmarks: RingFA3 and other implementations of attention, timed in pairs.

In: a command line (`python -m ringfa3.bench --help`). Out: results.json, tables, plots.
Imports anything of ringfa3; `import ringfa3` imports nothing from here.
"""
