"""If this fails, kernels cannot be compiled where CUTLASS is missing or downloads fail. CUTLASS's
headers: their sources in order, and the one download, by the real pip, offline."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest

from ringfa3.build import cutlass
from ringfa3.errors import BuildError

pytestmark = pytest.mark.skipif(not cutlass.pip_is_installed(), reason="pip is not installed")
FIND_SPEC = importlib.util.find_spec
INFO = "nvidia_cutlass-4.2.0.0.dist-info"
VERSION = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
FILES = {
    "cutlass_library/__init__.py": "",
    "cutlass_library/source/include/cute/tensor.hpp": "// tensor\n",
    "cutlass_library/source/include/cutlass/version.h": VERSION,
    "cutlass_library/source/examples/example.cu": "// not a header\n",
    f"{INFO}/licenses/LICENSE.txt": "the licence\n",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\n"
    "Requires-Dist: no-such-package\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
}


@pytest.fixture
def index(tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip finds wheels; the machine has no headers."""
    folder = tools / "index"
    folder.mkdir()
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(cutlass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def offer(index: Path, files: dict[str, str] = FILES) -> Path:
    path = index / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def test_one_wheel_is_downloaded_once_and_only_its_headers_stay(
    tools: Path, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = offer(index)
    assert cutlass.find_include_folder() is None
    include = cutlass.include_folder()
    said = capfd.readouterr()
    assert said.err.splitlines() == [
        "ringfa3: CUTLASS's headers not found: fetching the wheel nvidia-cutlass>=4.2,<5 with "
        "pip, about 6 MB"
    ]
    entry = tools / "cache" / cutlass.ENTRY
    assert include == entry / "include"
    assert {str(p.relative_to(entry)) for p in entry.rglob("*") if p.is_file()} == {
        "include/cute/tensor.hpp",
        "include/cutlass/version.h",
        "LICENSE.txt",
    }
    assert cutlass.cutlass_version(include) == "4.2.0"
    wheel.unlink()
    assert cutlass.include_folder() == cutlass.find_include_folder() == include
    assert capfd.readouterr() == ("", "")
    assert sorted(p.name for p in (tools / "cache").iterdir()) == [
        "cutlass-4.2",
        "cutlass-4.2.lock",
    ]


def test_the_error_of_pip_names_its_command_and_two_remedies(tools: Path, index: Path) -> None:
    with pytest.raises(BuildError) as error:
        cutlass.include_folder()
    said = str(error.value)
    assert "`-m pip download nvidia-cutlass>=4.2,<5 --no-deps --only-binary=:all:`" in said
    assert "No matching distribution found" in said
    assert "pip install --no-deps nvidia-cutlass, or set CUTLASS_PATH" in said
    left = sorted(p.name for p in (tools / "cache").iterdir())
    assert left == ["cutlass-4.2.failed", "cutlass-4.2.lock"]


def test_a_wheel_without_headers_raises(index: Path) -> None:
    offer(index, {k: v for k, v in FILES.items() if not k.endswith("tensor.hpp")})
    with pytest.raises(BuildError, match="has no CUTLASS headers"):
        cutlass.include_folder()
    assert cutlass.find_include_folder() is None


def test_an_installed_package_is_used(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutlass.importlib.util, "find_spec", FIND_SPEC)
    with zipfile.ZipFile(offer(index)) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert cutlass.include_folder() == tmp_path / "site/cutlass_library/source/include"


def test_cutlass_path_comes_first_and_a_wrong_one_raises(
    tools: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(index)
    cutlass.include_folder()
    monkeypatch.setenv("CUTLASS_PATH", str(tools))
    assert cutlass.include_folder() == tools / "include"
    monkeypatch.setenv("CUTLASS_PATH", "/nowhere")
    with pytest.raises(BuildError, match=r"CUTLASS_PATH=/nowhere has no include/cute/tensor\.hpp"):
        cutlass.include_folder()
