"""Pretraining with RingFA3. Start it through ``train/pretrain.py``."""
