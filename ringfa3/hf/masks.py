"""Masks of transformers as windows, padding and documents: the registered mask function.

transformers describes a mask by nested functions of (batch, head, query, key). Their closures are
read, and only those are allowed whose meaning is known. A compiler cannot read closures: then the
keywords of the mask function decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils import _pytree as pytree
from transformers.masking_utils import causal_mask_function

from ringfa3.hf.documents import changes

REMEDY = "use attn_implementation='sdpa' or 'eager' for this model"
_LIBRARY = "transformers.masking_utils"


class MaskAccessError(ValueError, AttributeError):
    """A model reads its mask as a tensor. `hasattr` of a mask is False, as of any other object."""


@dataclass(frozen=True, eq=False)
class Mask:
    """To which keys a layer's queries attend. It is no tensor: whoever reads it as one gets a
    ValueError.

    left, right  window, -1 for unlimited; a causal mask has right 0
    keys         number of keys, the cached ones included
    padding      (b, keys) bool, False for padding; None: no 2D mask was given
    documents    (b or 1, queries) labels, as of `begins_of`; None: one document, or not known
    unread       the mask function may hold documents that could not be read
    problem      why there is no such mask; attention raises it, on all ranks of a ring
    """

    left: int = -1
    right: int = -1
    keys: int = 0
    padding: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    unread: bool = False
    problem: ValueError | None = None

    # transformers reads these of a prepared mask, which it gives to `mask_function` again.
    ndim: ClassVar[int] = 4

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 1, 1, self.keys

    def __getattr__(self, name: str) -> Any:
        raise self._access_error(f".{name}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        masks = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))
        name = getattr(function, "__name__", repr(function))
        raise next(masks, cls())._access_error(f" in {name}")

    def _access_error(self, use: str) -> MaskAccessError:
        if self.problem is not None:
            return MaskAccessError(str(self.problem))
        return MaskAccessError(
            f"attention_mask{use}: RingFA3's mask is not a tensor. If generate reads it, for a "
            "static cache, use a DynamicCache, which is cache_implementation='dynamic'; if the "
            f"model does, {REMEDY}"
        )


def _refuse(operator: str) -> Callable[..., Any]:
    def refuse(self: Mask, *others: object) -> Any:
        raise self._access_error(f" under {operator}")

    return refuse


# Operators are looked up on the class. Without these, mask == 0 would be False in silence.
_BINARY = ("add", "sub", "mul", "truediv", "and", "or", "xor")
_UNARY = ("invert", "neg")
_READ = ("getitem", "len", "iter", "float", "int", "bool")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
for _operator in (*_BINARY, *(f"r{name}" for name in _BINARY), *_UNARY, *_READ, *_COMPARED):
    setattr(Mask, f"__{_operator}__", _refuse(f"__{_operator}__"))


class _Allowed(NamedTuple):
    """What one mask function, or several in conjunction, allow."""

    left: int = -1
    right: int = -1
    padding: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def narrowed(self, other: _Allowed) -> _Allowed:
        """The pairs that both allow."""
        return _Allowed(
            _narrower(self.left, other.left),
            _narrower(self.right, other.right),
            _both(self.padding, other.padding),
            _same(self.documents, other.documents),
        )


def mask_function(**arguments: Any) -> Mask:
    """`read_mask`, or a mask with the error that it raises, for attention to raise.

    A mask that was made before, as PaliGemma's is, stays.
    """
    prepared = arguments.get("attention_mask")
    if isinstance(prepared, Mask):
        return prepared
    try:
        return read_mask(**arguments)
    except ValueError as problem:
        if torch.compiler.is_compiling():
            raise
        return Mask(keys=arguments["kv_length"], padding=prepared, problem=problem)


def read_mask(
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    **keywords: Any,
) -> Mask:
    """The `Mask` of a layer type, from the arguments of transformers' `sdpa_mask`.

    Raises:
        ValueError: the mask, or the cache behind it, is none that RingFA3 computes exactly.
    """
    if mask_function is None:
        raise ValueError(f"mask_function=None: a mask function of {_LIBRARY} is needed; {REMEDY}")
    if cache_position is not None:  # transformers 4
        q_length = cache_position.shape[0]
        compiling = torch.compiler.is_compiling()
        q_offset = kv_offset + kv_length - q_length if compiling else int(cache_position[0])
    if torch.compiler.is_compiling():
        allowed, unread = _from_keywords(mask_function, keywords)
        unread = unread and attention_mask is None
    else:
        allowed, unread = _from_closures(mask_function), False
    if allowed.left >= 0 or allowed.right >= 0:  # else keys at any distance are visible
        _check_cache(q_length, q_offset, kv_offset + kv_length, attention_mask)
    padding = None if attention_mask is None else _columns(attention_mask, kv_offset, kv_length)
    if allowed.padding is not None:
        padding = _both(padding, _columns(allowed.padding, kv_offset, kv_length))
    return Mask(allowed.left, allowed.right, kv_length, padding, allowed.documents, unread)


def _check_cache(
    queries: int | None,
    q_offset: int | torch.Tensor | None,
    end: int,
    attention_mask: torch.Tensor | None,
) -> None:
    """Raises ValueError unless the queries are the last keys; those end at position `end`."""
    columns = 0 if attention_mask is None else attention_mask.shape[-1]
    if isinstance(q_offset, torch.Tensor) or (queries or 0) + (q_offset or 0) < end > columns:
        raise ValueError(
            "past_key_values is a static cache, whose unused slots are keys too: use a "
            "DynamicCache, which is cache_implementation='dynamic' of generate"
        )
    if queries is None or q_offset is None or q_offset + queries != end:
        raise ValueError(
            f"attention_mask has {columns} columns for {queries} queries that follow {q_offset} "
            "cached keys: give (batch, keys), the cached keys included"
        )


def _columns(mask: torch.Tensor, offset: int, keys: int) -> torch.Tensor:
    """The columns of a 2D mask that belong to the keys."""
    if mask.dim() != 2 or mask.shape[1] < offset + keys:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, and there are {offset + keys} keys: "
            "give (batch, keys), the cached keys included"
        )
    return mask if mask.shape[1] == keys else mask[:, offset : offset + keys]


def _from_keywords(function: Callable[..., Any], keywords: dict[str, Any]) -> tuple[_Allowed, bool]:
    """What a function allows under a compiler, and whether the function may hold documents."""
    causal = function is causal_mask_function
    name = "causal_mask_function" if causal else function.__qualname__
    config, window = keywords.get("config"), keywords.get("local_size")
    if keywords.get("use_vmap", True):
        raise ValueError(
            f"mask_function={name} under torch.compile: it is a user's, or transformers does not "
            f"say whether it is; {REMEDY}, or do not compile"
        )
    if "allow_is_bidirectional_skip" in keywords:
        left = -1 if window is None else window
        return _Allowed(left, left), False
    if not causal and name != "and_masks.<locals>.and_mask":
        raise _unknown(name)
    if window is not None and getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError(
            f"attention_chunk_size={config.attention_chunk_size}: do not compile, and pass "  # type: ignore[union-attr]
            f"ringfa3_mask={{...: Mask.documents(cu, chunk=...)}}, or {REMEDY}"
        )
    return _Allowed(-1 if window is None else window - 1, 0), not causal


def _from_closures(function: Callable[..., Any]) -> _Allowed:
    """What a function, and all functions in its closure, allow. Raises ValueError: unknown."""
    name = getattr(function, "__qualname__", repr(function)).removesuffix(".<locals>.inner_mask")
    if getattr(function, "__module__", None) != _LIBRARY:
        raise _unknown(name)
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    held = {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}
    if name == "and_masks.<locals>.and_mask":
        allowed = _Allowed()
        for part in held["mask_functions"]:
            allowed = allowed.narrowed(_from_closures(part))
        return allowed
    if name == "causal_mask_function":
        return _Allowed(right=0)
    if name == "bidirectional_mask_function":
        return _Allowed()
    if name == "sliding_window_overlay":
        return _Allowed(left=held["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return _Allowed(held["sliding_window"], held["sliding_window"])
    if name == "packed_sequence_mask_function":
        return _Allowed(documents=held["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":  # distances inside a document stay
        allowed = _from_closures(held["mask_function"])
        if allowed.documents is not None:
            raise ValueError(
                "mask_function has a packed_sequence_mask_function, and position_ids are of packed "
                "documents: transformers looks labels up by position, which restarts in each "
                "document. Give documents once, by position_ids alone"
            )
        return allowed
    if name == "padding_mask_function":
        return _Allowed(padding=held["padding_mask"])
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"mask_function={name}: RingFA3 reads causal, sliding-window, packed and padding masks: "
        f"pass ringfa3_mask=ringfa3.Mask(...), or {REMEDY}"
    )


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """The documents that one mask function or both give. Raises ValueError: they differ.

    Labels that change at the same tokens are of the same documents: none may return in its row.
    """
    if a is None or b is None:
        return b if a is None else a
    if a is not b and not torch.equal(changes(a), changes(b)):
        raise ValueError(
            "mask_function has two packed_sequence_mask_function of different documents, one of "
            "which may come from position_ids: give documents once"
        )
    return a


def _both(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
