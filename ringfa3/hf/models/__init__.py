"""What single families of models need under a ring.

In: a model, or a call of it with `ringfa3_plan`. Out: forwards, plans and positions of its layers.
Imports `planning`, `ring`, and modules of `ringfa3.hf`.
"""
