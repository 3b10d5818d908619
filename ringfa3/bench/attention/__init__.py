"""The benchmark of attention on one GPU, `python -m ringfa3.bench attention`.

In: options of the command line. Out: rows of TFLOP/s and paired ratios against each implementation.
Imports ringfa3.bench.common, and nothing of ringfa3.bench.ring.
"""
