"""Training over many ranks: groups, data parallelism, checkpoints, skipped steps.

In: a model and its optimiser. Out: synchronised gradients; the training state, saved and restored.
Imports: config, data, model.
"""
