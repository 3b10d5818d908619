"""Checks of a config before anything starts: exit code 2, two lines, the nearest valid value.

In: a config and the number of processes. Out: nothing, or ``ConfigError``.
Imports: config, text, data, model, engine, hf, run.
"""
