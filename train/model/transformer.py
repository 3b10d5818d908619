"""A GQA transformer over packed documents, with ``ringfa3.RingFA3Attention`` or PyTorch's SDPA.

Shapes are written as suffixes: T local tokens, D model width, H query heads, K key/value heads,
C channels of a head, F hidden width of the SwiGLU, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringfa3 import KernelSpec, RingFA3Attention, flash_attn_func, keep_attention
from train.compile_choice import compiles
from train.config import Config, MemoryConfig, ModelConfig
from train.data.batches import Batch
from train.data.samples import IGNORED
from train.model.compiled import compiled_block, compiled_function
from train.model.initialise import initialise
from train.model.kv_cache import KVCache
from train.model.loss import token_losses
from train.model.matmul import Linear
from train.model.offload import Offload
from train.model.precision import compute_dtype
from train.model.rope import (
    Rotation,
    attention_factor,
    rope_frequencies,
    rotate,
    rotation,
)
from train.model.sdpa import SdpaAttention
from train.model.swiglu import ALL, SwiGLU
from train.model.window import narrowed, window_size


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS normalisation of the last dimension, in float32, in the dtype of x."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """``rms_norm`` with a learned gain. With ``fused`` it is compiled to one kernel in training."""

    def __init__(self, width: int, eps: float, fused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps, self.fused = eps, fused

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused and torch.is_grad_enabled()
        run = compiled_function(rms_norm) if fused else rms_norm
        return run(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, optional biases and optional QK-norm."""

    def __init__(
        self,
        model: ModelConfig,
        attention: str = "ringfa3",
        window: int | None = None,
        **ring: Any,
    ) -> None:
        super().__init__()
        head_dim = model.resolved_head_dim()
        self.window_size = window_size(window)
        self.head_dim, self.softmax_scale = head_dim, model.softmax_scale
        self.wq = Linear(model.dim, model.n_heads * head_dim, model.qkv_bias)
        self.wk = Linear(model.dim, model.n_kv_heads * head_dim, model.qkv_bias)
        self.wv = Linear(model.dim, model.n_kv_heads * head_dim, model.qkv_bias)
        self.wo = Linear(model.n_heads * head_dim, model.dim)
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
            y_THC = flash_attn_func(
                *qkv, softmax_scale=self.softmax_scale, causal=True, window_size=self.window_size
            )[0]
        return self.wo(y_THC.flatten(-2))


class Block(nn.Module):
    """A pre-norm block: attention and SwiGLU, each added to the residual stream.

    ``compiled``, if it is set, runs the forward of training steps in place of ``body``.
    """

    compiled: Callable[..., Tensor] | None = None

    def __init__(
        self,
        model: ModelConfig,
        attention: str = "ringfa3",
        mlp_chunk: int | None = None,
        window: int | None = None,
        **ring: Any,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model, attention, window, **ring)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = SwiGLU(model, mlp_chunk)

    def forward(
        self, x_TD: Tensor, rotation: Rotation, plan: Any, cache: KVCache | None = None
    ) -> Tensor:
        if self.compiled is None or not torch.is_grad_enabled():
            return self.body(x_TD, rotation, plan, cache)
        return self.compiled(self, x_TD, rotation, plan)

    def body(
        self, x_TD: Tensor, rotation: Rotation, plan: Any, cache: KVCache | None = None
    ) -> Tensor:
        """The block, uncompiled."""
        y_TD = self.attention(self.attention_norm(x_TD), rotation, plan, cache)
        x_TD = x_TD + y_TD.to(x_TD.dtype)
        return x_TD + self.mlp(self.mlp_norm(x_TD)).to(x_TD.dtype)


class Head(nn.Module):
    """The output matrix. It is a module, so that an engine can gather it for the loss."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=torch.float32))

    def forward(self, hidden_TD: Tensor, labels_T: Tensor, chunk: int, fused: bool) -> Tensor:
        """``token_losses`` with this matrix, (T,) float32."""
        return token_losses(hidden_TD, self.weight, labels_T, chunk, fused)


class Transformer(nn.Module):
    """Token ids -> normalised hidden states; the matrix ``head`` (V, D) maps them to logits.

    ``attention`` is as in ``train``; ``residual`` is the dtype of the residual stream. A rank
    trains on at most ``tokens`` tokens of a micro-batch; buffers of ``memory.offload`` have that
    size. With ``compile``, every block runs as compiled graphs, its recomputation included.
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
        compile: bool = False,
        **ring: Any,
    ) -> None:
        super().__init__()
        self.config, self.compile = model, compile
        self.residual = residual
        memory = memory or MemoryConfig()
        self.recompute = memory.recompute
        self.recomputed = memory.recomputed(model.n_layers)
        self.offload = None
        if memory.offload != "none":
            keeps, everything = memory.recompute == "attention-saving", memory.offload == "all"
            blocks = memory.offloaded(model.n_layers)
            self.offload = Offload(blocks, tokens, keeps, everything)
        self.rows = vocab_size  # rows of embedding and head
        self.embedding = nn.Embedding(vocab_size, model.dim, dtype=torch.float32)
        self.blocks = nn.ModuleList()
        for layer in range(model.n_layers):
            recomputes = layer < self.recomputed
            chunk = memory.mlp_chunk or (ALL if recomputes and not compile else None)
            block = Block(model, attention, chunk, model.window(layer), **ring)
            if compile:
                block.compiled = compiled_block(memory.recompute if recomputes else "none")
            self.blocks.append(block)
        self.norm = RMSNorm(model.dim, model.norm_eps, fused=compile)
        self.output = None
        if not model.tied_embeddings:
            self.output = Head(vocab_size, model.dim)
        # This is not a buffer: every rank computes the same values, so DDP need not broadcast them.
        self.frequencies = rope_frequencies(model.resolved_head_dim(), model.rope)
        self.attention_factor = attention_factor(model.rope)
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
        """Normalised hidden states (T, D). ``caches``, one per block, hold the preceding tokens.

        A layer attends within the narrower of its own window and that of ``plan``.
        """
        x_TD = self.embedding(tokens_T).to(self.residual)
        rotations = rotation(positions_T, self.frequencies, self.attention_factor)
        for number, block in enumerate(self.blocks):
            if caches is None:
                own = narrowed(plan, self.config.window(number))
                x_TD = self._run(number, block, x_TD, rotations, own)
            else:
                x_TD = block(x_TD, rotations, plan, caches[number])
        return self.norm(x_TD)

    def _run(
        self, number: int, block: nn.Module, x_TD: Tensor, rotations: Rotation, plan: Any
    ) -> Tensor:
        if number >= self.recomputed or self.compile or not torch.is_grad_enabled():
            return block(x_TD, rotations, plan)
        if self.offload is not None:
            return self.offload.checkpoint(number, block, x_TD, rotations, plan)
        selective = {} if self.recompute == "full" else {"context_fn": keep_attention}
        return checkpoint(block, x_TD, rotations, plan, use_reentrant=False, **selective)


