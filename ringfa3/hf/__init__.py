"""Hugging Face models on RingFA3: `register()`, then `attn_implementation="ringfa3"`.

In: what transformers passes to attention and mask functions. Out: outputs, or a ValueError.
Imports `custom_op`, `tensor_cache`, `attention_op`, `functional`, `kernels`, `planning`, `ring`,
`validation`; transformers, which `import ringfa3` does not import.
"""

from ringfa3.hf.registration import register

__all__ = ["register"]
