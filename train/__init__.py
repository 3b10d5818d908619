"""Pretraining with RingFA3. The entry point is ``train/pretrain.py``."""
