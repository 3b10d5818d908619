"""If this fails, `make sizes` reports rooms of the tree as larger or smaller than they are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.ci_scripts import ci_script


def test_rooms_of_a_commit_and_of_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted by hand. Files that git ignores or that are no code count nowhere."""
    files = {
        "ringfa3/a.py": "x\n" * 1200,
        "ringfa3/bench/b.py": "x\n" * 30,
        "csrc/c.cuh": "x\n" * 4,
        "docs/dev/d.md": "two words\n\nmore",
        "docs/picture.py": "x\n",
        "tests/data.json": "x\n",
        "ringfa3/ignored.py": "x\n",
        ".gitignore": "ignored.py\n",
        "README.md": "a\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in ("init", "add .", "-c user.name=a -c user.email=a commit -m first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "tests" / "new.py").write_text("x\n" * 7)  # not yet known to git
    (tmp_path / "ringfa3" / "bench" / "b.py").unlink()
    sizes = ci_script("sizes")
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    sizes.main(["HEAD"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["room", "HEAD", "now", "aim"]
    found = {row[:26].strip(): row[26:].split() for row in rows}
    assert found["ringfa3/ but bench, csrc/"] == ["1,204", "1,204", "20,300"]
    assert found["ringfa3/bench/"] == ["30", "0", "5,500"]
    assert found["tests/"] == ["0", "7", "36,000"]
    assert found["docs/ (words)"] == ["3", "3"]
    sizes.main([])  # a clone without the default commit has no column for it
    assert capsys.readouterr().out.splitlines()[0].split() == ["room", "now", "aim"]
    with pytest.raises(SystemExit):
        sizes.main(["nothing"])
    assert "this clone has no commit nothing" in capsys.readouterr().err
