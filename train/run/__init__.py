"""The processes and the folder of a run: its config, signals, failures.

In: the config and the environment. Out: a run folder, exit codes, error lines.
Imports: config, text, data, model, engine, hf.
"""
