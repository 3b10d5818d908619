"""The transformer, its attention modules, its loss and its optimiser.

In: a ``Batch``. Out: the loss of every local token.
Imports: config, text, data.
"""
