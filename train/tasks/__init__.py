"""What ``mode`` selects: train, estimate, generate, eval, export, ...; and sweeps (``-m``).

In: a checked config. Out: a trained run, text, a measured loss, a table of runs.
Imports: config, data, model, engine, hf, run, checks, log, estimate.
"""
