"""If this fails, the pages show other figures than the result files. `python -m ringfa3.bench
tables`: the pages of figures and the files that they are made from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ringfa3.bench.__main__ import main
from ringfa3.bench.common.results import FILE, Results, RingRow
from ringfa3.bench.ring.cases import ring_case
from ringfa3.bench.ring.table import ring_tables
from ringfa3.bench.tables.provenance import command

DOCS = Path(__file__).parent.parent.parent.parent / "docs"


def committed(kind: str, name: str) -> str:
    """The only result folder of a kind and name; between the two are GPU, date and dtype."""
    (folder,) = (DOCS / "results" / kind).glob(f"nvidia-{name}")
    return f"{kind}/{folder.name}"


PAPER = committed("attention", "h200-*-paper-forward")
RING = committed("ring", "h200-x2-*-lengths")


def tables(pages: Path, *options: str) -> int:
    return main(["tables", "--pages", str(pages), *options])


def test_the_committed_pages_are_what_the_result_files_give() -> None:
    assert tables(DOCS, "--check") == 0


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of two result files, in a subfolder, without tables."""
    for name in (PAPER, RING):
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        shutil.copy(DOCS / "results" / name / FILE, folder)
    page = tmp_path / "benchmarks" / "figures.md"
    page.parent.mkdir()
    blocks = [f"<!-- results: {name} -->\n<!-- end -->\n" for name in (PAPER, RING)]
    page.write_text("# Figures\n\n" + "\nProse.\n\n".join(blocks))
    return page


def test_tables_are_written_between_the_markers_alone(page: Path) -> None:
    empty = page.read_text()
    assert tables(page.parents[1], "--check") == 1
    assert page.read_text() == empty
    assert tables(page.parents[1]) == 0
    text = page.read_text()
    assert re.sub(r"(<!-- results: [^>]*>\n).*?(?=<!-- end)", r"\1", text, flags=re.S) == empty
    assert tables(page.parents[1], "--check") == 0
    assert tables(page.parents[1]) == 0
    assert page.read_text() == text


def test_figures_are_those_of_the_file(page: Path) -> None:
    """Against the JSON itself: a geometric mean, a row, a ring's share of one GPU."""
    assert tables(page.parents[1]) == 0
    text = page.read_text()
    paper = json.loads((page.parents[1] / "results" / PAPER / FILE).read_text())
    s = paper["summary"][0]
    assert f"| {s['geometric_mean']:.3f} | {s['worst']:.3f} ({s['worst_row']}) |" in text
    row = paper["rows"][5]
    fa3 = row["matches"]["FA3"]
    low, high = fa3["interval"]
    head = f"| {row['label']} | 32:32 | {row['head_dim']} | {fa3['tflops'][0]:.0f} | "
    (line,) = (x for x in text.splitlines() if x.startswith(f"| forward | {row['mask']} {head}"))
    assert f"| {fa3['tflops'][1]:.0f}, {fa3['ratio']:.3f} [{low:.3f}, {high:.3f}] |" in line
    row = json.loads((page.parents[1] / "results" / RING / FILE).read_text())["rows"][0]
    share = min(row["matches"][name]["ratio"] for name in row["yardsticks"])
    assert f"| {row['direction']} | {row['world']} | {row['label']} | " in text
    assert f" {share:.3f} [" in text
    date = paper["machine"]["date"][:10]
    for word in (f"NVIDIA H200, {date}", "inputs N(0,1)", f"`{paper['machine']['sources']}`"):
        assert word in text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("memory", "| 2 | x | out of memory |"),
        ("host", "| backward | x | out of memory |  |"),
        ("error", "| backward | 2 | x | out of memory |  |"),
        ("checkpoint", "| 2 | x | out of memory |  |  |  |  |"),
        ("fresh", "| 2 | x | out of memory |  |  |  |  |"),
    ],
)
def test_a_row_without_figures_says_why(name: str, line: str) -> None:
    """Of every set of rings that has a table of its own."""
    results = Results.load(DOCS / "results" / RING / FILE)
    row = RingRow.of(ring_case("x", "x", (64,), 2), "backward", "bf16", ["RingFA3", "kept"])
    row.set, row.stopped = name, "out of memory"
    results.rows = [row]
    (table,) = ring_tables(results)
    assert line in list(table.markdown())


