"""How the ranks of a group agree, over its store, and learn of each other's trouble.

In: settings or an error of each rank. Out: all ranks go on, or all have the same error.
Imports `errors`, `numa`, `threads`, `tensor_cache`.
"""
