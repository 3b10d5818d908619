"""The modes that ``mode`` selects: train, estimate, generate, export, ...; and sweeps (``-m``).

In: a checked config. Out: a trained run, a prediction, text, a folder, a table of runs.
Imports: config, text, data, model, engine, hf, run, checks, log, estimate.
"""
