"""Text on disk to batches: tokenised once per host, packed and mixed by closed forms.

In: ``config.data``. Out: a rank's ``Batch`` of any step, with the plan of its attention.
Imports: config.
"""
