"""How the rows of a launch go from rank to rank, inside a host and between hosts.

In: what a rank sends and receives (`LaunchExchange`), and tensors. Out: messages, and what moves
them. Imports `planning`, `kernels`, `schedules`, `host`, `symmetric`, `errors` and `ring`.
"""
