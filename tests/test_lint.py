"""If this fails, pages and errors get words that readers do not understand. The lint of words: it
finds what it is for, and no allowed phrase."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.ci_scripts import ci_script


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    return ci_script("lint")


LONG = "The plan " + "maps tokens and " * 15 + "ends."
PAGES = {
    f"{LONG}\n": "a sentence of 48 words",
    "A ring moves keys. Of a plan it has tables.\n": "'Of a': write",
    "**Of every plan** it has tables.\n": "'**Of every': write",
    "Executors of a plan run.\n": "'Executors': write PyTorch fallback",
    "| a | the context group |\n": "'context group': write CP group",
    "Word " * 1501 + "\n": "1501 words; at most 1500",
}
CODE = {
    "x = 1\n": "no docstring",
    '"""A module."""\n' * 401: "401 lines; at most 400",
    '"""A module."""\nraise ValueError(f"{x} is not to be found")\n': "'not to be found'",
    '"""A module."""\nREMEDY = "ask the executor"\n': "'executor'",
    '"""A module."""\ndef tell_all(): ...\n': "'tell'",
    '"""A module."""\ndef run(pass_kind): ...\n': "'kind'",
    '"""A module."""\nself.forgotten = 0\n': "'forgotten'",
}


@pytest.mark.parametrize(("text", "found"), PAGES.items(), ids=range(len(PAGES)))
def test_pages(lint: ModuleType, text: str, found: str) -> None:
    assert [f.text for f in lint.page("docs/new.md", text) if found in f.text]


@pytest.mark.parametrize(("text", "found"), CODE.items(), ids=range(len(CODE)))
def test_code(lint: ModuleType, text: str, found: str) -> None:
    assert [f.text for f in lint.code("ringfa3/new.py", text) if found in f.text]


def test_what_is_allowed(lint: ModuleType) -> None:
    """Code, allowed phrases, docstrings, names of kernels."""
    page = "The peers run in turn.\n\n```python\nkind = 1  # Of a plan\n```\n\nUse `kind` here.\n"
    assert not list(lint.page("docs/new.md", page))
    code = '"""Nobody sees the executor."""\nx = ["kind"]\n'
    assert not list(lint.code("ringfa3/new.py", code))


def test_a_package_of_many_modules(lint: ModuleType) -> None:
    """Folders count alone, without those inside; those of tests may have more."""
    names = [f"train/new/m{i}.py" for i in range(14)]
    others = ["train/new/__init__.py", "train/new/inside/m.py", "train/new/notes.md"]
    assert not list(lint.packages([*names, *others, *(f"tests/test_{i}.py" for i in range(15))]))
    (finding,) = lint.packages([*names, "train/new/more.py"])
    assert (finding.file, finding.text) == ("train/new", "15 modules; at most 14")


def test_names_of_kernels(lint: ModuleType) -> None:
    (finding,) = lint.code("csrc/new.cuh", "int x;\nCUTE_DEVICE void spoil_row(int x) {}\n")
    assert (finding.line, "'spoil'" in finding.text) == (2, True)
