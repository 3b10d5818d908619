"""Padding masks, labels and position ids as lengths of packed documents.

Padding becomes documents of its own, so no token moves. Values are read on the host, once for each
version of a tensor: on a GPU that costs one synchronisation a forward, not one a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ringfa3.planning.placement.costs import Ints
from ringfa3.tensor_cache import TensorCache


class Documents(NamedTuple):
    """Cumulative lengths of the queries and the keys of all documents of a batch, (n + 1,) each.

    Document i of the queries attends to document i of the keys; the last rows are aligned.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor


_read: TensorCache[TensorCache[Documents | None]] = TensorCache()  # by padding, then by packed


def documents_of(
    batch: int,
    queries: int,
    keys: int,
    aligned: bool,
    padding: torch.Tensor | None,
    packed: torch.Tensor | None,
    step: int,
) -> Documents | None:
    """The documents of a batch of `queries` rows and `keys` columns; None if each row is one.

    Args:
        aligned: the mask depends on how far a query is from a key: it is causal or has a window.
            Else every query attends to all keys that are no padding.
        padding: (b, keys) bool, False for padding. One that is True everywhere counts as None.
        packed: (b or 1, queries) ints. With step 0 they are labels as of `begins_of`, of as many
            keys as queries; with step 1 positions, and a document begins where they do not go up
            by one.

    Raises:
        ValueError: the mask has holes, or documents begin among tokens that it shows; a label
            returns; or documents begin among queries that follow cached keys.
    """
    tensors = [x for x in (padding, packed) if x is not None]
    if not tensors:
        return None

    def read() -> Documents | None:
        jumps = None if packed is None or not step else packed.diff(dim=-1) != 1
        visible, breaks = _on_host(padding, jumps)
        if visible is not None and not visible.all():
            if breaks is not None:
                _check_padded(visible, breaks, queries)
            elif packed is not None:
                raise _hides("packed_sequence_mask_function")
            return _of_padding(visible, queries, aligned)
        if packed is None:
            return None
        if breaks is not None:
            return _of_positions(packed, breaks, batch, queries, keys)
        begins = begins_of(packed, batch).numpy()
        return None if len(begins) == batch else _of_begins(begins, batch * queries)

    of_first = _read.get(tensors[0], "other", TensorCache)
    return of_first.get(tensors[-1], (batch, queries, keys, aligned, step), read)


_visible: TensorCache[bool] = TensorCache()


def require_no_padding(padding: torch.Tensor) -> None:
    """Raises ValueError: a mask, given with cumulative lengths, hides tokens."""
    if not _visible.get(padding, "all", lambda: bool(padding.all())):
        raise _hides("cu_seq_lens_q")


def _hides(name: str) -> ValueError:
    return ValueError(
        f"attention_mask hides padding, and {name} separates documents: give attention_mask=None "
        "and no padding"
    )


def changes(labels: torch.Tensor) -> torch.Tensor:
    """(b, queries - 1) bool: where the label of a token is not that of the token before."""
    return labels[..., 1:] != labels[..., :-1]


def begins_of(labels: torch.Tensor, batch: int) -> torch.Tensor:
    """Where documents begin among all tokens of the batch, row after row: int64 on the CPU.

    In transformers tokens of equal labels attend to each other. So labels are documents, which are
    runs of tokens, only if none returns in its row.

    Args:
        labels: (batch or 1, queries), equal for tokens of one document.

    Raises:
        ValueError: a label returns.
    """
    labels = labels.cpu()
    begin = F.pad(changes(labels), (1, 0), value=True)
    rows = begin.nonzero()[:, 0]
    of_runs = labels[begin]
    distinct, number = torch.unique(of_runs, return_inverse=True)
    of_row = rows * len(distinct) + number
    _, run, count = torch.unique(of_row, return_inverse=True, return_counts=True)
    returning = (count[run] > 1).nonzero()
    if len(returning):
        first = int(returning[0])
        raise ValueError(
            f"packed_sequence_mask_function: label {of_runs[first].item()} returns in row "
            f"{int(rows[first])} after another label. RingFA3 needs the tokens of a document to be "
            "consecutive: give each run of tokens a label of its own, or use "
            "attn_implementation='sdpa'"
        )
    return begin.expand(batch, -1).flatten().nonzero().flatten()


