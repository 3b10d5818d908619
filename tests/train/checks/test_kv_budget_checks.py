"""If this fails, a run with ``parallel.kv_budget`` stops at a batch of long documents."""

from __future__ import annotations

import pytest

from tests.support.ring_checks import least_budget
from train.checks.config import check
from train.config import ConfigError


@pytest.mark.parametrize(
    ("world", "per_host", "blocks"), [(4, 4, 3), (4, 1, 3), (4, 2, 7), (12, 6, 7), (12, 3, 21)]
)
def test_a_budget_holds_the_blocks_of_the_ring(config, monkeypatch, world, per_host, blocks):
    """256 tokens over 4 ranks are 64 rows each. A CP group has its ranks on one host or on 4, 2 on
    each of two, or 3 and 1. Reference: the least budgets of one long document."""
    variables = {"LOCAL": per_host, "GROUP": world // per_host, "": world}
    for name, number in variables.items():
        monkeypatch.setenv(f"{name}_WORLD_SIZE".lstrip("_"), str(number))
    groups = [[rank // per_host for rank in range(r, r + 4)] for r in range(0, world, 4)]
    found = [least_budget(256, (0, 4), hosts=hosts) for hosts in groups]
    least = 64 * blocks
    assert max(found) == least if blocks == 3 else 192 < max(found) <= least
    config.parallel.cp, config.parallel.kv_budget = 4, least
    config.train.global_batch_size = world
    check(config, world)
    config.parallel.kv_budget = least - 1
    message = rf"={least - 1}: long .* nearest valid: parallel\.kv_budget={least}$"
    with pytest.raises(ConfigError, match=message):
        check(config, world)
    config.parallel.cp = 1  # nothing is exchanged
    check(config, world)


def test_buffers_of_8_bits_have_no_budget(config):
    config.parallel.cp, config.parallel.kv_budget, config.model.head_dim = 2, 384, 64
    check(config, world=2)
    config.model.attention_precision = "fp8"
    with pytest.raises(ConfigError, match=r"8 bits .* nearest valid: parallel\.kv_budget=null$"):
        check(config, world=2)
