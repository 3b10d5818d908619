"""If this fails, a model of transformers is taken over with other settings. ``config.json`` against
transformers: read, written, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.hf_models import config_of
from tests.train.hf_folders import ROPES, model_of_values
from train.checks.model import check_model
from train.config import ConfigError, ModelConfig
from train.hf.architecture import CLASSES, hf_config, ignored_rope_keys, read_model
from train.hf.names import shapes
from train.model.rope import attention_factor, rope_frequencies
from train.model.transformer import Transformer
from train.sections.model import RopeConfig


def model_in(folder: Path) -> ModelConfig:
    return model_of_values(read_model(folder))


def saved(folder: Path, name: str, **changes: Any) -> Path:
    """The ``config.json`` of a model, as transformers writes it, with keys replaced."""
    config = config_of(name, **({"use_sliding_window": False} if "qwen" in name else {}))
    config.architectures = [CLASSES[name]]
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_that_of_transformers(tmp_path, rope):
    """Frequencies, relative to each, and attention factor: 1e-6; read in the forms of 4 and 5."""
    given = ROPES[rope]
    config = config_of("qwen3", rope_parameters=dict(given), head_dim=64)
    theirs = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    old = {key: value for key, value in given.items() if key != "rope_theta"}
    forms = [
        {"rope_parameters": given},
        {"rope_parameters": None, "rope_theta": given["rope_theta"], "rope_scaling": old},
    ]
    for form in forms:
        model = model_in(saved(tmp_path, "qwen3", head_dim=64, **form))
        check_model(model)
        ours = rope_frequencies(64, model.rope).float()
        torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
        assert attention_factor(model.rope) == pytest.approx(theirs.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("rope", ROPES)
def test_keys_of_rope_that_transformers_ignores_are_ignored_by_name(tmp_path, rope):
    """Frequencies are those of transformers with the same keys: 1e-6. A line can name the keys."""
    more = {"finetuned": True, "short_factor": [1.0], "mscale_of_another": None}
    if ROPES[rope].get("rope_type") in ("default", "linear"):
        more["original_max_position_embeddings"] = 64
    config = config_of("qwen3", rope_parameters={**ROPES[rope], **more}, head_dim=64)
    theirs = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    form = {"rope_parameters": {**ROPES[rope], **more}}
    folder = saved(tmp_path, "qwen3", head_dim=64, **form)
    model = model_in(folder)
    torch.testing.assert_close(
        rope_frequencies(64, model.rope).float(), theirs.inv_freq, rtol=1e-6, atol=0
    )
    assert ignored_rope_keys(folder) == sorted(more)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_written_config_is_read_alike_here_and_by_transformers(tmp_path, name, rope):
    """The written file gives transformers the values that it had in its own file."""
    changes = {"rope_parameters": ROPES[rope], "tie_word_embeddings": rope == "linear"}
    model = model_in(saved(tmp_path, name, **changes))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    written = hf_config(model, model.vocab_size, 256, "float32")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert model_in(tmp_path) == model
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(theirs)
    for key in written.keys() - {"rope_theta", "rope_scaling", "max_position_embeddings", "dtype"}:
        assert getattr(again, key) == getattr(theirs, key, getattr(again, key)), key
    mscales = {"mscale", "mscale_all_dim"}
    for key in ROPES[rope].keys() - mscales:
        assert again.rope_parameters[key] == theirs.rope_parameters[key], key
    if model.rope.type == "yarn":  # transformers 4 computes with this ratio
        ratio = again.max_position_embeddings / model.rope.original_len
        assert ratio == pytest.approx(model.rope.factor)


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"]])
def test_windows_are_written_as_they_were_read(tmp_path, kinds):
    """By the number of the first layer with a window, and by types; as transformers takes them."""
    keys = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    model = model_in(saved(tmp_path, "qwen2", **keys, layer_types=kinds))
    assert model.windows == ["full", 9]
    check_model(model)
    written = hf_config(model, model.vocab_size, 256, "float32")
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.layer_types == ["full_attention", "sliding_attention"]
    assert theirs.sliding_window == 9
    assert model_in(tmp_path) == model


def test_a_window_of_null_is_none(tmp_path):
    """As in transformers: all layers have full attention."""
    keys = {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}
    model = model_in(saved(tmp_path, "qwen2", **keys, layer_types=None))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert set(theirs.layer_types) == {"full_attention"}
    assert model.windows is None


@pytest.mark.parametrize("name", CLASSES)
def test_missing_keys_have_the_defaults_of_transformers(tmp_path, name):
    """Only what every model must give; against transformers' own defaults."""
    given = {"model_type": name, "vocab_size": 97, "hidden_size": 256, "intermediate_size": 8}
    given |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(given))
    model, theirs = model_in(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert model.norm_eps == theirs.rms_norm_eps
    assert model.tied_embeddings == theirs.tie_word_embeddings
    assert model.head_dim == getattr(theirs, "head_dim", 256 // 4)
    assert model.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"tied_embeddings": True}])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_shapes_are_those_of_the_transformer(qk_norm, changes):
    model = ModelConfig(n_layers=2, dim=32, ffn_dim=40, head_dim=6, qk_norm=qk_norm, **changes)
    with torch.device("meta"):
        parameters = Transformer(model, 50, 0).named_parameters()
    assert shapes(model, 50) == {name: tuple(p.shape) for name, p in parameters}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mistral"},
            "architecture=mistral; the trainer supports only LlamaForCausalLM, Qwen2",
        ),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type=longrope; the trainer supports only RoPE",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks it: factor must be a number above 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factors of at least 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention of RoPE=",
        ),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type=su"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"model_type": "qwen3", "architectures": None, "use_sliding_window": True}
            | {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types=['full_attention', 'chunked_attention']; the trainer supports only slid",
        ),
        (
            {"attention_bias": True},
            "attention_bias=True; the trainer supports only attention_bias=False",
        ),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu; the trainer supports only hidden_act=silu"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"num_hidden_layers": None}, "lacks it: num_hidden_layers must be an int above 0"),
        ({"hidden_size": "24"}, "has '24': hidden_size must be an int above 0"),
        ({"vocab_size": True}, "vocab_size must be an int above 0"),
    ],
)
def test_what_the_trainer_cannot_compute_is_refused(tmp_path, changes, message):
    folder = saved(tmp_path, "llama", **changes)
    with pytest.raises(ConfigError) as raised:
        read_model(folder)
    assert message in str(raised.value)
    assert str(folder / "config.json") in str(raised.value)


@pytest.mark.parametrize("content", ["", "[]", None], ids=["torn", "list", "missing"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path)


def test_a_model_without_an_architecture_is_not_exported():
    with pytest.raises(ConfigError, match="neither Llama"):
        hf_config(ModelConfig(qkv_bias=True, qk_norm=True), 300, 64, "float32")
    for windows, more in (([4, "full"], {"qk_norm": False}), ([4, 5], {})):
        with pytest.raises(ConfigError, match=r"model\.windows=.*Llama has no windows, Qwen2 and"):
            hf_config(ModelConfig(windows=windows, **more), 300, 64, "float32")
    with pytest.raises(ConfigError, match=r"model\.softmax_scale=0\.7; Llama, Qwen2 and Qwen3"):
        hf_config(ModelConfig(softmax_scale=0.7), 300, 64, "float32")
