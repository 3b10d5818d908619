"""Which rank holds which tokens, and which tiles each kernel launch visits.

In: document lengths, a mask, a rank and a world size. Out: numpy tables of spans, tiles, exchanges.
Imports `validation`, `custom_op`, `masks`.
"""
