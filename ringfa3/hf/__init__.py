"""Hugging Face models and trainers on RingFA3: `register()`, `context_parallel`, `verify`.

In: masks, keywords and batches of transformers. Out: outputs, losses, or a ValueError.
Imports `custom_op`, `tensor_cache`, `attention_op`, `functional`, `kernels`, `masks`, `planning`,
`schedules`, `ring`, `validation`; transformers and accelerate, which `import ringfa3` does not
import.
"""

from ringfa3.hf.registration import lazy_names, register

__all__ = ["ContextParallel", "context_parallel", "register", "shard_batch", "verify"]
__getattr__ = lazy_names()
