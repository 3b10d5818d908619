"""If this fails, the model computes something else than its architecture. The model against an
independent one in plain PyTorch, document by document, without packing."""

from __future__ import annotations

import math
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ringfa3 import KernelSpec, plan_context, ring_attn_func
from ringfa3.host import ProgramPass
from ringfa3.kernels.symbolic import Gpu
from ringfa3.schedules.link import signature_of
from train.config import Config, ConfigError, DataConfig, MemoryConfig, ModelConfig
from train.data.batches import make_batch
from train.data.samples import Sample
from train.model.rope import rope_frequencies, rotate, rotation
from train.model.sdpa import SdpaAttention
from train.model.transformer import (
    LanguageModel,
    Transformer,
    build_model,
)
from train.sections.model import RopeConfig

FOLDER = Path(__file__).absolute().parents[3] / "configs" / "model"
MODELS = [path for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "inherit"]
VOCABULARY = 97
SMALL = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "dim": 32, "ffn_dim": 48}


def packed_sample(lengths: list[int], vocabulary: int = VOCABULARY) -> Sample:
    """Random tokens in documents of ``lengths``; the last label of each document is ignored."""
    rng = np.random.default_rng(0)
    cu_seqlens = [0, *np.cumsum(lengths).tolist()]
    tokens = rng.integers(0, vocabulary, cu_seqlens[-1])
    labels = np.append(tokens[1:], -100)
    labels[np.array(cu_seqlens[1:]) - 1] = -100
    return Sample(tokens, labels, cu_seqlens)


