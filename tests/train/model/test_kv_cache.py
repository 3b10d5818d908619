"""If this fails, generated text differs from what the model would say without its cache. The KV
cache: its contents, and attention with it."""

from __future__ import annotations

import pytest
import torch

from ringfa3 import plan_context
from train.config import ModelConfig
from train.model.kv_cache import KVCache
from train.model.transformer import Transformer


def test_appended_pieces_are_returned_as_one():
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 7, 3, 4, generator=generator)
    cache = KVCache(capacity=7)
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        all_k, all_v = cache.append(k[start:stop], v[start:stop])
        assert torch.equal(all_k, k[:stop])
        assert torch.equal(all_v, v[:stop])
    with pytest.raises(ValueError, match="cache of 7 tokens cannot hold 8"):
        cache.append(k[:1], v[:1])


@pytest.mark.parametrize(("softmax_scale", "windows"), [(None, None), (0.7, [3, "full"])])
def test_hidden_states_are_the_same_for_pieces_and_for_the_whole(softmax_scale, windows):
    """A whole document through the ring layer, against parts of 9, 1, 1 and 5 tokens: 1e-5."""
    model = ModelConfig(n_layers=2, dim=32, ffn_dim=48, n_heads=4, n_kv_heads=2, zero_init=False)
    model.softmax_scale, model.windows = softmax_scale, windows
    transformer = Transformer(model, vocab_size=50, seed=0)
    tokens = torch.randint(50, (16,), generator=torch.Generator().manual_seed(1))
    plan = plan_context([0, 16])
    with torch.no_grad():
        whole = transformer(tokens, plan.positions, plan)
        caches = [KVCache(16) for _ in transformer.blocks]
        parts = []
        for start, stop in ((0, 9), (9, 10), (10, 11), (11, 16)):
            positions = torch.arange(start, stop)
            parts.append(transformer(tokens[start:stop], positions, None, caches))
    assert (torch.cat(parts) - whole).abs().max() < 1e-5
    assert whole.std() > 0.5
