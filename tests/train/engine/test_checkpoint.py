"""If this fails, a checkpoint is lost, or a damaged one is loaded."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.ranks import Ranks
from train.config import ConfigError
from train.data import manifest
from train.engine.checkpoint import Checkpoints
from train.engine.parallel import ParallelLayout, from_rank_0, require_shared
from train.engine.shard import Shard, own_share, whole
from train.engine.stored_checkpoint import (
    checkpoints_in,
    find_checkpoint,
    load_tensors,
    newest_valid,
    read_manifest_metadata,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ALONE = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several sizes, one of them a scalar."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40, 30), (7,), (), (3, 0), (100, 10)]
    return {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def shards(tensors: dict[str, torch.Tensor], rank: int = 0, world: int = 1) -> dict[str, Shard]:
    """The tensors as ``world`` ranks hold them that all have them whole."""
    return {name: whole(tensor, rank, world) for name, tensor in tensors.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path, messages) -> Checkpoints:
    """Of steps 1, 2 and 3, with the tensors of seeds 1, 2 and 3."""
    checkpoints = Checkpoints(tmp_path, ALONE, keep=3, keep_every=None, log=messages.append)
    for step in (1, 2, 3):
        checkpoints.begin(step, shards(tensors(step)), {"samples": 10 * step})
    checkpoints.wait()
    assert not messages
    return checkpoints


def test_saved_tensors_are_loaded(checkpoints):
    assert list(checkpoints_in(checkpoints.folder)) == [1, 2, 3]
    path = checkpoints.choose()
    assert path.name == "step-00000003"
    assert read_manifest_metadata(path) == {"step": 3, "samples": 30}
    loaded = {name: torch.full_like(t, torch.nan) for name, t in tensors(0).items()}
    load_tensors(path, loaded)
    assert equal(loaded, tensors(3))


def test_tensors_may_change_while_they_are_written(tmp_path, messages):
    checkpoints = Checkpoints(tmp_path, ALONE, keep=1, keep_every=None, log=messages.append)
    live = tensors(1)
    checkpoints.begin(1, shards(live), {})
    for tensor in live.values():
        tensor.fill_(0)
    checkpoints.wait()
    loaded = tensors(0)
    load_tensors(checkpoints.choose(), loaded)
    assert equal(loaded, tensors(1))


def test_the_newest_and_every_keep_every_th_are_kept(tmp_path, messages):
    checkpoints = Checkpoints(tmp_path, ALONE, keep=2, keep_every=3, log=messages.append)
    for step in range(1, 9):
        checkpoints.begin(step, shards(tensors(step)), {})
    checkpoints.wait()
    assert list(checkpoints_in(tmp_path)) == [3, 6, 7, 8]
    assert {path.name[:5] for path in tmp_path.iterdir()} == {"step-"}


def test_a_checkpoint_is_complete_if_an_older_one_cannot_be_removed(
    checkpoints, messages, monkeypatch
):
    monkeypatch.setattr(checkpoints, "_remove", mock.Mock(side_effect=OSError("busy")))
    checkpoints.begin(4, shards(tensors(4)), {})
    checkpoints.wait()
    assert (checkpoints.saved, checkpoints.failures) == (4, 0)
    assert 4 in checkpoints_in(checkpoints.folder)
    assert "checkpoint of step 1 could not be removed: OSError: busy" in messages


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped byte": (
        lambda p: flip(p / "__0_0.distcp"),
        "__0_0.distcp differs from its checksum",
    ),
    "a truncated file": (lambda p: os.truncate(p / "__0_0.distcp", 99), "has 99 bytes, not"),
    "a missing file": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "a missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "a changed manifest": (lambda p: flip(p / "manifest.json"), "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_set_aside_and_its_predecessor_used(checkpoints, messages, damage):
    hurt, problem = DAMAGES[damage]
    hurt(checkpoints.folder / "step-00000003")
    path = checkpoints.choose()
    assert path.name == "step-00000002"
    (line,) = messages
    assert problem in line
    assert "renamed to damaged-step-00000003" in line
    assert len(list(checkpoints.folder.glob("damaged-step-00000003*"))) == 1
    loaded = tensors(0)
    load_tensors(path, loaded)
    assert equal(loaded, tensors(2))


def test_if_all_are_damaged_there_is_none(checkpoints, messages):
    for path in checkpoints_in(checkpoints.folder).values():
        flip(path / ".metadata")
    assert checkpoints.choose() is None
    assert len(messages) == 3


def test_a_half_written_checkpoint_does_not_count(checkpoints):
    shutil.copytree(checkpoints.folder / "step-00000003", checkpoints.folder / ".step-00000004")
    assert checkpoints.choose().name == "step-00000003"
    for name in (".snapshot", ".step-", ".old-step-00000002"):  # the first two are of its disk
        (checkpoints.folder / name).mkdir()
    checkpoints.remove_partial_files()
    assert {path.name for path in checkpoints.folder.glob(".*")} == {".snapshot", ".step-"}


def test_partial_files_that_stay_are_logged(checkpoints, messages, tmp_path, monkeypatch):
    linked, stays = (checkpoints.folder / f".old-step-0000000{n}" for n in (1, 2))
    linked.symlink_to(tmp_path)
    stays.mkdir()
    monkeypatch.setattr("shutil.rmtree", mock.Mock())  # as if all of it were busy
    checkpoints.remove_partial_files()
    assert not linked.is_symlink()
    assert [m for m in messages if f"{stays}, an incomplete checkpoint" in m]


def test_others_cannot_write_to_it_under_any_umask(tmp_path, messages):
    before = os.umask(0o002)
    try:
        checkpoints = Checkpoints(tmp_path, ALONE, keep=1, keep_every=None, log=messages.append)
        checkpoints.begin(1, shards(tensors(1)), {})
        checkpoints.wait()
    finally:
        os.umask(before)
    assert checkpoints.choose().name == "step-00000001"


def test_a_disk_that_cannot_be_read_is_not_damage(checkpoints, messages, monkeypatch):
    def fail(path: Path) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("train.data.manifest.checksum", fail)
    with pytest.raises(OSError, match="Input/output"):
        checkpoints.choose()
    assert list(checkpoints_in(checkpoints.folder)) == [1, 2, 3]


def test_another_runs_checkpoints_are_never_renamed(checkpoints, messages):
    flip(checkpoints.folder / "step-00000003" / "__0_0.distcp")
    assert find_checkpoint(checkpoints.folder, messages.append).name == "step-00000002"
    assert list(checkpoints_in(checkpoints.folder)) == [1, 2, 3]
    assert "damaged checkpoint skipped" in messages[0]


def test_a_checkpoint_that_others_can_write_is_not_read(checkpoints):
    newest = checkpoints.folder / "step-00000003"
    newest.chmod(0o775)
    with pytest.raises(ConfigError, match="others can write to it; its metadata is a pickle"):
        checkpoints.choose()
    newest.chmod(0o755)
    (newest / ".metadata").chmod(0o666)
    with pytest.raises(ConfigError, match=r"\.metadata: others can write"):
        checkpoints.choose()


def test_a_checkpoint_of_another_user_is_not_read(checkpoints, monkeypatch):
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match=f"it belongs to user {own}"):
        checkpoints.choose()


def test_tensors_that_do_not_fit_are_named(checkpoints):
    path = checkpoints.choose()
    with pytest.raises(ConfigError, match=r"t1 is \[8\] here and \[7\] there"):
        load_tensors(path, {"t1": torch.zeros(8)})
    with pytest.raises(ConfigError, match=r"t9 is \[1\] here and not in it"):
        load_tensors(path, {"t9": torch.zeros(1)})


def test_an_older_checkpoint_is_read_by_the_names_of_its_time(tmp_path):
    """Whole tensors as torch.distributed.checkpoint writes them, and a head named ``output``."""
    head = torch.arange(6.0).view(3, 2)
    stored = {"model.output": head, "optimizer.state.output.exp_avg": 2 * head}
    dcp.save(stored, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    names = ("model.output.weight", "optimizer.state.output.weight.exp_avg")
    loaded = {name: torch.zeros(3, 2) for name in names}
    load_tensors(tmp_path, loaded)
    assert [t.tolist() for t in loaded.values()] == [head.tolist(), (2 * head).tolist()]


def test_a_checkpoint_is_found_by_its_own_or_its_runs_folder(tmp_path, messages):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = Checkpoints(folder, ALONE, keep=2, keep_every=None, log=messages.append)
    folder.mkdir(parents=True)
    for step in (1, 2):
        checkpoints.begin(step, shards(tensors(step)), {})
    checkpoints.wait()
    newest = folder / "step-00000002"
    for path in (tmp_path / "run", folder, newest):
        assert find_checkpoint(path, messages.append) == newest
    flip(newest / ".metadata")
    with pytest.raises(ConfigError, match=r"damaged: .*\.metadata differs .*choose another"):
        find_checkpoint(newest, messages.append)
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        find_checkpoint(tmp_path, messages.append)


def test_a_run_whose_name_is_a_number_is_no_checkpoint(tmp_path, messages):
    folder = tmp_path / "7" / "checkpoints"
    checkpoints = Checkpoints(folder, ALONE, keep=2, keep_every=None, log=messages.append)
    folder.mkdir(parents=True)
    checkpoints.begin(1, shards(tensors(1)), {})
    checkpoints.wait()
    assert find_checkpoint(tmp_path / "7", messages.append) == folder / "step-00000001"


def test_a_full_disk_is_counted_and_leaves_nothing(checkpoints, messages):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        checkpoints.begin(4, shards(tensors(4)), {})
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = messages
    assert line.startswith("checkpoint of step 4 failed (1 so far), training continues: ")
    assert re.search(r"File too large.*; the disk of .* had [\d,.]+ GB free$", line)
    assert checkpoints.saved == 3
    assert sorted(path.name[:5] for path in checkpoints.folder.iterdir()) == ["step-"] * 3
    checkpoints.begin(5, shards(tensors(5)), {})
    checkpoints.wait()
    assert checkpoints.choose().name == "step-00000005"


def test_a_checkpoint_saved_while_skipping_replaces_no_earlier_one(tmp_path, messages):
    """With ``keep=1`` checkpoints after skipped steps are added to it, until a step is accepted. An
    unreadable manifest stops no write."""
    checkpoints = Checkpoints(tmp_path, ALONE, keep=1, keep_every=None, log=messages.append)

    def kept(step: int, skipped: int) -> list[int]:
        checkpoints.begin(step, shards(tensors(step)), {"guard": {"in_a_row": skipped}})
        checkpoints.wait()
        return list(checkpoints_in(tmp_path))

    assert [kept(1, 0), kept(2, 1), kept(3, 2)] == [[1], [1, 2], [1, 2, 3]]
    assert checkpoints.choose(exclude_skipping=True).name == "step-00000001"
    flip(tmp_path / "step-00000002" / manifest.MANIFEST)
    assert kept(4, 3) == [1, 2, 3, 4]
    assert kept(5, 0) == [5]
    assert (messages, checkpoints.failures) == ([], 0)


def test_ranks_write_about_equal_numbers_of_bytes():
    model = {f"w{i}": torch.zeros(100 + i) for i in range(31)}
    shares = [own_share(shards(model, rank, 4)) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(model)
    sizes = [sum(shard.n_bytes for shard in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 4 * 130  # one tensor


def _save(group: dist.ProcessGroup, folder: Path, fails: int | None) -> list[str]:
    messages: list[str] = []
    rank, world = group.rank(), group.size()
    parallel = ParallelLayout(
        rank, world, 1, torch.device("cpu"), host_group=group, save_group=group
    )
    checkpoints = Checkpoints(folder, parallel, keep=2, keep_every=None, log=messages.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if rank == fails:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        checkpoints.begin(7, shards(tensors(7), rank, world), {"samples": 1})
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.saved == (7 if fails is None else None)
    assert checkpoints.failures == (fails is not None)
    chosen = checkpoints.choose()
    assert (chosen is None) == (fails is not None)
    return messages


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_writes_what_one_reads(ranks: Ranks, tmp_path, world):
    ranks.run(world, _save, tmp_path, None)
    loaded = tensors(0)
    load_tensors(newest_valid(tmp_path, print), loaded)
    assert equal(loaded, tensors(7))
    files = {path.name for path in (tmp_path / "step-00000007").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(world)}


def _reads(group: dist.ProcessGroup, folder: Path) -> list[str]:
    """The names of the files that a rank reads to complete a checkpoint."""
    read: list[str] = []
    whole_file = manifest.checksum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "checksum", lambda p: read.append(p.name) or whole_file(p))
        rank, world = group.rank(), group.size()
        parallel = ParallelLayout(rank, world, 1, torch.device("cpu"), None, group, group)
        checkpoints = Checkpoints(folder, parallel, keep=2, keep_every=None, log=print)
        checkpoints.begin(1, shards(tensors(1), rank, world), {})
        checkpoints.wait()
    return read


def test_each_rank_checksums_its_own_file(ranks: Ranks, tmp_path):
    read = ranks.run(3, _reads, tmp_path)
    assert read == [["__0_0.distcp", ".metadata"], ["__1_0.distcp"], ["__2_0.distcp"]]
    newest_valid(tmp_path, print)  # the manifest fits


@pytest.mark.parametrize("fails", [0, 2])
def test_a_full_disk_of_one_rank_fails_the_checkpoint_on_all(ranks, tmp_path, fails):
    messages = ranks.run(3, _save, tmp_path, fails)
    assert f"rank {fails}: " in messages[0][0]
    assert "File too large" in messages[0][0]
    assert not list(tmp_path.iterdir())


def _refused(group: dist.ProcessGroup) -> str:
    parallel = ParallelLayout(group.rank(), group.size(), 1, torch.device("cpu"), host_group=group)

    def refuse() -> None:
        raise ConfigError("rank 0 says no")

    with pytest.raises(ConfigError) as caught:
        from_rank_0(parallel, refuse)
    assert from_rank_0(parallel, dist.get_rank) == 0
    return str(caught.value)


def test_from_rank_0_gives_all_ranks_its_value_or_its_error(ranks: Ranks):
    assert ranks.run(3, _refused) == ["rank 0 says no"] * 3


def _shared(group: dist.ProcessGroup, folder: Path) -> str | None:
    parallel = ParallelLayout(group.rank(), group.size(), 1, torch.device("cpu"), host_group=group)
    require_shared(parallel, folder)
    if parallel.rank == 0:
        assert not list(folder.iterdir())
    here = Path.exists
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.engine.parallel.VISIBLE_S", 0.2)
        patch.setattr(Path, "exists", lambda path: parallel.rank != 2 and here(path))
        try:
            require_shared(parallel, folder)
        except ConfigError as error:
            return str(error)
    return None


def test_a_folder_that_a_host_does_not_share_fails_on_all_ranks(ranks: Ranks, tmp_path):
    for error in ranks.run(3, _shared, tmp_path):
        assert re.search(
            r"rank 2 on .* does not see what rank 0 writes to .*all hosts share", error
        )
