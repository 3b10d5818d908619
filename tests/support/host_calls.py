"""Calls of attention that a test compares between the two hosts, and what they launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func
from ringfa3.kernels.launch import pointer_offsets
from ringfa3.schedules.steps import POINTER, STRUCTURES, pointer_names
from tests.support.fake_kernels import FakeKernels, Launched

# Pointers of launches to tables of a plan, which both hosts share, and into a backward's workspace.
TABLES = {"tiles", "spans", "grid.blocks", "work_units", "earlier"}
FIELDS = ("name", "words", "addresses", "stream")  # of a launch in an `Outcome`
WORKSPACE = {"padded.statistics", "padded.dq", "words", "counter", "dq_semaphore"}


@dataclass(frozen=True)
class Shape:
    """Tokens, heads and layout of q, k and v: (b, s, h, d), or (t, h, d) of documents.

    layout: "plain"; "packed", three parts of one tensor; "heads first", (b, h, s, d) transposed.
    """

    batch: int = 1
    tokens: int = 40
    keys: int = 40
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    layout: str = "plain"
    v_dim: int | None = None  # its head dim, where it is narrower
    documents: tuple[int, ...] | None = None  # lengths

    def inputs(self, seed: int = 0) -> list[torch.Tensor]:
        """q, k, v and a gradient of out."""
        generator = torch.Generator().manual_seed(seed)
        h, hk, d = *self.heads, self.head_dim
        made = []
        if self.layout == "packed":
            whole = torch.randn(self.batch, self.tokens, h + 2 * hk, d, generator=generator)
            made = list(whole.to(self.dtype).split((h, hk, hk), 2))
        else:
            parts = (self.tokens, h, d), (self.keys, hk, d), (self.keys, hk, self.v_dim or d)
            for tokens, heads, dim in parts:
                shape = (self.batch, tokens, heads, dim)
                if self.layout == "heads first":
                    shape = (self.batch, heads, tokens, dim)
                x = torch.randn(shape, generator=generator).to(self.dtype)
                made.append(x.transpose(1, 2) if self.layout == "heads first" else x)
        shape = (*made[0].shape[:-1], made[2].shape[-1])
        made.append(torch.randn(shape, generator=generator).to(self.dtype))
        return [x[0] for x in made] if self.documents else made

    def cumulative(self) -> torch.Tensor:
        assert self.documents is not None
        return torch.tensor([0, *self.documents], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass
class Outcome:
    """Results of a call, and its launches with addresses in terms of tensors."""

    results: list[torch.Tensor]
    launches: list[tuple[str, bytes, tuple[object, ...], int]]

    def differences(self, other: Outcome) -> list[str]:
        """Names of the results and launches that differ in any bit."""
        names = ("out", "lse", "dq", "dk", "dv", "dsink")
        pairs = zip(names, self.results, other.results, strict=False)
        found = [name for name, x, y in pairs if not equal(x, y)]
        if [x[0] for x in self.launches] != [x[0] for x in other.launches]:
            return [*found, f"launches {[x[0] for x in self.launches]}"]
        for mine, theirs in zip(self.launches, other.launches, strict=True):
            for what, x, y in zip(FIELDS, mine, theirs, strict=True):
                if x != y:
                    found.append(f"{what} of {mine[0]}: {_numbers(x)}, not {_numbers(y)}")
        return found


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether shapes, strides, dtypes and bits are equal."""
    alike = (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    words = torch.int32 if x.dtype == torch.float32 else torch.int16
    return alike and torch.equal(x.view(words), y.view(words))


def call(
    kernels: FakeKernels,
    shape: Shape,
    inputs: list[torch.Tensor],
    lengths: torch.Tensor | None = None,
    dlse: bool = False,
    backward: bool = True,
    sink: torch.Tensor | None = None,
    **options: Any,
) -> Outcome:
    """A forward and, if wanted, a backward; `options` are those of `flash_attn_func`."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs[:3]]
    if sink is not None:
        leaves.append(sink.detach().requires_grad_(backward))
        options["sink"] = leaves[3]
    kernels.take()
    if shape.documents is None:
        out, lse = flash_attn_func(*leaves[:3], return_lse=True, **options)
    else:
        cu = shape.cumulative() if lengths is None else lengths
        out, lse = flash_attn_varlen_func(*leaves[:3], cu, cu, return_lse=True, **options)
    results = [out.detach(), lse.detach()]
    known = dict(zip(("q", "k", "v", "dout"), inputs, strict=True))
    if sink is not None:
        known["sink"] = sink
    if backward:
        grads = [inputs[3], lse.detach() + 1] if dlse else [inputs[3]]
        results += torch.autograd.grad([out, lse][: len(grads)], leaves, grads)
    names = ("out", "lse", "dq", "dk", "dv")
    known |= dict(zip(names, results, strict=False))
    return Outcome(results, [in_terms(x, known) for x in kernels.take()])


def _numbers(words: object) -> object:
    return list(memoryview(words).cast("i")) if isinstance(words, bytes) else words


def in_terms(
    launched: Launched, known: dict[str, torch.Tensor]
) -> tuple[str, bytes, tuple[object, ...], int]:
    """(name, words without addresses, addresses in terms of `known`, stream) of a launch."""
    structure = STRUCTURES[launched.name]
    words = bytearray(launched.words)
    places: list[tuple[str, object]] = []
    begin = 0  # of the workspace
    for name, at in zip(pointer_names(structure), pointer_offsets(structure), strict=True):
        address = int.from_bytes(words[at : at + POINTER], "little")
        words[at : at + POINTER] = bytes(POINTER)
        tensor = name.split(".")[0]  # a freed buffer may have had the address of a later result
        owned = tensor in known and known[tensor].data_ptr() == address
        if not address or name in TABLES or (launched.name, name) == ("forward", "counter"):
            places.append((name, address))
        elif name in WORKSPACE:
            begin = begin or address
            places.append((name, address - begin))
        else:
            places.append((name, tensor if owned else "a buffer"))
    return launched.name, bytes(words), tuple(places), launched.stream
