"""A GQA transformer over packed documents, with ``ringfa3.RingFA3Attention`` or PyTorch's SDPA.

Shapes are written as suffixes: T local tokens, D model width, H query heads, K key/value heads,
C channels of a head, F hidden width of the SwiGLU, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringfa3 import RingFA3Attention, flash_attn_func, keep_attention
from train.config import Config, MemoryConfig, ModelConfig, RopeConfig
from train.data.batches import Batch
from train.model.initialise import initialise
from train.model.kv_cache import KVCache
from train.model.loss import token_losses
from train.model.offload import Offload
from train.model.precision import compute_dtype
from train.model.sdpa import SdpaAttention
from train.model.swiglu import SwiGLU


class Rotation(NamedTuple):
    """Cosine and sine of every token's rotary angles, (T, 1, C/2) float32."""

    cos: Tensor
    sin: Tensor


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """Angle per position of each channel pair, (head_dim / 2,) float64, scaled as in Llama 3.

    Wavelengths below ``original_len / high_freq_factor`` keep their frequency. For those above
    ``original_len / low_freq_factor`` it is divided by ``factor``. In between it is interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = rope.theta**-exponents
    if rope.factor == 1.0:
        return frequencies
    turns = rope.original_len * frequencies / (2 * math.pi)  # over the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0, 1)
    return share * frequencies + (1 - share) * frequencies / rope.factor


def rotation(positions_T: Tensor, frequencies: Tensor) -> Rotation:
    """The rotation of each token. Angles are computed in float64: positions may exceed 2^24."""
    angles = positions_T.double()[:, None, None] * frequencies.to(positions_T.device)
    return Rotation(angles.cos().float(), angles.sin().float())


def rotate(x_THC: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channels i and i + C/2 of ``x`` as a pair, in float32; returns the dtype of ``x``."""
    first, second = x_THC.float().chunk(2, dim=-1)
    cos, sin = rotation
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_THC.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation of the last dimension with a learned gain, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and optional QK-norm."""

    def __init__(self, model: ModelConfig, attention: str = "ringfa3", **ring: Any) -> None:
        super().__init__()
        head_dim = model.resolved_head_dim()
        self.head_dim, self.softmax_scale = head_dim, model.softmax_scale
        self.wq = nn.Linear(model.dim, model.n_heads * head_dim, bias=False)
        self.wk = nn.Linear(model.dim, model.n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(model.dim, model.n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(model.n_heads * head_dim, model.dim, bias=False)
        self.q_norm = RMSNorm(head_dim, model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, model.norm_eps) if model.qk_norm else nn.Identity()
        self.attend = (
            SdpaAttention(model.softmax_scale)
            if attention == "sdpa"
            else RingFA3Attention(
                model.n_heads,
                model.n_kv_heads,
                head_dim,
                softmax_scale=model.softmax_scale,
                precision=model.attention_precision,
                **ring,
            )
        )

    def forward(
        self, x_TD: Tensor, rotation: Rotation, plan: Any, cache: KVCache | None = None
    ) -> Tensor:
        """(T, D) -> (T, D). With a ``cache``, ``x`` continues its document; ``plan`` is unused."""
        q_THC = self.wq(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKC = self.wk(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKC = self.wv(x_TD).unflatten(-1, (-1, self.head_dim))
        q_THC = rotate(self.q_norm(q_THC), rotation)
        k_TKC = rotate(self.k_norm(k_TKC), rotation)
        if cache is None:
            y_THC = self.attend(q_THC, k_TKC, v_TKC, plan=plan)
        else:
            k_SKC, v_SKC = cache.append(k_TKC, v_TKC)
            qkv = q_THC[None], k_SKC[None], v_SKC[None]
            y_THC = flash_attn_func(*qkv, self.softmax_scale, causal=True)[0]
        return self.wo(y_THC.flatten(-2))


class Block(nn.Module):
    """A pre-norm block: attention and SwiGLU, each added to the residual stream."""

    def __init__(
        self,
        model: ModelConfig,
        attention: str = "ringfa3",
        mlp_chunk: int | None = None,
        **ring: Any,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model, attention, **ring)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = SwiGLU(model, mlp_chunk)

    def forward(
        self, x_TD: Tensor, rotation: Rotation, plan: Any, cache: KVCache | None = None
    ) -> Tensor:
        y_TD = self.attention(self.attention_norm(x_TD), rotation, plan, cache)
        x_TD = x_TD + y_TD.to(x_TD.dtype)
        return x_TD + self.mlp(self.mlp_norm(x_TD)).to(x_TD.dtype)


class Head(nn.Module):
    """The output matrix. A module, so that an engine may shard it and gather it for the loss."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, hidden_TD: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
        """``token_losses`` with this matrix, (T,) float32."""
        return token_losses(hidden_TD, self.weight, labels_T, chunk)


