"""Predictions for a step before it runs: device memory by part, host memory, seconds, MFU.

In: a checked config and a number of GPUs. Out: a prediction, and the smallest change that fits.
Imports: config, text, data, model, engine, hf, run, checks, log.
"""
