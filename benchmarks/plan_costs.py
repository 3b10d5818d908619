"""Measures plans of masks and of documents: CPU time of one thread, best of 5, in ms.

    python -m benchmarks.plan_costs [--nodes 1000] [--tokens 262144] [--ranks 8]

Prints for each mask how long it takes to make it, to check its spans as `Mask(spans, ...)` does,
and to make a plan with the tile schedules of forward and backward in 16 bits. Where spans are
clipped, the plan makes its refined bands later, for the first launch that needs them. The last row
has most of these: each image of one document meets all keys before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from ringfa3 import Mask, plan_context
from ringfa3.planning import context_plan
from ringfa3.planning.placement.costs import Ints

REPEATS = 5


def documents(nodes: int, tokens: int) -> Ints:
    """Cumulative lengths, which differ by up to a factor of seven."""
    share = np.random.default_rng(0).integers(64, 449, nodes).cumsum()
    return np.concatenate(([0], share * tokens // share[-1]))


def random_parents(nodes: int) -> list[int]:
    """Depth first: each node is a child of the one before or of an ancestor of that."""
    rng, path, parents = np.random.default_rng(1), [-1], [-1]
    for node in range(1, nodes):
        path = [*path, node - 1][: int(rng.integers(2, len(path) + 2))]
        parents.append(path[-1])
    return parents


def masks(nodes: int, tokens: int) -> dict[str, Callable[[], Mask]]:
    cu = documents(nodes, tokens)
    lengths = np.diff(cu).tolist()
    middle, image = (cu[:-1] + cu[1:]) // 2, np.diff(cu) // 6
    responses = [tokens // 2, *np.diff(documents(nodes - 1, tokens - tokens // 2)).tolist()]
    return {
        "documents": lambda: Mask.documents(cu),
        "documents, an image each": lambda: Mask.documents(cu).with_bidirectional(
            middle.tolist(), (middle + image).tolist()
        ),
        "documents, window and 4 first keys": lambda: Mask.documents(
            cu, window_size=(127, 0), first_keys=4
        ),
        "random tree": lambda: Mask.tree(lengths, random_parents(nodes)),
        "one prompt": lambda: Mask.tree(responses, [-1] + [0] * (nodes - 1)),
        "chain": lambda: Mask.tree(lengths, range(-1, nodes - 1)),
        "one document with so many images": lambda: Mask.documents(tokens).with_bidirectional(
            middle.tolist(), (middle + image).tolist()
        ),
    }


def best(call: Callable[[], object]) -> float:
    """Milliseconds of CPU time of a call that finds no plan of earlier ones."""
    found = []
    for _ in range(REPEATS):
        context_plan._cached_plan.cache_clear()
        context_plan._cached_mask_plan.cache_clear()
        begin = time.thread_time()
        call()
        found.append(time.thread_time() - begin)
    return min(found) * 1e3


def plan_cost(given: Mask | Ints, ranks: int) -> float:
    def make() -> None:
        hops = plan_context(given, (0, ranks)).hops.clipped
        hops.forward(128)
        hops.backward(128, 64)

    return best(make)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000, help="or documents, or images")
    parser.add_argument("--tokens", type=int, default=1 << 18)
    parser.add_argument("--ranks", type=int, default=8)
    asked = parser.parse_args()
    if asked.nodes < 2 or asked.tokens < 64 * asked.nodes or asked.ranks < 1:
        parser.error("give at least 2 nodes, 64 tokens for each, and a rank")
    plain = plan_cost(documents(asked.nodes, asked.tokens), asked.ranks)
    print(f"{'':36}{'make':>8}{'check':>8}{'plan':>8}")
    print(f"{'documents without a mask':36}{'':16}{plain:8.1f}")
    for name, make in masks(asked.nodes, asked.tokens).items():
        mask = make()
        check = best(lambda given=mask: Mask(given.spans, given.q_tokens))
        print(f"{name:36}{best(make):8.1f}{check:8.1f}{plan_cost(mask, asked.ranks):8.1f}")


if __name__ == "__main__":
    main()
