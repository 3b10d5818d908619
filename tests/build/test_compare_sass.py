"""If this fails, a change of the machine code passes as none. The comparison of two builds' machine
code, on listings and remarks that compilers wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import compare_sass
from ringfa3.build.units import UNITS
from tests.support.compiler_listings import LISTING, REMARKS

UNIT = UNITS[0]


def build(cache: Path, listing: str, remarks: str = REMARKS, digit: str = "a") -> Path:
    """A cache with one build of UNIT, whose listing stands in its library."""
    entry = cache / f"{UNIT.name}-{digit * 16}-{digit * 8}"
    entry.mkdir(parents=True)
    (entry / "kernel.so").write_text(listing)
    (entry / "ptxas.txt").write_text(remarks)
    return entry


@pytest.mark.parametrize(
    ("listing", "remarks", "status", "said"),
    [
        (LISTING, REMARKS, 0, "equal, 50 instructions (128 registers, no spill)"),
        (LISTING.replace("forward_kernel", "_Z5otherv"), REMARKS, 0, "equal, 50"),
        (LISTING.replace("UR24, UPT", "UR25, UPT"), REMARKS, 1, "first difference: /*1280*/"),
        (LISTING.replace("0x000e24", "0x000e28"), REMARKS, 1, "first difference: /*0000*/"),
        (LISTING.replace("/*ff80*/", "/*ff90*/"), REMARKS, 1, "first difference: /*ff80*/"),
        (LISTING + LISTING, REMARKS, 1, "1 kernels, now 2"),
        (LISTING, REMARKS.replace("128 reg", "130 reg"), 1, "same code, other remarks"),
        (LISTING, REMARKS.replace("0 bytes spill s", "8 bytes spill s"), 1, "same code, other"),
    ],
)
def test_units_are_equal_or_the_first_difference_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listing: str,
    remarks: str,
    status: int,
    said: str,
) -> None:
    """Exact equality; one changed register, scheduling word or address is a difference."""
    monkeypatch.setattr(compare_sass, "disassemble", lambda path: path.read_text())
    build(tmp_path / "old", LISTING)
    build(tmp_path / "new", listing, remarks)
    arguments = [str(tmp_path / "old"), str(tmp_path / "new"), "--units", UNIT.name]
    assert compare_sass.main(arguments) == status
    out = capsys.readouterr().out
    assert out.startswith(f"{UNIT.name}: ")
    assert said in out


def test_kernels_match_in_any_order_and_without_their_names() -> None:
    short = LISTING[: LISTING.index("/*4620*/")]
    one = compare_sass.kernels(LISTING + short)
    other = compare_sass.kernels(short.replace("forward_kernel", "_Z1av") + LISTING)
    assert compare_sass.difference(one, other) is None
    assert [len(code) for code in one] == sorted(len(code) for code in one)


def test_the_latest_build_counts_and_a_missing_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (build(tmp_path / "old", LISTING, digit=d) for d in "ab")
    os.utime(second / "kernel.so", (1, 1))
    assert compare_sass.latest(tmp_path / "old", UNIT) == first
    assert compare_sass.main([str(tmp_path / "old"), str(tmp_path), "--units", UNIT.name]) == 2
    assert f"has no build of {UNIT.name}" in capsys.readouterr().err