def test_a_changed_result_is_noticed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables(page.parents[1]) == 0
    path = page.parents[1] / "results" / PAPER / FILE
    content = json.loads(path.read_text())
    content["rows"][3]["matches"]["FA3"]["ratio"] *= 1.01
    path.write_text(json.dumps(content))
    assert tables(page.parents[1], "--check") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"results: {PAPER} differs from its file" in line
    assert tables(page.parents[1]) == 0
    assert tables(page.parents[1], "--check") == 0


def test_a_file_or_row_that_no_block_shows_must_be_listed(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tables(page.parents[1]) == 0
    text = page.read_text()
    page.write_text(text.replace(f"results: {RING}", f"results: {RING} direction=forward"))
    assert tables(page.parents[1]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"3 of 6 rows of results/{RING}/{FILE} are in no block" in line
    page.write_text(page.read_text() + f"\n* `{RING}`: its backward is superseded.\n")
    assert tables(page.parents[1], "--check") == 0
    shutil.copytree(page.parents[1] / "results" / PAPER, page.parents[1] / "results" / f"{PAPER}-2")
    assert tables(page.parents[1], "--check") == 1
    assert f"36 of 36 rows of results/{PAPER}-2/{FILE}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("ring/missing", "there is no such file"),
        (f"{PAPER} head=64", "unknown filter head=64; known are direction=..., "),
        (f"{PAPER} direction=sideways", "selects no row"),
    ],
)
def test_a_block_that_cannot_be_made_is_one_line_and_code_2(
    page: Path, capsys: pytest.CaptureFixture[str], block: str, text: str
) -> None:
    page.write_text(f"<!-- results: {block} -->\n<!-- end -->\n")
    assert tables(page.parents[1]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_folder_without_blocks_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tables(tmp_path / "none") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tables: no page in" in line


def test_blocks_over_several_files(page: Path) -> None:
    """The means of two files, and a line for each file of a benchmark, with links from the page."""
    page.write_text(
        page.read_text()
        + f"\n<!-- gains: {PAPER} {RING} -->\n<!-- end -->\n<!-- runs: ring -->\n<!-- end -->\n"
    )
    assert tables(page.parents[1]) == 0
    text = page.read_text()
    s = json.loads((DOCS / "results" / PAPER / FILE).read_text())["summary"]
    fa3 = next(x for x in s if x["peer"] == "FA3")
    cell = f"{fa3['geometric_mean']:.2f} ({fa3['worst']:.2f})"
    assert f"| `paper` | forward | {fa3['head_dim']} | 1 x H200 | {cell} | " in text
    assert "| `lengths` | backward | 128 | 2 x H200 |  |  |  |" in text
    assert f"| [lengths: forward, backward](../results/{RING}/{FILE}) | 2 x H200 | " in text
    assert (page.parent / f"../results/{RING}/{FILE}").exists()


def test_options_of_peers_and_errors_are_in_the_command() -> None:
    results = Results.load(DOCS / "results" / PAPER / FILE)
    results.settings |= {"sets": ["scores"], "peers": ["fa3", "fa4"], "sample_ms": 10.0}
    results.machine["FA4"] = {"module": "flash_attn.cute", "folder": "fa4"}
    results.settings |= {"errors_only": True, "one_by_one": True}
    results.rows = [row for row in results.rows if row.head_dim == 128]
    assert command(results) == (
        "python -m ringfa3.bench attention --set scores --direction fwd --head-dim 128 "
        "--peers fa3 fa4 --sample-ms 10 --errors-only --one-by-one --fa3 fa3.so --fa4 fa4"
    )


def test_commands_are_those_of_the_settings() -> None:
    commands = {
        "/".join(path.parts[-3:-1]): command(Results.load(path))
        for path in DOCS.glob(f"results/*/*/{FILE}")
    }
    assert commands[PAPER] == (
        "python -m ringfa3.bench attention --set paper --direction fwd --fa3 fa3.so --fa4 fa4"
    )
    assert commands[committed("attention", "h200-*-ablation")] == (
        "python -m ringfa3.bench attention --set ablation --dtype fp16 --direction fwd"
    )
    assert commands[RING] == (
        "torchrun --standalone --nproc-per-node 2 -m ringfa3.bench ring --set lengths "
        "--transport symmetric nccl --worlds 2 --longest 65536 --fa3 fa3.so"
    )
    assert commands[committed("ring", "h200-x4-*-lengths-forward")] == (
        "torchrun --standalone --nproc-per-node 4 -m ringfa3.bench ring --set lengths "
        "--direction fwd --transport symmetric nccl --worlds 4 --fa3 fa3.so"
    )
