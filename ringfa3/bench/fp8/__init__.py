"""The benchmark of 8-bit attention, `python -m ringfa3.bench fp8`.

In: options of the command line. Out: rms errors of every design, against float64.
Imports ringfa3.bench.common, and nothing of the other benchmarks.
"""
