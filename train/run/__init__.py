"""A run as processes and a folder: checks before the start, signals, failures.

In: the config and the environment. Out: a checked config, a run folder, exit codes, error lines.
Imports: config, data, model, engine, hf.
"""