class LanguageModel(nn.Module):
    """A transformer with its loss: batch -> cross entropy of every local token, (T,) float32.

    Matrix products and attention compute in ``dtype``. ``loss_chunk`` is the largest number of
    tokens whose logits exist at the same time.
    """

    def __init__(self, transformer: Transformer, dtype: torch.dtype, loss_chunk: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.dtype = dtype
        self.loss_chunk = loss_chunk

    def forward(self, batch: Batch) -> Tensor:
        with self._arithmetic(batch.tokens.device):
            hidden_TD = self.transformer(batch.tokens, batch.positions, batch.plan)
            fused = self.transformer.compile and torch.is_grad_enabled()
            settings = self.loss_chunk, fused
            if self.transformer.output is not None:
                return self.transformer.output(hidden_TD, batch.labels, *settings)
            return token_losses(hidden_TD, self.transformer.head, batch.labels, *settings)

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        """Whether the most probable token after each local token is its label, (T,) bool."""
        found = torch.zeros_like(batch.labels, dtype=torch.bool)
        labelled = (batch.labels != IGNORED).nonzero()[:, 0]
        with self._arithmetic(batch.tokens.device):
            hidden_TD = self.transformer(batch.tokens, batch.positions, batch.plan)
            for some in labelled.split(self.loss_chunk):
                logits_TV = F.linear(hidden_TD[some], self.transformer.head).float()
                found[some] = logits_TV.argmax(-1) == batch.labels[some]
        return found

    @torch.no_grad()
    def next_logits(self, tokens_T: Tensor, caches: Sequence[KVCache]) -> Tensor:
        """Logits of the token after ``tokens_T``, (V,) float32.

        The tokens follow those in ``caches`` (one per block) and are appended to them.
        """
        start = caches[0].length
        positions_T = start + torch.arange(len(tokens_T), dtype=torch.int64, device=tokens_T.device)
        with self._arithmetic(tokens_T.device):
            hidden_TD = self.transformer(tokens_T, positions_T, None, caches)
            return F.linear(hidden_TD[-1], self.transformer.head).float()

    def kernel_specs(self, device: torch.device) -> list[KernelSpec]:
        """Its calls of attention on a GPU, for ``plan_context``.

        Only plans of one host over ``symmetric`` use them: none on a CPU, or over ``nccl``.
        """
        layers = [x for x in self.modules() if isinstance(x, RingFA3Attention)]
        if device.type != "cuda" or self.dtype == torch.float32:
            return []
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        native = (x for x in layers if x.precision == "native" and x.transport != "nccl")
        return list(dict.fromkeys(x.kernel_spec(self.dtype, sms) for x in native))

    def _arithmetic(self, device: torch.device) -> torch.autocast:
        lower = self.dtype != torch.float32
        return torch.autocast(device.type, self.dtype if lower else None, enabled=lower)


def build_model(
    config: Config,
    n_tokens: int,
    device: torch.device,
    cp_group: dist.ProcessGroup | None = None,
    meta: bool = False,
    draw: bool = True,
) -> LanguageModel:
    """The model on ``device``, with the same weights on every rank; attention over ``cp_group``.

    ``n_tokens`` is the size of the tokenizer's vocabulary. With ``meta`` the parameters are on the
    meta device: an engine allocates each rank's part. Without ``draw`` they have no values yet.
    Raises ``ConfigError`` if ``n_tokens`` exceeds ``model.vocab_size``.
    """
    dtype = compute_dtype(config.train.precision, device)
    rows = config.model.rows(n_tokens)
    with torch.device("meta" if meta or not draw else "cpu"):
        transformer = Transformer(
            config.model,
            rows,
            config.train.seed,
            config.memory,
            attention=config.train.attention,
            residual=getattr(torch, config.train.residual),
            tokens=-(-config.samples_at_once() * config.data.seq_len // config.parallel.cp),
            compile=compiles(config, device.type == "cuda"),
            group=cp_group,
            layout=config.parallel.layout,
            transport=config.parallel.transport,
            deterministic=config.train.deterministic,
        )
    if not meta:
        transformer = transformer.to(device) if draw else transformer.to_empty(device=device)
    return LanguageModel(transformer, dtype, config.memory.loss_tokens(rows))
