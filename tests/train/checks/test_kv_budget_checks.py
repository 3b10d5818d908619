"""If this fails, a run with ``parallel.kv_budget`` stops at a batch of long documents."""

from __future__ import annotations

import pytest

from train.checks.config import check
from train.config import ConfigError


@pytest.mark.parametrize(("per_host", "least"), [(4, 192), (1, 192), (2, 448)])
def test_a_budget_holds_the_blocks_of_the_ring(config, monkeypatch, per_host, least):
    """256 tokens over 4 ranks are 64 rows each: 3 blocks on one host or on 4 hosts, 7 on two."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_host))
    config.parallel.cp, config.parallel.kv_budget = 4, least
    check(config, world=4)
    config.parallel.kv_budget = least - 1
    message = rf"={least - 1}: long .* nearest valid: parallel\.kv_budget={least}$"
    with pytest.raises(ConfigError, match=message):
        check(config, world=4)
    config.parallel.cp = 1  # nothing is exchanged
    check(config, world=4)


def test_buffers_of_8_bits_have_no_budget(config):
    config.parallel.cp, config.parallel.kv_budget, config.model.head_dim = 2, 384, 64
    check(config, world=2)
    config.model.attention_precision = "fp8"
    with pytest.raises(ConfigError, match=r"8 bits .* nearest valid: parallel\.kv_budget=null$"):
        check(config, world=2)
