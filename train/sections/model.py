"""``model``: the transformer."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.sections.key import ConfigError, key

FULL = "full"  # in model.windows: no window
# The keys of each type of RoPE, in addition to its base. The keys of other types must be defaults.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_len", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass
class RopeConfig:
    """Rotary position embedding, and how its frequencies are scaled."""

    type: str = key("default", choices=tuple(ROPE_TYPES))
    """how frequencies are scaled for longer contexts. default does not scale. linear divides all by
    factor. llama3 scales long wavelengths as Llama 3 does. yarn is YaRN"""
    theta: float = key(10000.0, above=0)
    """base of the rotary frequencies"""
    factor: float = key(1.0, at_least=1)
    """the divisor of scaled frequencies (linear, llama3, yarn)"""
    low_freq_factor: float = key(1.0, above=0)
    """wavelengths above original_len / low_freq_factor are stretched by factor (llama3)"""
    high_freq_factor: float = 4.0
    """wavelengths below original_len / high_freq_factor stay unchanged (llama3)"""
    original_len: int = key(8192, at_least=1)
    """context length before scaling, in tokens (llama3, yarn)"""
    beta_fast: float = 32.0
    """channel pairs with more RoPE rotations over original_len tokens stay unchanged (yarn)"""
    beta_slow: float = key(1.0, above=0)
    """channel pairs with fewer RoPE rotations over original_len tokens are stretched by factor
    (yarn)"""
    attention_factor: float | None = key(None, above=0)
    """queries and keys are multiplied by it; null means 0.1 * ln(factor) + 1 (yarn)"""
    truncate: bool = True
    """round the indices of the two pairs between which frequencies are interpolated outward to
    whole numbers (yarn)"""


@dataclass
class ModelConfig:
    """The transformer: GQA, RMSNorm, SwiGLU and RoPE."""

    inherit: bool = False
    """keys of model without a value get the values of the model in checkpoint.init_from or
    checkpoint.resume; choose it with model=inherit"""
    n_layers: int = key(4, at_least=1)
    """transformer blocks"""
    n_heads: int = key(4, at_least=1)
    """query heads"""
    n_kv_heads: int = key(2, at_least=1)
    """key and value heads; divides n_heads"""
    dim: int = key(128, at_least=1)
    """width of the residual stream"""
    head_dim: int | None = key(None, at_least=2)
    """width of a head, even; null means dim / n_heads"""
    ffn_dim: int = key(384, at_least=1)
    """hidden width of the SwiGLU"""
    qk_norm: bool = True
    """RMSNorm on every query and key head"""
    qkv_bias: bool = False
    """biases on the projections to queries, keys and values"""
    tied_embeddings: bool = False
    """embedding and output head share one matrix"""
    zero_init: bool = True
    """output projections, and an untied head, start at zero"""
    norm_eps: float = key(1e-5, above=0)
    """added to the mean square in RMSNorm"""
    attention_precision: str = key("native", choices=("native", "fp8", "int8"))
    """precision of attention's forward. native is the dtype of train.precision; fp8 has Q, K, P and
    V in FP8; int8 has Q and K in int8. 8 bits need head dim 64, 128 or 256; with parallel.cp above
    1 they do not work over parallel.transport=symmetric. The backward, and mode=generate, are
    native"""
    softmax_scale: float | None = key(None, at_least=2.0**-64, at_most=2.0**64)
    """scores are multiplied by it before the softmax; null means head_dim ** -0.5"""
    vocab_size: int | None = key(None, at_least=1)
    """rows of embedding and head; null means the number of tokens of the tokenizer. Further rows
    are padding: the softmax includes them, but they are never a label or a generated token"""
    windows: list[int | str] | None = key(None, at_least=1, words=(FULL,))
    """sliding windows: the number of keys that a token attends to in a layer, its own included, or
    full. The list has an entry for each layer, or is a pattern that repeats, for example [512, 512,
    full]. null means full in all layers"""
    rope: RopeConfig = field(default_factory=RopeConfig)

    def resolved_head_dim(self) -> int:
        """``head_dim``, or ``dim / n_heads`` if it is null."""
        return self.head_dim if self.head_dim is not None else self.dim // self.n_heads

    def block_parameters(self) -> int:
        """Parameters of all blocks, without norms and biases. The values may be unchecked."""
        head_dim = self.head_dim or self.dim // max(self.n_heads, 1)
        attention = head_dim * 2 * (self.n_heads + self.n_kv_heads)
        return self.n_layers * self.dim * (attention + 3 * self.ffn_dim)

    def window(self, layer: int) -> int | None:
        """Keys that a token attends to in a layer, its own included; None for all before it."""
        if self.windows is None:
            return None
        window = self.windows[layer % len(self.windows)]
        return None if window == FULL else window

    def rows(self, n_tokens: int) -> int:
        """Rows of embedding and head for ids below ``n_tokens``.

        Raises ``ConfigError`` if ``vocab_size`` is less.
        """
        if self.vocab_size is not None and self.vocab_size < n_tokens:
            raise ConfigError(
                f"model.vocab_size={self.vocab_size} has no row for some tokens: the tokenizer's "
                f"ids go up to {n_tokens - 1}; nearest valid: model.vocab_size={n_tokens}"
            )
        return n_tokens if self.vocab_size is None else self.vocab_size
