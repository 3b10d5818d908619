"""Finds the schedule of a call, and links it: fills in the addresses that one process alone has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch

from ringfa3.kernels import dispatch, forward
from ringfa3.kernels.dispatch import has_kernels, log_once
from ringfa3.kernels.launch import entry_address, num_ctas
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import ALIGNMENT, Gpu, ScheduleError
from ringfa3.pass_interface import HostCode
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.schedules.schedule import Code, Inputs, Part, build

# The address of a symbol, by its type, from what follows the type.
Resolvers = Mapping[str, Callable[..., int]]


def signature_of(
    pass_type: str, inputs: Inputs, settings: Hashable, gpu: Gpu | None = None
) -> Hashable:
    """What the schedule of a plan's call depends on; the first input is given.

    settings: on which launches depend, besides the inputs. gpu: as in `build`.
    """
    assert inputs[0] is not None
    layouts = (None if x is None else _layout(x) for x in inputs)
    sms = num_ctas(inputs[0].device) if gpu is None else gpu.num_sms
    return pass_type, sms, settings, *layouts


def _layout(x: torch.Tensor) -> Hashable:
    """TMA addresses 16 bytes."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT


def code_of(
    plan: ContextPlan, signature: Hashable, inputs: Inputs, code: HostCode, prepared: bool = True
) -> Code | None:
    """The schedule of a call with this host code, as it was prepared or built now.

    None: no schedule says what the call does. prepared: whether a prepared one is right.
    """
    found: Code | None = plan.prepared.get(signature) if prepared else None
    first = inputs[0]
    assert first is not None
    if found is not None and dispatch.unit_for("forward", first) is None:
        found = None  # the GPU has no kernels
    if found is not None and has_kernels(x[1] for x in found.symbols if x[0] == "entry"):
        return found
    if plan.prepared and prepared:
        log_once(
            f"a plan was prepared, but not for {signature}: its first call builds a schedule; give "
            "plan_context the KernelSpec of that call"
        )
    try:
        return build(inputs, code).code()
    except ScheduleError:
        return None


def no_memory(part: Part) -> torch.Tensor:
    raise AssertionError(f"a call of one GPU has no {part.symbol}")


def link(
    library: Any,
    code: Code,
    stream: CurrentStream,
    resolvers: Resolvers = {},  # noqa: B006  never changed
    tensor_of: Callable[[Part], torch.Tensor] = no_memory,
) -> Any:
    """The program of the C++ launcher for calls on a stream. Uploads tables that no call has
    needed.

    Raises BuildError, OSError: a kernel cannot be built or loaded.
    """
    tables = [table.on(stream).memory for table in code.tables]
    held = list(tables)

    def counter() -> int:
        memory = forward.counters.get(stream)
        held.append(memory)
        return memory.data_ptr()

    known: dict[str, Callable[..., int]] = {
        "table": lambda number: tables[number].data_ptr(),
        "entry": entry_address,
        "counter": counter,
        **resolvers,
    }
    begins = [_signed(known[symbol[0]](*symbol[1:])) for symbol in code.symbols]
    words = code.words.copy()
    words[code.at] += np.array(begins, np.int64)[code.symbol_of]
    memory = *map(tensor_of, code.parts), *held
    return library.program(words.tobytes(), code.names, memory, code.kept)


def _signed(address: int) -> int:
    """64 bits as the signed integer with the same bits."""
    return address - (1 << 64) if address >= 1 << 63 else address
