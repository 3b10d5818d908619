"""Conversion between ``config.json`` of transformers and the settings of ``model``, both ways.

It covers Llama, Qwen2 (biases on q, k and v) and Qwen3 (QK-norm), with RoPE of the types default,
linear, llama3 and yarn. Anything else raises an error that names it. Values have the meaning that
they have in transformers 5.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from train.config import ConfigError, ModelConfig
from train.paths import expand
from train.sections.model import FULL, RopeConfig

PREFIX = "hf:"  # begins a value of checkpoint.init_from that is a folder of transformers
CONFIG = "config.json"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The values that the trainer supports, for keys that may have other values in config.json.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}
# The keys of `model.rope` for each type, by their names in config.json.
SCALED = {"factor": "factor"}
LONG = {**SCALED, "original_max_position_embeddings": "original_len"}
ROPE = {
    "default": {},
    "linear": SCALED,
    "llama3": {
        **LONG,
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        **LONG,
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
WHOLE, SLIDING = "full_attention", "sliding_attention"  # types of layers
MSCALES = ("mscale", "mscale_all_dim")  # keys of yarn that define its attention factor
# The name of a model at Hugging Face's hub, or its address. A path such as ./model is none.
HUB = re.compile(r"(?:(?:https?:)?//)?(?:huggingface\.co/)?(\w[\w.-]*(?:/\w[\w.-]*)?)/?")


def hf_folder(init_from: str | None) -> Path | None:
    """The folder of ``checkpoint.init_from=hf:FOLDER``; None for anything else."""
    if init_from is None or not init_from.startswith(PREFIX):
        return None
    return expand("checkpoint.init_from", init_from.removeprefix(PREFIX))


def require_folder(folder: Path, given: str) -> None:
    """Raise ``ConfigError`` unless transformers has saved a model to ``folder``, the ``given`` one.

    The trainer downloads nothing: a name of Hugging Face's hub is no folder.
    """
    if (folder / CONFIG).is_file():
        return
    problem = (
        f"checkpoint.init_from={given}: {folder} must be a folder with {CONFIG}, as saved by "
        "transformers"
    )
    if snapshots := sorted(folder.glob(f"snapshots/*/{CONFIG}")):  # a cache of the hub
        found = f"{PREFIX}{snapshots[-1].parent}"
        raise ConfigError(f"{problem}; nearest valid: checkpoint.init_from={found}")
    if not folder.exists() and (name := HUB.fullmatch(given.removeprefix(PREFIX))):
        raise ConfigError(
            f"{problem}; to get one from Hugging Face's hub: hf download {name[1]} --local-dir "
            f"FOLDER, then checkpoint.init_from={PREFIX}FOLDER"
        )
    raise ConfigError(problem)


class Values:
    """The values of a ``config.json``, with an error that names file and key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, key: str, usual: Any = None) -> Any:
        """The value of a key; ``usual`` if it is missing or null."""
        value = self.values.get(key)
        return usual if value is None else value

    def number(self, key: str, usual: float | None = None, whole: bool = False) -> Any:
        """A number above 0, an int if ``whole``; ``ConfigError`` for anything else."""
        value = self.get(key, usual)
        right = isinstance(value, int) if whole else isinstance(value, int | float)
        if not right or isinstance(value, bool) or not 0 < value < math.inf:
            found = "lacks it" if value is None else f"has {value!r}"
            wanted = "an int" if whole else "a number"
            raise ConfigError(f"{self.path} {found}: {key} must be {wanted} above 0")
        return value if whole else float(value)

    def refuse(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The error for a value that the trainer does not support."""
        return ConfigError(f"{self.path} has {key}={value}; the trainer supports only {allowed}")


def read_model(folder: Path) -> dict[str, Any]:
    """The keys of ``model`` that ``config.json`` in ``folder`` defines, ``rope`` nested.

    Reads no other file. Raises ``ConfigError`` for a file that cannot be read, an unknown
    architecture, another RoPE, and any value that the trainer does not support.
    """
    config = _read(folder / CONFIG)
    architecture = config.get("model_type")
    named = config.get("architectures", [CLASSES.get(architecture, architecture)])
    if architecture not in CLASSES or named != [CLASSES[architecture]]:
        found = architecture if architecture not in CLASSES else named
        raise config.refuse("architecture", found, ", ".join(CLASSES.values()))
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise config.refuse(key, config.get(key), f"{key}={value}")
    heads = config.number("num_attention_heads", whole=True)
    dim = config.number("hidden_size", whole=True)
    return {
        "n_layers": config.number("num_hidden_layers", whole=True),
        "n_heads": heads,
        "n_kv_heads": config.number(
            "num_key_value_heads", heads if architecture == "llama" else None, whole=True
        ),
        "dim": dim,
        "head_dim": config.number(
            "head_dim", 128 if architecture == "qwen3" else dim // heads, whole=True
        ),
        "ffn_dim": config.number("intermediate_size", whole=True),
        "qk_norm": architecture == "qwen3",
        "qkv_bias": architecture == "qwen2",
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "softmax_scale": None,
        "vocab_size": config.number("vocab_size", whole=True),
        "windows": None if architecture == "llama" else _read_windows(config),
        "rope": _read_rope(config),
    }


def _read(path: Path) -> Values:
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings of a model")
    return Values(path, values)


def _read_windows(config: Values) -> list[int | str] | None:
    """``model.windows``: all layers of type sliding_attention have the same window."""
    if not config.get("use_sliding_window", False):
        return None
    layers = config.number("num_hidden_layers", whole=True)
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types", [SLIDING if n >= first else WHOLE for n in range(layers)])
    if len(types) != layers or set(types) - {SLIDING, WHOLE}:
        raise config.refuse("layer_types", types, f"{SLIDING} and {WHOLE}, one for each layer")
    if config.values.get("sliding_window", 4096) is None:
        return None
    window = config.number("sliding_window", 4096, whole=True)
    if SLIDING not in types:
        return None
    return [window if layer_type == SLIDING else FULL for layer_type in types]


def _read_rope(config: Values) -> dict[str, Any]:
    """``model.rope`` from ``rope_scaling`` and ``rope_theta``, or from ``rope_parameters``."""
    rope, rope_type = _rope_of(config)
    theta = rope.number("rope_theta", config.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise config.refuse(
            "partial_rotary_factor", rope.get("partial_rotary_factor"), "partial_rotary_factor=1"
        )
    for key in _ignored(rope, rope_type):
        if isinstance(rope.get(key), dict):  # a RoPE for each type of layers
            allowed = f"{', '.join(sorted(_known(rope_type)))} for {rope_type}"
            raise config.refuse(f"{key} of RoPE", rope.get(key), allowed)
    usual: dict[str, Any] = {
        "original_max_position_embeddings": config.get("max_position_embeddings")
    }
    usual |= {"beta_fast": 32.0, "beta_slow": 1.0} if rope_type == "yarn" else {}
    found: dict[str, Any] = {"type": rope_type, "theta": theta}
    for theirs, ours in ROPE[rope_type].items():
        if theirs == "truncate":
            found[ours] = bool(rope.get(theirs, True))
        elif theirs == "attention_factor":
            found[ours] = _attention_factor(rope, found["factor"])
        else:
            whole = theirs == "original_max_position_embeddings"
            found[ours] = rope.number(theirs, usual.get(theirs), whole)
    if rope_type != "default" and found["factor"] < 1:
        raise config.refuse("factor of RoPE", found["factor"], "factors of at least 1")
    return found


def _rope_of(config: Values) -> tuple[Values, str]:
    """The keys of RoPE, without its type, and the type."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise config.refuse("rope_parameters", given, "RoPE of the types " + ", ".join(ROPE))
    rope = Values(config.path, dict(given))
    named = [rope.values.pop(key, None) for key in ("rope_type", "type")]
    rope_type = next((name for name in named if name), "default")
    if rope_type not in ROPE:
        raise config.refuse("rope_type", rope_type, "RoPE of the types " + ", ".join(ROPE))
    return rope, rope_type


def _known(rope_type: str) -> set[str]:
    """The keys that the RoPE of a type may have."""
    mscales = MSCALES if rope_type == "yarn" else ()
    return {"rope_theta", "partial_rotary_factor", *ROPE[rope_type], *mscales}


def _ignored(rope: Values, rope_type: str) -> list[str]:
    return sorted(rope.values.keys() - _known(rope_type))


def ignored_rope_keys(folder: Path) -> list[str]:
    """Keys of RoPE in ``config.json`` that its type does not have. transformers ignores them."""
    return _ignored(*_rope_of(_read(folder / CONFIG)))


def _attention_factor(rope: Values, factor: float) -> float | None:
    """The attention factor of yarn; None if it follows from ``factor``."""
    if rope.get("attention_factor") is not None:
        return float(rope.number("attention_factor"))
    if all(rope.get(key) for key in MSCALES):
        first, second = (0.1 * rope.number(key) * math.log(factor) + 1 for key in MSCALES)
        return float(first / second)
    return None


def model_type(model: ModelConfig) -> str:
    """The architecture of ``model``; ``ConfigError`` if transformers has none for it."""
    if model.qkv_bias and model.qk_norm:
        raise ConfigError(
            "mode=export: model.qkv_bias=true with model.qk_norm=true is neither Llama, nor Qwen2 "
            "(biases), nor Qwen3 (QK-norm)"
        )
    if model.softmax_scale not in (None, model.resolved_head_dim() ** -0.5):
        raise ConfigError(
            f"mode=export: model.softmax_scale={model.softmax_scale}; Llama, Qwen2 and Qwen3 have "
            f"head_dim ** -0.5 only"
        )
    architecture = "qwen2" if model.qkv_bias else "qwen3" if model.qk_norm else "llama"
    windows = {model.window(layer) for layer in range(model.n_layers)} - {None}
    if windows and (architecture == "llama" or len(windows) > 1):
        raise ConfigError(
            f"mode=export: model.windows={model.windows}; Llama has no windows, Qwen2 and Qwen3 "
            "one width in all layers that have one"
        )
    return architecture


def hf_config(model: ModelConfig, n_rows: int, length: int, dtype: str) -> dict[str, Any]:
    """The keys of ``config.json`` for ``model``, in the form that transformers 4 and 5 read.

    ``n_rows`` are the rows of the embedding, ``length`` the tokens of the longest document that the
    model was trained on. With yarn, ``max_position_embeddings`` is the original length times
    ``factor``, because transformers 4 computes the factor as their ratio.
    """
    architecture, rope = model_type(model), model.rope
    if rope.type == "yarn":
        length = math.ceil(rope.original_len * rope.factor)
    config = {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "dtype": dtype,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "hidden_size": model.dim,
        "head_dim": model.resolved_head_dim(),
        "intermediate_size": model.ffn_dim,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": n_rows,
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": rope.theta,
        "rope_scaling": _hf_rope(rope),
    }
    if architecture != "qwen2":
        config["attention_bias"] = False
    return config | ({"mlp_bias": False} if architecture == "llama" else _hf_windows(model))


def _hf_windows(model: ModelConfig) -> dict[str, Any]:
    windows = [model.window(layer) for layer in range(model.n_layers)]
    width = next((window for window in windows if window is not None), None)
    if width is None:
        return {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    return {
        "use_sliding_window": True,
        "sliding_window": width,
        "max_window_layers": 0,
        "layer_types": [WHOLE if window is None else SLIDING for window in windows],
    }


def _hf_rope(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.type == "default":
        return None
    values = {theirs: getattr(rope, ours) for theirs, ours in ROPE[rope.type].items()}
    return {"rope_type": rope.type, **{k: v for k, v in values.items() if v is not None}}
