"""Figures of masks: blocks that a plan visits, a transformer layer on folded sequences.

From masks and plans they print counts and times. They import ringfa3 and train.
"""
