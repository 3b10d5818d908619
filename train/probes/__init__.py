"""Measurements of a checkpoint on a text: losses, needle in a haystack, RoPE beyond its length.

In: a run and its checkpoint. Out: right answers and losses by position, JSON and plots.
Imports: config, text, data, model, engine, hf, run, checks, log, estimate, tasks.
"""
