"""If this fails, a wheel with kernels installs where it cannot run, or lacks kernels. Wheels with
compiled kernels: their tags, what is in them, and that other machines load them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ringfa3.build import wheel
from ringfa3.build.__main__ import main
from ringfa3.build.compile import ensure_library, library_stem
from ringfa3.build.units import UNITS, select_units
from ringfa3.errors import BuildError
from tests.support import fake_tools
from tests.support.wheels import install, run_without_compilers

LOAD = """
import ctypes
from ringfa3 import doctor
from ringfa3.build.compile import find_library
from ringfa3.build.units import select_units
(unit,) = select_units(["{unit}"])
library = find_library(unit)
print(library)
print(ctypes.CDLL(str(library)).{function} is not None)
print(doctor.units(False).text)
"""


@pytest.fixture
def compiler(tools: Path) -> Path:
    """An nvcc that compiles C: `threads` for backward units, which need a newer C library."""
    real = subprocess.run(["which", "gcc"], env={"PATH": "/usr/bin:/usr/local/bin"},
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    threads = "#include <pthread.h>\nvoid *f = (void *)pthread_create;"
    (tools / "threads.c").write_text(threads)
    (tools / "plain.c").write_text("#include <stdio.h>\nvoid *f = (void *)puts;")
    body = (
        f"source={tools}/plain.c\n"
        f'case "$arguments" in *backward.cu*) source={tools}/threads.c;; esac\n'
        f'while [ "$1" != -o ]; do shift; done; {real} -shared -fPIC -o "$2" "$source"; exit'
    )
    for name in ("as", "ld"):
        fake_tools.link(tools / "host", name)
    fake_tools.nvcc(tools, body=body)
    return tools


def minor_needed(library: Path) -> int:
    """The newest minor version of glibc that a library's symbols name, by another reader."""
    listing = subprocess.run(
        ["/usr/bin/objdump", "-T", library], capture_output=True, text=True, check=True
    )
    return max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", listing.stdout))


def test_a_wheel_is_tagged_by_what_its_libraries_need(compiler: Path) -> None:
    """The tag's glibc has all symbols, and an older one would not do. No Python or PyTorch."""
    minors = {}
    for name in ("forward-d64-bf16", "backward-d64-bf16"):
        units = select_units([name])
        made = wheel.build_wheel(units, compiler / name)
        tagged = re.fullmatch(
            r"ringfa3-[\d.]+-py3-none-(?:manylinux\w+\.)?manylinux_2_(\d+)_\w+\.whl", made.name
        )
        assert tagged, made.name
        minors[name] = int(tagged[1])
        assert minors[name] >= minor_needed(ensure_library(units[0]))
    assert minors["forward-d64-bf16"] <= 17 < 34 <= minors["backward-d64-bf16"]


def test_a_wheel_holds_the_chosen_libraries_unchanged(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the sources of the kernels, from which the name of a library follows."""
    with pytest.raises(SystemExit) as ended:
        main(["--units", "d64-bf16", "--wheel", str(compiler / "made")])
    assert ended.value.code == 0
    made = Path(capsys.readouterr().out.splitlines()[-1])
    units = select_units(["d64-bf16"])
    assert 1 < len(units) < len(UNITS)
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        found = [n for n in names if n.startswith("ringfa3/libraries/") and not n.endswith("/")]
        assert len(found) == len(units)
        for unit in units:
            (name,) = (n for n in found if n.split("/")[2].startswith(f"{library_stem(unit)}-"))
            assert archive.read(name) == ensure_library(unit).read_bytes()
        assert {"ringfa3/csrc/forward.cu", "ringfa3/csrc/params.h", "ringfa3/py.typed"} <= {*names}
        (facts,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: false" in facts
    assert re.findall("^Tag: (.+)", facts, re.M) == [made.stem.partition("-")[2].partition("-")[2]]


def test_errors_before_a_wheel(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No auditwheel; no hatchling; not in a checkout."""
    units = select_units(["forward-d64-bf16"])
    fake_tools.script(compiler / "python", "echo No module named auditwheel >&2; exit 1")
    with monkeypatch.context() as other:
        other.setattr(sys, "executable", str(compiler / "python"))
        with pytest.raises(BuildError, match=r"pip install 'ringfa3\[wheel\]'.*\nNo module named"):
            wheel.build_wheel(units, compiler)
    with monkeypatch.context() as other:
        other.setitem(sys.modules, "ringfa3.build.wheel", None)
        with pytest.raises(SystemExit, match=r"pip install 'ringfa3\[wheel\]'"):
            main(["--units", "forward-d64-bf16", "--wheel", str(compiler)])
    monkeypatch.setattr(wheel, "source_folder", lambda: compiler / "csrc")
    with pytest.raises(BuildError, match="run it from a checkout"):
        wheel.build_wheel(units, compiler)
    assert not list(compiler.glob("*.whl"))


@pytest.mark.kernels
def test_a_machine_without_a_compiler_loads_the_kernels_of_a_wheel(tmp_path: Path) -> None:
    """In an environment of its own; nothing is compiled. The doctor counts the unit."""
    name = "quantise-d128-bf16"
    made = wheel.build_wheel(select_units([name]), tmp_path)
    python = install(made, tmp_path / "elsewhere")
    program = LOAD.format(unit=name, function="ringfa3_statistics")
    said, errors = run_without_compilers(python, program, tmp_path / "cache")
    library, loads, units = said.splitlines()
    assert Path(library).is_relative_to(tmp_path / "elsewhere")
    assert (loads, units) == ("True", f"1 of {len(UNITS)} built: {name}")
    assert errors == ""
    assert not (tmp_path / "cache").exists()
