"""If this fails, very long contexts overflow an index, and train wrongly. A block on more tokens
than 32 bits can index the hidden states of: `pytest -m "gpu and soak" -s
tests/train/model/test_gpu_long_block.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from ringfa3.kernels import dispatch
from tests.train.block_checks import compare
from train.config import ModelConfig
from train.sections.model import RopeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.soak, pytest.mark.timeout(900)]

CONFIGS = Path(__file__).absolute().parents[3] / "configs"
BYTES = 350_000  # of a GPU, for each token; tensors of 290,000 exist at a time


@pytest.mark.parametrize("tokens", [160_000, 300_000])
def test_chunked_and_whole_mlps_agree_beyond_32_bits(tokens: int) -> None:
    """The shapes of model=8b: 160k tokens have 2.3e9 hidden states of the MLP, 300k 4.3e9.

    Chunks of 16,384 tokens, last 1,024 rows; references and tolerances as in ``compare``.
    """
    device, values = torch.device("cuda"), (CONFIGS / "model" / "8b.yaml").read_text()
    settings = yaml.safe_load(values)
    model = ModelConfig(**{**settings, "rope": RopeConfig(**settings["rope"])})
    assert tokens * model.ffn_dim > 2**31
    memory = torch.cuda.get_device_properties(device).total_memory
    if memory < tokens * BYTES:
        pytest.skip(f"{tokens} tokens need a GPU of {tokens * BYTES / 1e9:.0f} GB")
    query = torch.empty(1, 1, model.resolved_head_dim(), device=device, dtype=torch.bfloat16)
    assert all(dispatch.fallback_reason(x, query) is None for x in ("forward", "backward"))
    torch.cuda.reset_peak_memory_stats()
    found = compare(replace(model, n_layers=1, zero_init=False), tokens, 16_384, 1_024, device)
    print(f"\n{tokens} tokens, at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    for name, error in found.items():
        print(f"{name}: {error:.1e}")
    torch.cuda.empty_cache()
