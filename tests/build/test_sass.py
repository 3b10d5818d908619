"""If this fails, a kernel with serialised products or spills is released, and is slow. The
checks read listings and remarks of real compilers, and copies of these with a fault."""

from __future__ import annotations

import pytest

from ringfa3.build import sass
from tests.support.compiler_listings import ADVISORIES, LISTING, REMARKS, SPILLED


def without(*addresses: str) -> str:
    lines = LISTING.splitlines(keepends=True)
    return "".join(line for line in lines if not any(f"/*{a}*/" in line for a in addresses))


def after(address: str, instruction: str) -> str:
    """The listing with one more instruction behind an address."""
    more = f"        /*{int(address, 16) + 8:04x}*/        {instruction} ;\n"
    lines = LISTING.splitlines(keepends=True)
    return "".join(line + more * (f"/*{address}*/" in line) for line in lines)


def test_good_remarks_have_no_fault() -> None:
    assert sass.ptxas_faults(REMARKS) == []


@pytest.mark.parametrize("code", ADVISORIES)
def test_serialised_wgmmas_are_a_fault(code: str) -> None:
    assert sass.ptxas_faults(REMARKS + ADVISORIES[code]) == [ADVISORIES[code]]


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7512", "C7517"])
def test_the_code_of_a_remark_is_enough(code: str) -> None:
    line = f"ptxas info    : ({code}) Potential Performance Loss: in other words"
    assert sass.ptxas_faults(line + "\n" + REMARKS) == [line]


def test_the_words_of_a_remark_are_enough() -> None:
    line = ADVISORIES["C7511"].replace("C7511", "C7599")
    assert sass.ptxas_faults(REMARKS + line) == [line]


@pytest.mark.parametrize(
    ("stores", "loads", "fault"), [(32, 32, False), (36, 0, True), (0, 36, True)]
)
def test_more_than_32_bytes_of_spill_are_a_fault(stores: int, loads: int, fault: bool) -> None:
    """Of any kernel of the library, here the first of two."""
    spill = f"{stores} bytes spill stores, {loads} bytes spill loads"
    remarks = REMARKS.replace("0 bytes spill stores, 0 bytes spill loads", spill) + REMARKS
    assert sass.ptxas_faults(remarks) == fault * [
        f"{stores} bytes of spill stores and {loads} of spill loads, at most 32 are allowed"
    ]


def test_no_remarks_are_a_fault() -> None:
    assert sass.ptxas_faults("") == [
        "ptxas's remarks name no kernel: was it compiled with -Xptxas=-v?"
    ]


def test_the_steady_loop_is_the_loop_over_blocks() -> None:
    """It includes the wait behind the kernel's end, and neither the tile loop nor code between."""
    (code,) = sass._kernels(LISTING)
    (loop,) = sass.steady_loops(code)
    addresses = [code[i].address for i in sorted(loop)]
    assert (addresses[0], addresses[-1]) == (0x3AC0, 0xF8C0)
    assert sum(code[i].wgmma for i in loop) == 6
    assert not any(0x79A0 <= a <= 0xF680 or a >= 0xFAD0 for a in addresses)


def test_spills_of_other_warps_are_no_fault_of_the_loop() -> None:
    """Producer warps have local loads and stores, at addresses between the loop's."""
    assert "STL" in LISTING
    assert sass.sass_faults(LISTING) == []


@pytest.mark.parametrize("address", ["3ac0", "4780", "4cd0", "f890"])
@pytest.mark.parametrize("instruction", ["LDL.LU R12, [R1]", "STL.64 [R1+0xd0], R110"])
def test_local_memory_in_the_steady_loop_is_a_fault(address: str, instruction: str) -> None:
    """Before, between and after the wgmmas, and in the wait behind the end."""
    assert sass.sass_faults(after(address, instruction)) == [
        f"1 local loads and stores in the loop of wgmmas at 0x3ac0, first {instruction} at "
        f"{int(address, 16) + 8:#x}"
    ]


@pytest.mark.parametrize("address", ["1280", "79a0", "8f60", "fad0"])
def test_local_memory_once_a_tile_is_no_fault(address: str) -> None:
    assert sass.sass_faults(after(address, "LDL R3, [R1+0xc]")) == []


def test_every_kernel_of_a_library_is_judged() -> None:
    assert len(sass.sass_faults(SPILLED + LISTING)) == 1
    assert len(sass.sass_faults(LISTING + SPILLED)) == 1


def test_a_branch_under_two_conditions_may_fall_through() -> None:
    """`BRA P1, 0x..` without a guard. As an unconditional jump it would cut the loop in two."""
    listing = LISTING.replace("@!P0 BRA P1, 0x5b30", "     BRA P1, 0xf680")
    (code,) = sass._kernels(listing)
    assert sass.steady_loops(code) == sass.steady_loops(next(iter(sass._kernels(LISTING))))


def test_a_listing_without_wgmmas_is_a_fault() -> None:
    assert sass.sass_faults("") == ["no kernel in the listing has a wgmma"]
    assert sass.sass_faults(LISTING.replace("HGMMA", "HADD")) == [
        "no kernel in the listing has a wgmma"
    ]
    assert sass.sass_faults(without("7990", "c350")) == ["no loop holds the wgmmas"]
    assert sass.sass_faults(after("5b30", "@P2 BRX R4 -0x4a90")) == [
        "a jump to a computed address at 0x5b38: loops cannot be found"
    ]
