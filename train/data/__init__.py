"""From text on disk to batches: tokenised once per host, mixed and packed by closed forms.

In: ``config.data``. Out: a rank's ``Batch`` of any step, with the plan of its attention.
Imports: config.
"""
