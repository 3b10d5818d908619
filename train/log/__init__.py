"""The records of a run: JSON lines, TensorBoard, W&B, plots, profiler traces.

In: the figures of a step or an evaluation. Out: files in the run folder, lines on the console.
Imports: config, text, data, model, engine, hf, run, checks.
"""
