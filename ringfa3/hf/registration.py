"""`register`: makes RingFA3 an attention implementation of transformers."""

from __future__ import annotations

NAME = "ringfa3"  # no name with "flash" in it: transformers replaces those


def register() -> None:
    """Registers `attn_implementation="ringfa3"` in transformers; a second call changes nothing.

    A call of a `PreTrainedModel` with `ringfa3_plan` is checked as a whole from then on: layers
    that do not attend would not notice the plan.

    Raises:
        ImportError: transformers is missing; `pip install 'ringfa3[hf]'` brings it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as problem:
        raise ImportError(f"{problem}: pip install 'ringfa3[hf]' brings transformers") from problem
    from ringfa3.hf.attention import attention_forward
    from ringfa3.hf.context_parallel import checked_call
    from ringfa3.hf.masks import mask_function

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)
    if "__call__" not in vars(PreTrainedModel):
        call = checked_call(PreTrainedModel.__call__)
        PreTrainedModel.__call__ = call  # type: ignore[method-assign]
