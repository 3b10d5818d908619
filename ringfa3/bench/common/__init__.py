"""What both benchmarks share: cases, inputs, accuracy checks, paired timing, result files, reports.

In: cases and implementations. Out: a `Results` file, and the terminal's tables and plots of it.
Imports no other package of ringfa3.bench.
"""
