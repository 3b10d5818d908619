"""`python -m ringfa3.build`: compiles the CUDA kernels into a cache, outside import.

In: a unit (direction, dtype, head dim). Out: the path of its shared library.
Imports `errors`.
"""
