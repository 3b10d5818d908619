"""Exact ring attention over contexts that no single GPU holds."""

from ringfa3.attention import RingFA3Attention, flash_attn_mask_func, keep_attention
from ringfa3.errors import RingError
from ringfa3.functional import flash_attn_func, flash_attn_varlen_func
from ringfa3.masks import trees
from ringfa3.masks.mask import Mask
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.ring import row_messages as _row_messages  # noqa: F401  plans communicate by it
from ringfa3.ring.connect import connect
from ringfa3.ring.op import ring_attn_func
from ringfa3.symmetric.kernel_spec import KernelSpec

__all__ = [
    "ContextPlan",
    "KernelSpec",
    "Mask",
    "RingError",
    "RingFA3Attention",
    "connect",
    "flash_attn_func",
    "flash_attn_mask_func",
    "flash_attn_varlen_func",
    "keep_attention",
    "plan_context",
    "ring_attn_func",
    "trees",
]
