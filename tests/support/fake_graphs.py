"""A stand-in for CUDA graphs: captures the actions of streams and replays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ringfa3.symmetric import cuda_driver

if TYPE_CHECKING:
    from tests.support.fake_cuda import Action, FakeCuda, FakeStream


class FakeGraph:
    """A captured graph: nodes, and for each the nodes that it depends on."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self.cuda, self.over = cuda, False
        self.nodes: list[Action] = []
        self.needs: list[frozenset[int]] = []
        self.behind: list[frozenset[int]] = []  # all nodes before each
        self.streams = [stream]
        stream.graph = self

    def add(
        self, can: Callable[[], bool], act: Callable[[], None], behind: frozenset[int]
    ) -> frozenset[int]:
        assert not self.over
        self.nodes.append((can, act))
        self.needs.append(behind)
        self.behind.append(behind.union(*(self.behind[node] for node in behind)))
        return frozenset([len(self.nodes) - 1])

    def join(self, stream: FakeStream, behind: frozenset[int]) -> None:
        if self.over:
            raise cuda_driver.DriverError("an event that a graph has recorded is awaited outside")
        assert stream.graph in (None, self)
        if stream.graph is None:
            self.streams.append(stream)
        stream.graph, stream.behind = self, stream.behind | behind

    def end(self) -> None:
        self.over = True
        whole = self.streams[0].behind
        joined = whole.union(*(self.behind[node] for node in whole))
        lost = [s for s in self.streams if not s.behind <= joined]
        for stream in self.streams:
            stream.graph, stream.behind = None, frozenset()
        if lost:
            raise cuda_driver.DriverError(f"{len(lost)} captured streams have not joined")

    def replay(self) -> None:
        """Runs on the compute stream: nodes side by side, or one by one in any order that the graph
        allows."""
        run = FakeRun(self, one_by_one=self.cuda.rng.random() < 0.5)
        with self.cuda.lock:
            self.cuda.runs.append(run)
        self.cuda.until(lambda: not run.left)
        with self.cuda.lock:
            self.cuda.runs.remove(run)


class FakeRun:
    """One replay."""

    def __init__(self, graph: FakeGraph, one_by_one: bool) -> None:
        self.graph, self.one_by_one = graph, one_by_one
        self.left = dict.fromkeys(range(len(graph.nodes)))
        self.next: int | None = None  # one by one

    def able(self) -> Iterator[Callable[[], None]]:
        free = self._free() if self.next is None else [self.next]
        if self.one_by_one and free:
            self.next = self.graph.cuda.rng.choice(free) if self.next is None else self.next
            free = [self.next]
        for node in free:
            if self.graph.nodes[node][0]():
                yield lambda node=node: self._run(node)  # type: ignore[misc]

    def _free(self) -> list[int]:
        return [n for n in self.left if not any(x in self.left for x in self.graph.needs[n])]

    def _run(self, node: int) -> None:
        self.graph.nodes[node][1]()
        del self.left[node]
        self.next = None