_begins: TensorCache[list[int]] = TensorCache()


def check_lengths(labels: torch.Tensor, cu_q: torch.Tensor, batch: int) -> None:
    """Raises ValueError: documents of `begins_of` and of cumulative lengths differ."""
    given = _begins.get(cu_q, "lengths", lambda: torch.unique(cu_q)[:-1].tolist())
    found = _begins.get(labels, batch, lambda: begins_of(labels, batch).tolist())
    if given != found:
        raise ValueError(
            f"cu_seq_lens_q begins documents at {given[:4]} ..., the mask, which may have them "
            f"from position_ids, at {found[:4]} ...: give the same documents"
        )


def _on_host(*masks: torch.Tensor | None) -> list[npt.NDArray[np.bool_] | None]:
    """Bool tensors of one device, in one copy: one synchronisation."""
    given = [x for x in masks if x is not None]
    if not given:
        return [None] * len(masks)
    flat = torch.cat([x.flatten().to(given[0].device) for x in given]).cpu().numpy()
    parts = iter(np.split(flat, np.cumsum([x.numel() for x in given])[:-1]))
    return [None if x is None else next(parts).reshape(x.shape) for x in masks]


def _of_padding(visible: npt.NDArray[np.bool_], queries: int, aligned: bool) -> Documents:
    batch, keys = visible.shape
    count = visible.sum(1)
    first = np.where(count > 0, visible.argmax(1), 0)
    last = keys - visible[:, ::-1].argmax(1)
    holes = np.flatnonzero((count > 0) & (last - first != count))
    if len(holes):
        row = int(holes[0])
        raise ValueError(
            f"attention_mask hides tokens between visible ones: in row {row}, {count[row]} of "
            f"tokens {first[row]} to {last[row] - 1} are visible. Padding may be on the left and "
            "on the right: remove the hidden tokens, or use attn_implementation='sdpa'"
        )
    ends = np.stack((np.zeros_like(first), first, first + count, np.full_like(first, keys)), axis=1)
    lengths_k = np.diff(ends, axis=1)
    if aligned:
        lengths_q = np.diff(np.maximum(ends - (keys - queries), 0), axis=1)
    else:
        lengths_q = np.tile([0, queries, 0], (batch, 1))
    return Documents(_cumulative(lengths_q), _cumulative(lengths_k))


def _check_padded(
    visible: npt.NDArray[np.bool_], breaks: npt.NDArray[np.bool_], queries: int
) -> None:
    """Raises ValueError: documents begin among visible tokens, which transformers would join."""
    shown = visible[:, -queries:]
    row, token = (breaks & shown[:, 1:] & shown[:, :-1]).nonzero()
    if len(row):
        raise ValueError(
            f"position_ids begin again at token {token[0] + 1} of row {row[0]}, and attention_mask "
            "hides padding: give packed documents without padding, and attention_mask=None"
        )


def _of_positions(
    positions: torch.Tensor, breaks: npt.NDArray[np.bool_], batch: int, queries: int, keys: int
) -> Documents | None:
    if queries != keys and (first := int(positions[:, 0].min())) < keys - queries:
        raise ValueError(
            f"position_ids begin with {first} after {keys - queries} cached tokens, so the cache "
            "has several documents: pass packed documents at once, with use_cache=False"
        )
    row, token = breaks.nonzero()
    if not len(row):
        return None
    if queries != keys:
        raise ValueError(
            f"position_ids begin again at token {token[0] + 1} of {queries} that follow "
            f"{keys - queries} cached ones: pass packed documents at once, with use_cache=False"
        )
    rows = len(positions)
    begins = row * queries + token + 1
    starts = np.union1d(np.arange(rows) * queries, begins)
    if rows == 1:  # of every row of the batch
        starts = np.concatenate([starts + i * queries for i in range(batch)])
    return _of_begins(starts, batch * queries)


def _of_begins(begins: Ints, tokens: int) -> Documents:
    cu = torch.from_numpy(np.append(begins, tokens))
    return Documents(cu, cu)


def _cumulative(lengths: Ints) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
