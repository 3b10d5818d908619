"""Where figures come from: device, date, versions, kernels, inputs and command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ringfa3.bench.attention.cases import HEAD_DIMS, PEERS, SCORES
from ringfa3.bench.common.cases import DIRECTIONS
from ringfa3.bench.common.results import FILE, Results, RingRow, Row
from ringfa3.bench.common.timing import SAMPLE_MS
from ringfa3.bench.ring.cases import LENGTHS, RING_TOKENS


def provenance(name: str, results: Results, rows: Sequence[Row], base: str) -> Iterator[str]:
    """Lines of Markdown for some rows of a result file.

    name: its folder below results/; base: the path to results/ from the page
    """
    m, s = results.machine, results.settings
    gpus = f"{m['ranks']} x " if "ranks" in m else ""
    versions = [f"PyTorch {m['torch']}"]
    if nccl := m.get("nccl"):
        versions.append(f"NCCL {nccl}")
    if cudnn := m.get("cudnn"):
        versions.append(f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}")
    kernels = f"commit `{m['git']}`, " if m.get("git") else ""
    yield (
        f"[`{name.partition('/')[2]}`]({base}/{name}/{FILE}): {gpus}{m['device']}, "
        f"{str(m['date'])[:10]}, {', '.join(versions)}; kernels: {kernels}"
        f"sources `{m['sources']}`; {rows[0].dtype}; inputs {results.inputs};"
        f" {s['pairs']} pairs."
        + ("" if results.complete else " The run was stopped before its last row.")
    )
    yield ""
    yield f"    {command(results)}"
    yield ""


def command(results: Results) -> str:
    """The command line that made a result file, from its settings and rows."""
    s, m = results.settings, results.machine
    ring = results.benchmark == "ring"
    words = [f"torchrun --standalone --nproc-per-node {m['ranks']} -m" if ring else "python -m"]
    words += ["ringfa3.bench", results.benchmark, "--set", *s["sets"]]
    if s["dtype"] != "bf16":
        words += ["--dtype", s["dtype"]]
    if len(DIRECTIONS[s["direction"]]) == 1:
        words += ["--direction", s["direction"]]
    words += _ring_options(results, s) if ring else _attention_options(results)
    words += ["--one-by-one"] * s.get("one_by_one", False)
    for option, key in (("--fa3", "library"), ("--fa4", "folder")):
        found = next((v[key] for v in m.values() if key in _dict(v)), None)
        words += [option, found] if found else []
    return " ".join(words)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _attention_options(results: Results) -> list[str]:
    settings, words = results.settings, []
    dims = sorted({row.head_dim for row in results.rows})
    if {"paper", SCORES} & set(settings["sets"]) and dims != list(HEAD_DIMS):
        words += ["--head-dim", *map(str, dims)]
    if (peers := settings.get("peers", list(PEERS))) != list(PEERS):
        words += ["--peers", *peers]
    if (milliseconds := settings.get("sample_ms", SAMPLE_MS)) != SAMPLE_MS:
        words += ["--sample-ms", f"{milliseconds:g}"]
    return words + ["--errors-only"] * settings.get("errors_only", False)


def _ring_options(results: Results, settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    if settings["transports"] != ["auto"]:
        words += ["--transport", *settings["transports"]]
    ranks = results.machine["ranks"]
    default = sorted({ranks, *(1 << i for i in range(10) if 1 << i < ranks)}, reverse=True)
    if settings["worlds"] != default:
        words += ["--worlds", *map(str, settings["worlds"])]
    tokens = [
        sum(row.lengths)
        for row in results.rows
        if isinstance(row, RingRow) and row.set == LENGTHS and row.world == ranks
    ]
    if tokens and min(tokens) > RING_TOKENS // 16:
        words += ["--shortest", str(min(tokens))]
    if tokens and max(tokens) < RING_TOKENS:
        words += ["--longest", str(max(tokens))]
    return words
