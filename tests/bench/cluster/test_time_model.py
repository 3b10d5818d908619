"""If this fails, predicted steps of large jobs are wrong. Predicted steps, work and bytes, against
figures worked out by hand and a count of all pairs."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ringfa3.bench.cluster.mixes import DISTRIBUTIONS, Mix, from_lengths
from ringfa3.bench.cluster.rates import MEASURED, TFLOPS, Rates
from ringfa3.bench.cluster.strategies import (
    Batch,
    direct,
    flat_ring,
    static_groups,
    symmetric,
    two_levels,
    ulysses_ring,
)
from ringfa3.bench.cluster.time_model import Heads, Traffic, predict
from ringfa3.symmetric import ipc_memory

RESULTS = Path(__file__).parents[3] / "docs" / "results"
HEADS = Heads(32, 8, 128)  # 4096 bytes of K/V a row, 8192 of dK/dV
BLOCK = 128 * 128 * 32 * 128  # products of a block of all heads


def batch(*lengths: int, world: int, per_host: int, left: int = -1) -> Batch:
    return Batch(np.array(lengths), world, per_host, HEADS, left)


def moved(traffic: Traffic) -> tuple[list[float], list[float]]:
    return traffic.received.tolist(), traffic.sent.tolist()


def test_one_document_on_two_ranks() -> None:
    """Exactly. Rank 0 has tokens 0 to 256 and 768 to 1024, rank 1 those between: tiles with 1, 2, 7
    and 8 blocks, and with 3 to 6."""
    load = direct(case := batch(1024, world=2, per_host=2))
    assert load.blocks.tolist() == [18, 18]
    assert load.tokens.tolist() == [512, 512]
    assert moved(load.nvlink) == ([512, 256], [256, 512])
    assert load.nic.received.sum() == 0
    assert load.nvlink.received_bytes(HEADS).tolist() == [
        2 * 512 * 4096 + 256 * 8192,
        2 * 256 * 4096 + 512 * 8192,
    ]
    # Arriving rows of one launch, and leaving rows, which are as many as the other's
    assert load.held.tolist() == [768 * 12288, 768 * 12288]
    # Forward: rank 0 receives 512 rows. Backward: 512 rows of dK/dV return to rank 1, which count
    # twice, and 256 rows of K/V arrive.
    rates = Rates(4 * BLOCK, 10 * BLOCK, 4096, 1, 7)
    found = predict(load, case.ideal, HEADS, rates)
    assert found.parts["NVLink"] == [1e3 * (512 + 7), 1e3 * (2 * 512 + 256 + 2 * 7)]
    assert found.parts["compute"] == [1e3 * 18, 1e3 * 18]
    assert (found.step, found.limit) == ((519 + 1294) / 36, "NVLink")
    fast = predict(load, case.ideal, HEADS, Rates(4 * BLOCK, 10 * BLOCK, 4096 * 1024, 1, 0))
    assert (fast.step, fast.limit) == (1.0, "compute")


def test_one_document_on_two_hosts() -> None:
    """Exactly. Of 8 chunks of 128 tokens rank r has r and 7 - r. Host 0 needs 512 rows of host 1,
    chunks 2 to 5; host 1 needs 256 rows, chunks 0 and 1."""
    case = batch(1024, world=4, per_host=2)
    load = direct(case)
    assert moved(load.nvlink) == ([256, 128, 256, 128], [128, 256, 128, 256])
    assert moved(load.nic) == ([512, 512, 256, 256], [256, 256, 512, 512])
    load = two_levels(case)
    assert moved(load.nic) == ([256, 256, 128, 128], [128, 128, 256, 256])
    # Half of what a rank needs from the other host lands on its neighbour.
    assert moved(load.nvlink) == ([512, 384, 384, 256], [384, 512, 256, 384])
    assert load.nic.messages.tolist() == [1, 1, 1, 1]


def test_a_ring_that_forwards() -> None:
    """Exactly. Chunks as above. The first chunk passes ranks 1 to 3, and the last is for no other.
    Both chunks of any other rank go around to the rank before it: rank 0 attends to all."""
    load = flat_ring(batch(1024, world=4, per_host=2))
    assert moved(load.nvlink) == ([0, 640, 0, 640], [640, 0, 640, 0])
    assert moved(load.nic) == ([768, 0, 640, 0], [0, 640, 0, 768])
    assert load.nic.messages.tolist() == [3, 3, 3, 3]
    # dK/dV follow K/V: the NIC of rank 3 sends 768 rows of each, that of rank 0 receives them.
    assert load.nic.seconds(4096, 0, HEADS) == (768, 768 + 2 * 768)
    assert load.nic.received_bytes(HEADS)[0] == 768 * (2 * 4096 + 8192)


def test_static_groups_of_a_batch_with_one_long_document() -> None:
    """Exactly. 4 GPUs in groups of 2. The first two documents go to a group each, the third to the
    second group, the last to the second again: 2048 tokens against 512 + 256 + 512."""
    case = batch(2048, 512, 256, 512, world=4, per_host=2)
    load = static_groups(case, 2)
    assert load.tokens.tolist() == [1024, 1024, 640, 640]
    # Long one: tiles 1 to 4 and 13 to 16, and 5 to 12. Short ones: 1 + 4, 2 + 3; 1 + 2, 2 tiles of
    # half the rows: chunks of 64 tokens, the middle two as one.
    assert load.blocks.tolist() == [68, 68, 2 * 5 + 3, 2 * 5 + 2]
    assert load.nvlink.received.tolist() == [1024, 1024, 640, 640]
    assert load.nic.received.sum() == 0
    assert predict(load, case.ideal, HEADS, Rates(1, 1, 1e30, 1e30, 0)).work == 68 * 4 / 161
    one_a_host = static_groups(batch(2048, 512, 256, 512, world=4, per_host=1), 2)
    assert one_a_host.nic.received.tolist() == [1024, 1024, 640, 640]
    four = static_groups(batch(1024, world=4, per_host=4), 4)
    assert four.blocks.tolist() == [1 + 8, 2 + 7, 3 + 6, 4 + 5]
    whole = static_groups(case, 1)
    assert whole.tokens.tolist() == [2048, 512, 256, 512]
    assert whole.nvlink.received.sum() == whole.held.sum() == 0


def test_buffers_over_symmetric() -> None:
    """Exactly. Of 16 chunks of 64 tokens a rank publishes at most two: 128 rows. Rank 0 gathers all
    1024, which is more than a backward's own buffers. In pages of 2 MiB these are more: four.
    """
    with mock.patch.object(ipc_memory, "ALIGNMENT", 1):
        load = symmetric(batch(1024, world=8, per_host=8))
    published, dkv_of_two_peers = 2 * 128 * 4096, 2 * 128 * 8192
    assert load.held.tolist() == [published + dkv_of_two_peers + 1024 * 4096] * 8
    pages = symmetric(batch(1024, world=8, per_host=8)).held / ipc_memory.ALIGNMENT
    assert pages.tolist() == [2 + 2 + 4] * 8
    assert load.nvlink.received[0] == 7 * 128
    assert load.nvlink.sent[0] == 7 * 64  # its last chunk is for no other


def test_ulysses_inside_hosts_and_a_ring_between() -> None:
    """Exactly. Host 0 has tokens 0 to 256 and 768 to 1024, host 1 those between; a rank has half
    the heads of them. One KV head is on both ranks of a host."""
    load = ulysses_ring(batch(1024, world=4, per_host=2))
    assert load.blocks.tolist() == [9, 9, 9, 9]
    assert moved(load.nic) == ([256] * 4, [256] * 4)
    assert load.exchanged[0] == 128 * (2 * 2 * 32 * 128 + 4096)
    mqa = ulysses_ring(Batch(np.array([1024]), 4, 2, Heads(32, 1, 128)))
    assert moved(mqa.nic) == ([512] * 4, [512] * 4)


@pytest.mark.parametrize("left", [-1, 300])
def test_step_over_ideal_by_counting_every_pair(left: int) -> None:
    """To 1e-12. Documents of MagiAttention's buckets on 2 hosts of 2; NICs bind the forward. The
    count has every token of the plan, and knows none of its tables."""
    lengths = Mix("magi", DISTRIBUTIONS["magi"], 2000).draw(1, 4)
    case = Batch(lengths, 4, 2, HEADS, left)
    plan = case.plan
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    start = (ends - lengths)[document]
    first = start if left < 0 else np.maximum(start, np.arange(ends[-1]) - left)
    owner = np.empty(ends[-1], int)
    for rank in range(4):
        owner[plan.index_of(rank)] = rank

    def blocks(rows: np.ndarray) -> int:
        """Of tiles of up to 128 consecutive rows of one document, from its first row on."""
        count, tile = 0, []
        for row in [*rows.tolist(), -1]:
            runs_on = tile and row == tile[-1] + 1 and document[row] == document[tile[-1]]
            if tile and (not runs_on or len(tile) == 128):
                count += -(-(tile[-1] + 1 - first[tile[0]]) // 128)
                tile = []
            tile.append(row)
        return count

    needed = np.zeros((4, ends[-1]), bool)
    for row, rank in enumerate(owner.tolist()):
        needed[rank, first[row] : row + 1] = True
    host, far = owner // 2, np.zeros((2, 2))
    for h in range(2):
        rows = needed[2 * h : 2 * h + 2].any(0) & (host != h)
        far[:, h] = rows.sum(), 0
    into, out = far[0], far[0][::-1]
    ideal = blocks(np.arange(ends[-1])) / 4
    most = max(blocks(np.sort(plan.index_of(rank))) for rank in range(4))
    rates = Rates(4 * BLOCK, 10 * BLOCK, 1e30, 4096 * into.max() / 2 / most / 1.5, 0)
    nic = rates.nic * 2
    forward = max(most, 4096 * into.max() / nic)
    backward = max(most, (4096 * into + 8192 * out).max() / nic)
    found = predict(two_levels(case), case.ideal, HEADS, rates)
    assert found.step == pytest.approx((forward + backward) / 2 / ideal, rel=1e-12)
    assert found.parts["NIC"][0] == pytest.approx(1500 * most, rel=1e-12)
    assert found.limit == "NIC"


def test_the_default_rates_are_those_of_the_result_files() -> None:
    """To the nearest TFLOP/s."""
    for head_dim, (folder, chosen, label, mask) in MEASURED.items():
        for direction, rate in zip(("forward", "backward"), TFLOPS[head_dim], strict=True):
            content = json.loads((RESULTS / f"{folder}-{direction}" / "results.json").read_text())
            wanted = {"set": chosen, "label": label, "mask": mask, "head_dim": head_dim}
            (row,) = (r for r in content["rows"] if wanted.items() <= r.items())
            assert rate == round(row["matches"]["FA3"]["tflops"][0])


def test_batches_have_all_tokens() -> None:
    distributions = {**DISTRIBUTIONS, "file": from_lengths(np.array([7, 5000]))}
    for name, distribution in distributions.items():
        mix = Mix(name, distribution, 4096)
        lengths = mix.draw(3, 8)
        assert lengths.sum() == 8 * 4096
        assert lengths.min() > 0
        assert lengths.tolist() == mix.draw(3, 8).tolist()
        assert name == "single" or lengths.tolist() != mix.draw(4, 8).tolist()
