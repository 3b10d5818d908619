"""If this fails, a new transport cannot be added without changes to its callers. Ring passes have
the interface of `ringfa3.pass_interface`; no caller asks for their type."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import ringfa3
from ringfa3.pass_interface import MAX_SPLIT_TOKENS, LocalPass, RingPass, first_heads
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.symmetric.ring_pass import SymmetricRingPass

PASSES = (LocalPass, P2PRingPass, SymmetricRingPass)


def parameters(function: object) -> list[tuple[str, object]]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(name, p.default) for name, p in signature.parameters.items()]


@pytest.mark.parametrize("method", ["start", "run"])
@pytest.mark.parametrize("kind", PASSES)
def test_signatures_are_those_of_the_interface(kind: type, method: str) -> None:
    assert parameters(getattr(kind, method)) == parameters(getattr(RingPass, method))


def test_constructors_differ_in_the_transport_alone() -> None:
    """The last two parameters are (plan, pass_type); before them is the transport, if there is
    one."""
    of_local, of_p2p, of_symmetric = (parameters(kind.__init__)[1:] for kind in PASSES)
    assert of_p2p[1:] == of_symmetric[1:] == of_local


def test_short_shards_with_several_kv_heads_split_their_own_heads() -> None:
    """A third of the heads, rounded up, comes first; at least one comes last."""
    assert [first_heads(n, MAX_SPLIT_TOKENS) for n in (1, 2, 3, 4, 8)] == [0, 1, 1, 2, 3]
    assert all(0 < first_heads(n, 1) < n for n in range(2, 65))
    assert first_heads(8, MAX_SPLIT_TOKENS + 1) == 0


@pytest.mark.parametrize("module", ["op", "prepare_call"])
def test_no_caller_asks_for_the_type_of_a_pass_or_transport(module: str) -> None:
    source = (Path(ringfa3.__file__).parent / "ring" / f"{module}.py").read_text()
    asked = {
        ast.unparse(node.args[1])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    }
    assert asked <= {"ContextPlan", "GraphPlan", "int"}