def reference_hidden(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Final hidden states of one document: complex rotations, repeated K/V heads, explicit mask."""
    config = model.config
    n, heads, kv_heads = len(tokens), config.n_heads, config.n_kv_heads
    width = config.resolved_head_dim()

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def turn(x):
        angles = torch.outer(torch.arange(n).double(), rope_frequencies(width, config.rope))
        pairs = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double())
        sizes = torch.full_like(angles, config.rope.attention_factor or 1.0)
        turned = pairs * torch.polar(sizes, angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1).float()

    x = model.embedding.weight[tokens]
    ages = torch.arange(n)[:, None] - torch.arange(n)
    for number, block in enumerate(model.blocks):
        a, m = block.attention, block.mlp
        y = norm(x, block.attention_norm.weight)
        q, k, v = (y @ w.weight.T + (w.bias if config.qkv_bias else 0) for w in (a.wq, a.wk, a.wv))
        q, k, v = q.view(n, heads, width), k.view(n, kv_heads, width), v.view(n, kv_heads, width)
        if config.qk_norm:
            q, k = norm(q, a.q_norm.weight), norm(k, a.k_norm.weight)
        q, k = turn(q), turn(k)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        window = n if config.windows is None else config.windows[number % len(config.windows)]
        seen = (ages >= 0) & (ages < (n if window == "full" else window))
        mask = torch.zeros(n, n).masked_fill(~seen, -math.inf)
        scale = 1 / math.sqrt(width) if config.softmax_scale is None else config.softmax_scale
        scores = torch.einsum("qhc,khc->hqk", q, k) * scale + mask
        y = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v).reshape(n, -1)
        x = x + y @ a.wo.weight.T
        y = norm(x, block.mlp_norm.weight)
        gate = y @ m.gate.weight.T
        x = x + (gate * torch.sigmoid(gate) * (y @ m.up.weight.T)) @ m.down.weight.T
    return norm(x, model.norm.weight)


def build(
    recompute: str = "none", attention: str = "ringfa3", mlp_chunk: int | None = None, **changes
) -> LanguageModel:
    """A small model with random norm gains, so that a missing norm fails the test."""
    transformer = Transformer(
        ModelConfig(**{**SMALL, "zero_init": False, **changes}),
        VOCABULARY,
        3,
        MemoryConfig(recompute, mlp_chunk),
        attention,
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in transformer.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif parameter.shape == (VOCABULARY, 32):
            parameter.data.normal_(generator=generator)
    return LanguageModel(transformer, torch.float32, loss_chunk=50)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": False},
        {"tied_embeddings": True},
        {"n_kv_heads": 1, "head_dim": 16},
        {"mlp_chunk": 30, "recompute": "attention-saving"},
        {"rope": RopeConfig("llama3", factor=8.0, original_len=64)},
        {"rope": RopeConfig("yarn", factor=8.0, original_len=64, attention_factor=1.3)},
        {"qkv_bias": True},
        {"windows": [7, "full"]},
        {"windows": [2, 12], "recompute": "attention-saving"},
        {"softmax_scale": 0.7},
        {"attention": "sdpa"},
        {"attention": "sdpa", "softmax_scale": 0.7},
        {"attention": "sdpa", "recompute": "full", "n_kv_heads": 1},
    ],
    ids=[
        *("default", "no QK-norm", "tied", "one KV head", "MLP in chunks"),
        *("scaled RoPE", "YaRN", "biases", "windows", "narrow windows", "scaled scores"),
        *("SDPA", "SDPA, scaled scores", "SDPA again"),
    ],
)
def test_packed_losses_and_gradients_equal_the_reference(changes):
    """float32: 1e-5 of the largest value. Documents of 1 token and of odd lengths among them."""
    model = build(**changes)
    lengths = [37, 1, 64, 2, 51]
    sample = packed_sample(lengths)
    losses = model(make_batch(sample, None, "zigzag"))
    hidden = [
        reference_hidden(model.transformer, document)
        for document in torch.from_numpy(sample.tokens).split(lengths)
    ]
    logits = torch.cat(hidden) @ model.transformer.head.T
    labels = torch.from_numpy(sample.labels)
    reference = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    torch.testing.assert_close(
        losses, reference, atol=1e-5 * float(reference.detach().max()), rtol=0
    )
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad(losses.sum(), parameters.values())
    expected = torch.autograd.grad(reference.sum(), parameters.values())
    for name, one, other in zip(parameters, got, expected, strict=True):
        difference = float((one - other).abs().max())
        assert difference <= 1e-5 * float(other.abs().max()) + 1e-6, name


def test_sdpa_attends_under_the_window_of_the_plan():
    """Against RingFA3, float32, 1e-5, for the causal window and for the one of a single token."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(40, 4, 16, generator=generator)
    k, v = torch.randn(2, 40, 2, 16, generator=generator)
    for window in ((-1, -1), (0, 0)):
        plan = plan_context([0, 5, 5, 40], (0, 1), window_size=window)
        torch.testing.assert_close(
            SdpaAttention()(q, k, v, plan), ring_attn_func(q, k, v, plan), rtol=0, atol=1e-5
        )
    for given in ({"window_size": (3, 0)}, {"causal": False}):
        with pytest.raises(ValueError, match="it must be causal"):
            SdpaAttention()(q, k, v, plan_context([0, 40], (0, 1), **given))


def test_sdpa_rejects_a_sharded_sample():
    transformer = build(attention="sdpa").transformer
    plan = plan_context([0, 40, 64], group=(0, 2))
    with pytest.raises(ValueError, match="plan is for 2 ranks"):
        transformer(torch.zeros(plan.local_tokens, dtype=torch.int64), plan.positions, plan)


@pytest.mark.parametrize(("recompute", "rings"), [("full", 4), ("attention-saving", 2)])
def test_recompute_changes_work_but_not_gradients(recompute, rings):
    """Two layers: the ring runs twice in each with full recomputation, else once."""
    sample = packed_sample([40, 25])
    batch = make_batch(sample, None, "zigzag")
    plain, saving = build(), build(recompute)
    expected = torch.autograd.grad(plain(batch).sum(), list(plain.parameters()))
    calls = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal calls
            calls += op is torch.ops.ringfa3.ring_attention.default
            return op(*args, **(kwargs or {}))

    with Count():
        got = torch.autograd.grad(saving(batch).sum(), list(saving.parameters()))
    assert calls == rings
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


@pytest.mark.parametrize("chunk", [None, 30])
def test_the_mlp_runs_in_chunks_of_tokens(chunk):
    """Of 65 tokens, chunk by chunk: the most rows of a tensor of hidden states."""
    rows = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal rows
            out = op(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[1:] == (48,):
                rows = max(rows, len(out))
            return out

    model = build(mlp_chunk=chunk, dim=24)  # weights are (48, 24) and (24, 48)
    batch = make_batch(packed_sample([40, 25]), None, "zigzag")
    with torch.no_grad(), Watch():
        model(batch)
    assert rows == (chunk or 65)


def test_bfloat16_autocast_keeps_weights_and_losses_in_float32():
    """bfloat16 has 8 bits: within 2% of the largest loss in float32."""
    model = build()
    batch = make_batch(packed_sample([40, 25]), None, "zigzag")
    expected = model(batch)
    model.dtype = torch.bfloat16
    losses = model(batch)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    difference = (losses - expected).detach().abs().max()
    assert 0 < difference < 0.02 * expected.detach().max()


def test_a_plan_is_prepared_for_the_models_calls(monkeypatch):
    """One spec for all layers, which fits their calls. Nothing to prepare on a CPU, in float32, or
    over "nccl"."""
    properties = types.SimpleNamespace(multi_processor_count=99)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    model, gpu = build(dim=256), torch.device("cuda")
    assert not model.kernel_specs(gpu)
    model.dtype = torch.bfloat16
    assert not model.kernel_specs(torch.device("cpu"))
    specs = model.kernel_specs(gpu)
    assert specs == [KernelSpec(4, 2, 64, num_sms=99)]
    batch = make_batch(packed_sample([40, 25]), (0, 1), "zigzag", (-1, -1), specs)
    signatures = set()

    def record(self, _, inputs, settings, code):
        signatures.add(signature_of(self._pass_type, inputs, settings, Gpu(99)))

    monkeypatch.setattr(ProgramPass, "run_schedule", record)  # None: Python computes the call
    model(batch).sum().backward()
    assert signatures == set(batch.plan.prepared)
    for block in model.transformer.blocks:
        block.attention.attend.transport = "nccl"
    assert not model.kernel_specs(gpu)


def test_weights_depend_on_the_seed_alone():
    one, same, other = (
        Transformer(ModelConfig(**SMALL, zero_init=False), VOCABULARY, seed) for seed in (1, 1, 2)
    )
    torch.rand(3)  # the global generator has no influence
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)


def test_zero_init_starts_at_the_uniform_distribution():
    transformer = Transformer(ModelConfig(**SMALL), VOCABULARY, seed=0)
    assert float(transformer.embedding.weight.detach().std()) == pytest.approx(1.0, rel=0.05)
    model = LanguageModel(transformer, torch.float32, 50)
    batch = make_batch(packed_sample([30, 20]), None, "zigzag")
    losses = model(batch)[batch.labels >= 0]
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(VOCABULARY)))


