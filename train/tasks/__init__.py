"""What ``mode`` selects: train, generate, eval; and sweeps (``-m``).

In: a checked config. Out: a trained run, text, a measured loss, a table of runs.
Imports: all of train but train.pretrain.
"""
