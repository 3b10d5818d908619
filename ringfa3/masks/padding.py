"""Padding after packed sequences, as sequences of its own: no pair has its rows or its keys.

Sequence i with padding becomes three: its tokens in use, padded queries without keys, padded keys
without queries. So no token moves, and causal diagonals end at the last query and key in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringfa3.tensor_cache import TensorCache
from ringfa3.validation import check_cu_seqlens, sequence_lengths, whole_numbers

Numbers = torch.Tensor | Sequence[int]

_on_host: TensorCache[torch.Tensor] = TensorCache()  # copies of tensors on a GPU


def separate_padding(
    q: tuple[Numbers, Numbers | None, Numbers | None],
    k: tuple[Numbers, Numbers | None, Numbers | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens_q, cu_seqlens_k), (3 n + 1,) int64 on the CPU, in which padding is separate.

    Args:
        q, k: (cu_seqlens, seqused, cu_seqlens_padded), two of them at most: FlashAttention 3 has
            cumulative lengths with padding and (n,) tokens in use, TransformerEngine cumulative
            lengths of the tokens in use and with padding.

    Raises ValueError, TypeError: one is no list of such numbers, or they do not fit each other.
    """
    q_start, q_used, q_end = _ends("q", *q)
    k_start, k_used, k_end = _ends("k", *k)
    if len(q_end) != len(k_end):
        raise ValueError(
            f"queries have {len(q_end)} sequences, keys have {len(k_end)}: they must be equal"
        )
    return (
        torch.cat((q_start, torch.stack((q_used, q_end, q_end), 1).flatten())),
        torch.cat((k_start, torch.stack((k_used, k_used, k_end), 1).flatten())),
    )


def _ends(
    side: str, cu: Numbers, used: Numbers | None, padded: Numbers | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(1,) 0, then (n,) each: where the tokens in use of each sequence end, and its padding does.

    Under a compiler there are no values: the op checks that the first is 0, and that none falls.
    """
    name, used_name = f"cu_seqlens_{side}", f"seqused_{side}"
    if used is not None and padded is not None:
        raise ValueError(
            f"{used_name} and {name}_padded both say which tokens are padding: give one of them"
        )
    given = _cumulative(name, cu)
    cumulative = given if padded is None else _cumulative(f"{name}_padded", padded)
    start = given[:1].abs() + cumulative[:1].abs()
    if used is not None:
        lengths = _numbers(used_name, used)
    else:
        used_name, lengths = name, given.diff()
    begin, end = cumulative[:-1], cumulative[1:]
    if len(lengths) != len(begin):
        raise ValueError(
            f"{used_name} has {len(lengths)} sequences, the cumulative lengths with padding have "
            f"{len(begin)}: they must be equal"
        )
    if torch.compiler.is_compiling():
        return start, begin + lengths, end
    wrong = ((lengths < 0) | (lengths > end - begin)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"{used_name}: sequence {i} uses {int(lengths[i])} of {int(end[i] - begin[i])} tokens: "
            "give at least 0, at most all"
        )
    return start, begin + lengths, end


def _cumulative(name: str, values: Numbers) -> torch.Tensor:
    """`_numbers`. Raises ValueError: they do not begin with 0, or fall."""
    found = _numbers(name, values)
    if not torch.compiler.is_compiling():
        sequence_lengths(name, found.tolist())
    return found


def _numbers(name: str, values: Numbers) -> torch.Tensor:
    """int64, on the CPU unless a compiler traces, which copies a tensor in its graph."""
    if not isinstance(values, torch.Tensor):
        return torch.tensor(whole_numbers(name, values), dtype=torch.int64, device="cpu")
    check_cu_seqlens(name, values)
    if not values.is_cuda or torch.compiler.is_compiling():
        return values.to("cpu", torch.int64)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name} is on the GPU and would be read under CUDA graph capture: pass it on the CPU"
        )
    return _on_host.get(values, None, lambda: values.to("cpu", torch.int64))
