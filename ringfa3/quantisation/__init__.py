"""Q, K and V in 8 bits: formats, rotation, scales and the statistics that they come from.

In: Q, K, V of a call and the key segments of a plan. Out: 8-bit operands with their scales.
Imports `planning`.
"""
