"""Masks of spans: their algebra, their constructors, and a picture of them.

In: lengths, windows, trees, blocks. Out: numpy tables of spans that do not overlap.
Imports `tensor_cache`, `validation`.
"""