class Transformer(nn.Module):
    """Token ids -> normalised hidden states; the matrix ``head`` (V, D) maps them to logits.

    ``attention`` is the key of ``train``; ``residual`` is the dtype of the residual stream. A rank
    trains on at most ``tokens`` tokens of a sample, for which ``memory.offload`` has buffers.
    ``ring`` are keyword arguments of every ``RingFA3Attention``: group, layout, transport,
    deterministic.
    """

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        seed: int,
        memory: MemoryConfig | None = None,
        attention: str = "ringfa3",
        residual: torch.dtype = torch.float32,
        tokens: int = 0,
        **ring: Any,
    ) -> None:
        super().__init__()
        self.config = model
        self.residual = residual
        memory = memory or MemoryConfig()
        self.recompute = memory.recompute
        self.offload = None
        if memory.offload != "none":
            keeps, everything = memory.recompute == "attention-saving", memory.offload == "all"
            blocks = memory.offloaded(model.n_layers)
            self.offload = Offload(blocks, tokens, keeps, everything)
        self.embedding = nn.Embedding(vocab_size, model.dim)
        self.blocks = nn.ModuleList(
            Block(model, attention, memory.mlp_chunk, **ring) for _ in range(model.n_layers)
        )
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.output = None
        if not model.tied_embeddings:
            self.output = Head(vocab_size, model.dim)
        # Not a buffer: every rank computes the same values, so DDP need not broadcast them.
        self.frequencies = rope_frequencies(model.resolved_head_dim(), model.rope)
        if not self.norm.weight.is_meta:
            initialise(self, model, seed)

    @property
    def head(self) -> Tensor:
        """The output matrix, (V, D): the embedding itself if the two are tied."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: Any,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Normalised hidden states (T, D). ``caches``, one per block, hold the preceding tokens."""
        x_TD = self.embedding(tokens_T).to(self.residual)
        turns = rotation(positions_T, self.frequencies)
        for number, block in enumerate(self.blocks):
            if caches is None:
                x_TD = self._run(number, block, x_TD, turns, plan)
            else:
                x_TD = block(x_TD, turns, plan, caches[number])
        return self.norm(x_TD)

    def _run(
        self, number: int, block: nn.Module, x_TD: Tensor, turns: Rotation, plan: Any
    ) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return block(x_TD, turns, plan)
        if self.offload is not None:
            return self.offload.checkpoint(number, block, x_TD, turns, plan)
        if self.recompute == "full":
            return checkpoint(block, x_TD, turns, plan, use_reentrant=False)
        return checkpoint(block, x_TD, turns, plan, use_reentrant=False, context_fn=keep_attention)


class LanguageModel(nn.Module):
    """A transformer with its loss: batch -> cross entropy of every local token, (T,) float32.

    Matrix products and attention compute in ``dtype``. ``loss_chunk`` bounds the number of tokens
    whose logits exist at a time.
    """

    def __init__(self, transformer: Transformer, dtype: torch.dtype, loss_chunk: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.dtype = dtype
        self.loss_chunk = loss_chunk

    def forward(self, batch: Batch) -> Tensor:
        with self._arithmetic(batch.tokens.device):
            hidden_TD = self.transformer(batch.tokens, batch.positions, batch.plan)
            if self.transformer.output is not None:
                return self.transformer.output(hidden_TD, batch.labels, self.loss_chunk)
            return token_losses(hidden_TD, self.transformer.head, batch.labels, self.loss_chunk)

    @torch.no_grad()
    def next_logits(self, tokens_T: Tensor, caches: Sequence[KVCache]) -> Tensor:
        """Logits of the token after ``tokens_T``, (V,) float32.

        The tokens follow those in ``caches`` (one per block) and are appended to them.
        """
        start = caches[0].length
        positions_T = torch.arange(start, start + len(tokens_T), device=tokens_T.device)
        with self._arithmetic(tokens_T.device):
            hidden_TD = self.transformer(tokens_T, positions_T, None, caches)
            return F.linear(hidden_TD[-1], self.transformer.head).float()

    def _arithmetic(self, device: torch.device) -> torch.autocast:
        lower = self.dtype != torch.float32
        return torch.autocast(device.type, self.dtype if lower else None, enabled=lower)


def build_model(
    config: Config,
    n_tokens: int,
    device: torch.device,
    cp_group: dist.ProcessGroup | None = None,
    meta: bool = False,
) -> LanguageModel:
    """The model on ``device``, with the same weights on every rank; attention over ``cp_group``.

    ``n_tokens`` is the size of the tokenizer's vocabulary. With ``meta`` the parameters have no
    memory yet: an engine gives each rank its part. Raises ``ConfigError`` if ``n_tokens`` exceeds
    ``model.vocab_size``.
    """
    dtype = compute_dtype(config.train.precision, device)
    with torch.device("meta" if meta else "cpu"):
        transformer = Transformer(
            config.model,
            config.model.rows(n_tokens),
            config.train.seed,
            config.memory,
            attention=config.train.attention,
            residual=getattr(torch, config.train.residual),
            tokens=-(-config.data.seq_len // config.parallel.cp),
            group=cp_group,
            layout=config.parallel.layout,
            transport=config.parallel.transport,
            deterministic=config.train.deterministic,
        )
    transformer = transformer if meta else transformer.to(device)
    return LanguageModel(transformer, dtype, config.memory.loss_chunk)
