"""Compares trainers under context parallelism: `python -m benchmarks.compare_trainers`.

From settings it makes a corpus and a job of several processes for each trainer; out come the times
of their steps, ratios and bars. It imports ringfa3, train and the modules of benchmarks.
"""