def test_tied_embeddings_do_not_start_at_zero():
    """An untied head may start at zero. A tied one may not: all gradients would be zero."""
    transformer = Transformer(ModelConfig(**SMALL, tied_embeddings=True), VOCABULARY, seed=0)
    assert transformer.head is transformer.embedding.weight
    assert float(transformer.head.detach().std()) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_first_loss_is_that_of_the_uniform_distribution(path, tied):
    """Every width and heads, in one or two blocks: within 0.1 of ln(vocabulary)."""
    values = yaml.safe_load(path.read_text())
    assert values["zero_init"]
    values |= {"n_layers": 2, "tied_embeddings": tied, "rope": RopeConfig(**values["rope"])}
    if values["dim"] > 1024:  # shorter, to fit a test
        values |= {"n_layers": 1, "ffn_dim": values["ffn_dim"] // 8}
    vocabulary = DataConfig().vocab_size
    model = LanguageModel(
        Transformer(ModelConfig(**values), vocabulary, seed=0), torch.float32, 256
    )
    batch = make_batch(packed_sample([100, 156], vocabulary), None, "zigzag")
    with torch.no_grad():
        loss = float(model(batch).sum()) / batch.n_valid
    assert loss == pytest.approx(math.log(vocabulary), abs=0.1)


def llama3_frequency(frequency: float, rope: RopeConfig) -> float:
    """Llama 3's scaling, for one frequency."""
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_len / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_len / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_len / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def test_rope_frequencies_equal_llama_3():
    rope = RopeConfig("llama3", theta=500_000.0, factor=8.0, original_len=8192)
    plain = [500_000.0 ** (-2 * i / 128) for i in range(64)]
    expected = torch.tensor([llama3_frequency(f, rope) for f in plain], dtype=torch.float64)
    torch.testing.assert_close(rope_frequencies(128, rope), expected, rtol=1e-12, atol=0)
    rope.factor = 1.0
    expected = torch.tensor(plain, dtype=torch.float64)
    torch.testing.assert_close(rope_frequencies(128, rope), expected, rtol=1e-12, atol=0)


def test_rotated_products_depend_on_the_distance_alone():
    """Also beyond 2^24, where float32 cannot represent every position: 1e-5."""
    frequencies = rope_frequencies(32, RopeConfig())
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0))
    products = []
    for start in (0, 1000, 2**25 + 1):
        at_q = rotate(q, rotation(torch.tensor([start + 7]), frequencies))
        at_k = rotate(k, rotation(torch.tensor([start]), frequencies))
        products.append((at_q * at_k).sum())
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), atol=1e-5, rtol=0)


