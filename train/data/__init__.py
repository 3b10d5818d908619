"""From texts to batches: tokenised once per host, then mixed and packed.

In: ``config.data``. Out: a rank's ``Batch`` in any step, with the plan of its attention.
Imports: config, text.
"""
