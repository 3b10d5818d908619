"""What ``mode`` selects: train, estimate, generate, eval; and sweeps (``-m``).

In: a checked config. Out: a trained run, text, a measured loss, a table of runs.
Imports: config, data, model, engine, run, log, estimate.
"""
