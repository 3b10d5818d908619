"""What runs one hop: the compiled kernels, or the PyTorch executor that defines them.

In: tensors and the tiles of a plan. Out: (out, LSE), or gradients.
Imports `planning`, and `build` where a kernel is first needed.
"""
