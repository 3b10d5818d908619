"""If this fails, a page tells users something that is not so. The documentation is true: its code
runs as printed, and what it names exists."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import ringfa3
from examples.hf_cp import tiny_model
from ringfa3 import hf
from ringfa3.bench import __main__ as bench
from ringfa3.build import __main__ as build
from ringfa3.build.units import select_units
from tests.support import forward_drawing
from tests.support.markdown import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    code_spans,
    commands,
    links,
)
from tests.support.ranks import Ranks, free_port, sacrifice
from tests.support.snippets import groups_of_two, migrated_step, trained_model
from train.config import register_schema
from train.keys import schema_keys, to_schema_key
from train.pretrain import check_command_line, read_command_line
from train.sections.renamed import RENAMED

README = ROOT / "README.md"
FOLDERS = "ringfa3|train|tests|csrc|configs|docs|examples|benchmarks"
SECTIONS = (
    "parallel|train|checkpoint|guard|run|log|profile|sweep|generate|eval|data|optim|model\\.rope"
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def test_the_readme_prints_its_example() -> None:
    """The block is the file, which runs in tests/test_examples.py, where its output is compared."""
    file = (ROOT / "examples" / "attend.py").read_text()
    code = file[file.index("import os") :]
    assert [content for language, content in blocks(README) if language == "python"] == [code]


def test_the_quickstart_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks run one after the other in one namespace, here on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = [b for b in blocks(ROOT / "docs" / "quickstart.md") if b[0] != "bash"]
    assert [language for language, _ in found] == ["python", "text"] * (len(found) // 2)
    namespace: dict[str, object] = {}
    for (_, code), (_, expected) in zip(found[::2], found[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(code, "quickstart.md", "exec"), namespace)
        assert said.getvalue() == expected


def test_a_model_of_transformers_trains_alike_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """docs/huggingface.md on four ranks: weights of one rank after a step, to within 1e-5 of 1."""
    tiny_model("llama", "eager").save_pretrained(tmp_path)
    (alone,) = sacrifice(1, 60.0, trained_model, str(tmp_path), limit=60.0)
    before = tiny_model("llama", "eager").parameters()
    assert any((x - y).abs().max() > 1e-3 for x, y in zip(alone, before, strict=True))
    for found in ranks.run(4, trained_model, str(tmp_path)):
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_a_migrated_step_is_the_same_on_any_number_of_ranks() -> None:
    """docs/migration.md in torchrun's environment; the page itself makes the group. Loss and
    gradients on four ranks are those of one rank, to within 1e-5 of 1."""
    ((one, expected),) = sacrifice(1, 60.0, migrated_step, free_port(), limit=60.0)
    assert one == 1
    for world, found in sacrifice(4, 60.0, migrated_step, free_port(), limit=60.0):
        assert world == 4  # else each process has trained alone, and the rest proves nothing
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_recipes_run_on_two_groups_of_two(ranks: Ranks) -> None:
    """Outputs of a ring agree with those of one rank; both groups count the labels of both."""
    for transport, valid, difference in ranks.run(4, groups_of_two):
        assert (transport, valid) == ("gloo", 998 + 1098)
        assert difference < 1e-5


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not fragment or fragment in anchors(target), f"{page.name} links to {link}"


@each_page
def test_paths_exist(page: Path) -> None:
    """Every path that begins with a folder of the project, but for those with a NAME in them."""
    named = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./*-]*", page.read_text())
    for path in (name.rstrip(".") for name in named):
        if re.search(r"[A-Z]{4}|\*", path) is None:
            found = (ROOT / path).exists() or (page.parent / path).exists()
            assert found, f"{page.name} names {path}"


@each_page
def test_modules_and_their_names_exist(page: Path) -> None:
    """`ringfa3.a.b` is a module, or a name in one."""
    for dotted in set(re.findall(r"(?<![\w./])ringfa3(?:\.[A-Za-z_]\w*)+", page.read_text())):
        module, _, name = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ImportError:
            assert hasattr(importlib.import_module(module), name), f"{page.name} names {dotted}"


@each_page
def test_commands_can_be_given(page: Path) -> None:
    """Keys, groups, sets and options of the commands in shell blocks; targets of make."""
    register_schema()
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page):
        if "train/pretrain.py" in words:
            given = [w for w in words[words.index("train/pretrain.py") + 1 :] if w != "..."]
            check_command_line(read_command_line(given))
        elif "ringfa3.bench" in words:
            bench.parser().parse_args(words[words.index("ringfa3.bench") + 1 :])
        elif "ringfa3.build" in words:
            asked = build.parser().parse_args(words[words.index("ringfa3.build") + 1 :])
            assert select_units(asked.units)
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), f"{page.name}: make {words[1]}"


@each_page
def test_settings_of_the_trainer_exist(page: Path) -> None:
    known = [*schema_keys(), *(RENAMED if page.name in ("CHANGELOG.md", "upgrade.md") else ())]
    for span in code_spans(page):
        for key in re.findall(rf"(?<![\w/.])((?:{SECTIONS})\.[a-z_]+)(?!\w*[./(])", span):
            if key.rpartition(".")[2] not in ("json", "jsonl", "md", "png", "py", "yaml"):
                assert to_schema_key(key) in known or any(k.startswith(f"{key}.") for k in known), (
                    f"{page.name} names {key}"
                )


def test_the_drawing_of_a_forward_shows_what_its_passes_do() -> None:
    """After a change of ringfa3/planning/exchange/: python -m tests.support.forward_drawing."""
    drawn = re.findall(r">([^<>]*)</t", (ROOT / "docs" / "dev" / "two-hosts.svg").read_text())
    marks = [
        mark for rank in range(forward_drawing.RANKS) for mark in forward_drawing.forward(rank)
    ]
    lines = [line for mark in marks for line in mark.label.splitlines()]
    assert sorted(lines) == sorted(x for x in drawn if x.endswith("keys") or " rows " in x)
    assert len(lines) == 4 * (4 + 4 + 2)  # of four ranks: launches, first and second exchange


def test_every_environment_variable_of_ours_is_documented() -> None:
    sources = [p for folder in ("ringfa3", "train") for p in (ROOT / folder).rglob("*.py")]
    read = {v for p in sources for v in re.findall(r'"(RINGFA3_[A-Z_]+)"', p.read_text())}
    table = (ROOT / "docs" / "install.md").read_text()
    assert read == set(re.findall(r"^\| `(RINGFA3_[A-Z_]+)`", table, re.M))


@cache
def _literals() -> set[str]:
    """Constant parts of all strings in the code."""
    folders = (ROOT / name for name in ("ringfa3", "train"))
    trees = [ast.parse(p.read_text()) for folder in folders for p in folder.rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _messages() -> list[str]:
    """What stands in code, of several words, in the first cells of tables of errors."""
    pages = (ROOT / "docs" / name for name in ("failures.md", "transports.md"))
    lines = [line for page in pages for line in page.read_text().splitlines()]
    cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    found = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    return list(dict.fromkeys(message for message in found if " " in message))


@pytest.mark.parametrize("message", _messages())
def test_documented_errors_are_those_of_the_code(message: str) -> None:
    """At least 0.6 of a message's letters are constant text of the code; the rest are values."""
    known = [
        *(text.strip() for text in _literals() if text.strip() in message),
        *(
            part.strip()
            for part in re.split(r"\d+|\.\.\.|=|'\w+'", message)
            if any(part.strip() in text for text in _literals())
        ),
    ]
    letters = {i for i, letter in enumerate(message) if letter.isalpha()}
    covered = {
        i
        for text in known
        if len(text) >= 6
        for match in re.finditer(re.escape(text), message)
        for i in range(*match.span())
    }
    assert len(covered & letters) >= 0.6 * len(letters), f"the code does not say: {message}"


def test_the_api_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: (?:\S+\n    options: {heading: (\S+)}|(\S+))$", text, re.M)
    names = [f"{module.__name__}.{name}" for module in (ringfa3, hf) for name in module.__all__]
    assert sorted(heading or name for heading, name in shown) == sorted(names)


def test_there_is_a_page_for_each_topic() -> None:
    """The README links each page for users, and some page each page of details."""
    for page in (ROOT / "docs").rglob("*.md"):
        own = page.parent == ROOT / "docs"
        linking = [README] if own else [p for p in PAGES if p != page]
        targets = {
            (p.parent / link.partition("#")[0]).resolve() for p in linking for link in links(p)
        }
        assert page in targets, page