def test_a_residual_stream_in_bfloat16():
    """Blocks take and return it; losses are within 2% of the largest with a float32 stream."""
    batch, found = make_batch(packed_sample([40, 25]), None, "zigzag"), {}
    for residual in (torch.float32, torch.bfloat16):
        model = build()
        model.transformer.residual = residual
        model.dtype = torch.bfloat16
        streams = []
        for block in model.transformer.blocks:
            block.register_forward_hook(
                lambda _, inputs, output, to=streams: to.extend((inputs[0].dtype, output.dtype))
            )
        found[residual] = model(batch).detach()
        assert set(streams) == {residual}
    difference = (found[torch.bfloat16] - found[torch.float32]).abs().max()
    assert 0 < difference < 0.02 * found[torch.float32].max()


@pytest.mark.parametrize(
    ("name", "parameters", "factor"),
    [("1b", 1_235_814_400, 32.0), ("8b", 8_030_261_248, 1.0)],
)
def test_llama_shapes_have_llamas_parameters(name, parameters, factor):
    """The published numbers of parameters and RoPE of Llama-3.2-1B and Llama-3-8B."""
    (path,) = [path for path in MODELS if path.stem == name]
    values = yaml.safe_load(path.read_text())
    assert {key: values["rope"][key] for key in list(values["rope"])[:6]} == {
        "type": "default" if factor == 1 else "llama3",
        "theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_len": 8192,
    }
    model = ModelConfig(**{**values, "rope": RopeConfig(**values["rope"])})
    with torch.device("meta"):
        transformer = Transformer(model, model.rows(128_000), seed=0)
    assert sum(p.numel() for p in transformer.parameters()) == parameters


def test_padded_rows_are_in_no_label_and_in_every_softmax():
    """A vocabulary of 97 in 128 rows: cross entropy over 128 logits, in float32 to 1e-5."""
    config = Config()
    config.model = ModelConfig(**SMALL, zero_init=False, vocab_size=128)
    model = build_model(config, VOCABULARY, torch.device("cpu"))
    assert model.transformer.head.shape == model.transformer.embedding.weight.shape == (128, 32)
    batch = make_batch(packed_sample([40, 25]), None, "zigzag")
    hidden = model.transformer(batch.tokens, batch.positions, batch.plan)
    logits = hidden @ model.transformer.head.T
    expected = F.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="none")
    torch.testing.assert_close(model(batch), expected, atol=1e-5, rtol=0)
    assert build_model(Config(), VOCABULARY, torch.device("cpu")).transformer.head.shape[0] == 97


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    config = Config()
    config.model.vocab_size = VOCABULARY - 1
    with pytest.raises(ConfigError, match=r"model\.vocab_size=96 .* valid: model\.vocab_size=97"):
        build_model(config, VOCABULARY, torch.device("cpu"))
