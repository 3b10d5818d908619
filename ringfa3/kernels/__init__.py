"""Runs one hop: the compiled kernels, or the PyTorch reference that defines their results.

In: tensors and the tiles of a plan. Out: (out, LSE), or gradients.
Imports `validation`, `planning`, `quantisation`, `errors`, and `build` when a kernel is first
needed.
"""
