"""If this fails, ranks of one host that do not share memory hang. Words that ranks share through
one file: they are the peers', or the ranks say why not."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from ringfa3.errors import StepError
from ringfa3.symmetric import self_test, shared_words
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.self_test import open_backend
from ringfa3.symmetric.shared_words import map_words, shared_file
from ringfa3.symmetric.signals import Signals
from tests.support.fake_cuda import Ranks
from tests.support.fake_group import FakeGroup

CPU = torch.device("cpu")
WORDS = 1024 // shared_words.BYTES


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Iterator[Path]:
    """Stands in for /dev/shm; empty at the end, as no file outlives the ranks that map it."""
    (made := tmp_path / "shm").mkdir()
    with (
        mock.patch.object(shared_words, "DIRECTORY", str(made)),
        mock.patch.multiple(self_test, TEST_TOKENS=8, TEST_S=2.0),
    ):
        yield made
    assert not list(made.iterdir())


def test_all_map_the_same_words(directory: Path) -> None:
    """Zeros, page-aligned for the driver, that outlive their file; readable by this user alone."""
    with shared_file(WORDS) as line:
        first, second = map_words(line, WORDS), map_words(line, WORDS)
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.dtype == torch.int32
    assert first.shape == (WORDS,)
    assert not first.any()
    assert first.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
    first[-1] = 5
    assert second[-1] == 5


def nothing(path: Path, _: bytes) -> None:
    del path


def stale(path: Path, content: bytes) -> None:
    """The file of an earlier job, of the same size."""
    path.write_bytes(bytes(len(content)))


def short(path: Path, content: bytes) -> None:
    path.write_bytes(content[16:])


def long(path: Path, content: bytes) -> None:
    path.write_bytes(content + bytes(4))


def link(path: Path, content: bytes) -> None:
    path.with_name("target").write_bytes(content)
    path.symlink_to(path.with_name("target"))


def folder(path: Path, _: bytes) -> None:
    path.mkdir()


ELSEWHERE = (nothing, stale, short, long, link, folder)  # what a rank sees in its own /dev/shm


@pytest.mark.parametrize("see", ELSEWHERE)
def test_a_rank_with_a_directory_of_its_own_is_an_error(
    directory: Path, tmp_path: Path, see: object
) -> None:
    """On both ranks, naming the file, the reason and two remedies. It creates and changes none."""
    ranks = Ranks(2)
    own = tmp_path / "own"
    own.mkdir()
    before: list[list[tuple[str, int]]] = []

    def listed() -> list[tuple[str, int]]:
        return sorted((x.name, x.lstat().st_size) for x in own.iterdir())

    def run(group: FakeGroup) -> str:
        def gather(line: str) -> list[str]:
            lines = [str(x) for x in group.gather(line)]
            if group.rank == 1 and str(directory) in lines[0]:
                (made,) = directory.iterdir()
                see(own / made.name, made.read_bytes())  # type: ignore[operator]
                before.append(listed())
                return [x.replace(str(directory), str(own)) for x in lines]
            return lines

        with pytest.raises(StepError) as caught:
            Signals(group.rank, 2, gather)
        return str(caught.value)

    texts = ranks.run(run)
    assert texts[0] == texts[1]
    assert "mapping the signals failed on rank 1 of the group: " in str(texts[0])
    assert f"the ranks do not share {directory}" in str(texts[0])
    assert "--ipc=host" in str(texts[0])
    assert "transport='nccl'" in str(texts[0])
    assert [listed()] == before


def test_a_group_without_one_directory_does_not_use_the_transport(directory: Path) -> None:
    """The reason is one line, as other reasons, with which "auto" takes nccl."""
    opened = shared_words.os.open

    def open_elsewhere(path: str, flags: int, *mode: int) -> int:
        if path.startswith(str(directory)) and not flags & os.O_CREAT:
            raise FileNotFoundError(2, "No such file or directory", path)
        return opened(path, flags, *mode)

    with mock.patch.object(shared_words.os, "open", open_elsewhere):
        reasons = Ranks(2).run(lambda group: open_backend(group, CPU))  # type: ignore[arg-type]
    assert reasons[0] == reasons[1]
    assert isinstance(reasons[0], str)
    assert reasons[0].startswith("rank 10, 11: mapping the signals failed on rank ")
    assert len(reasons[0].splitlines()) == 1
    assert reasons[0].count("do not share") == 1
    opened_again = Ranks(2).run(lambda group: open_backend(group, CPU))  # type: ignore[arg-type]
    assert all(isinstance(x, SymmetricBackend) for x in opened_again)


def test_no_room_is_an_error_and_leaves_no_file() -> None:
    """Without the look ahead a page that is touched later ends the process by SIGBUS."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with (
        mock.patch.object(shared_words.os, "posix_fallocate", full),
        pytest.raises(
            StepError, match=r"creating the signals' file failed on rank 0 of the group: .*No space"
        ),
    ):
        Signals(0, 1, lambda line: [line])


def test_a_peer_that_fails_leaves_no_file(directory: Path) -> None:
    """Neither in the step that makes the file, nor in the one that maps it."""
    for step in (1, 2):
        count = 0

        def gather(line: str, last: int = step) -> list[str]:
            nonlocal count
            count += 1
            if count == last:
                raise RuntimeError("rank 1 is gone")
            return [line, json.dumps(["", "", 0.0])]

        with pytest.raises(RuntimeError, match="is gone"):
            Signals(0, 2, gather)
        assert not list(directory.iterdir())
