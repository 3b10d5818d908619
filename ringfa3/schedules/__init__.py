"""Schedules: what a call does, as data that any process can build and the C++ launcher runs.

In: the host code of a call. Out: words, and programs of the launcher.
Imports `planning`, `build`, `kernels`, `pass_interface` and `attention_op`.
"""
