"""What a checkpoint does with a text: its loss, needles in haystacks, RoPE beyond its length.

In: a run and its checkpoint. Out: right answers and losses by position, JSON and plots.
Imports: config, data, model, engine, hf, run, checks, log, estimate, tasks.
"""
