"""What both benchmarks share: cases, inputs, accuracy checks, paired timing, files and reports.

In: cases and implementations. Out: `Results` as a file, and as tables and plots.
Imports nothing of ringfa3.bench.attention or ringfa3.bench.ring.
"""
