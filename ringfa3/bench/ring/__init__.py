"""The benchmark of ring attention over a torchrun job: `python -m ringfa3.bench ring`.

In: options of the command line. Out: speed, memory, error and host time for each world size.
Imports ringfa3.bench.common and the mixes of ringfa3.bench.cluster, nothing of other benchmarks.
"""
