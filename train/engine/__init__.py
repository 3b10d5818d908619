"""Training over many ranks: groups, data parallelism, checkpoints, skipped steps.

In: a model and its optimiser. Out: synchronised gradients; saved and restored training states.
Imports: config, text, data, model.
"""
