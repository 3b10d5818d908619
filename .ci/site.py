"""Hooks of MkDocs (`mkdocs.yml`): pages of the site that are no files of docs/, and signatures.

README.md is the first page. A folder that a page links to becomes a page that lists its files.
"""

from __future__ import annotations

import re
from pathlib import Path

from griffe import Extension, Function
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
COPIED = ("CITATION.cff", "LICENSE")
FOLDER_LINK = re.compile(r"\]\(((?:\.\./)*results/[\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name in COPIED:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for folder in sorted({path.parent for path in (DOCS / "results").rglob("*") if path.is_file()}):
        lines = [f"# {folder.name}", "", *(f"* [{x.name}]({x.name})" for x in folder.iterdir())]
        index = str((folder / "index.md").relative_to(DOCS))
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, index, content="\n".join(lines), inclusion=level))
    return files


def on_page_markdown(text: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Links to folders of results lead to their pages."""

    def to_index(link: re.Match[str]) -> str:
        is_folder = not Path(link[1]).suffix
        return f"]({link[1]}/index.md)" if is_folder else link[0]

    return FOLDER_LINK.sub(to_index, text)


class KeywordOnly(Extension):
    """Shows `*` for `*positional`, which only refuses positional arguments by name."""

    def on_function(self, *, func: Function, **_: object) -> None:
        if "positional" in func.parameters:
            del func.parameters["positional"]
