"""Bytes of a step on one GPU, part by part, and in the memory of its host.

Peak memory is the sum of the persistent parts plus the largest phase. The phases of a step are the
loss, the backward of an MLP and the backward of attention; no two exist at the same time. T is the
tokens of a rank, D the width of the residual stream, H and K heads, C channels, F the hidden width
of the MLP, V rows of the head. Matrix products and attention are in bfloat16.

All gradients count as persistent, although most are created after the first phase: fsdp2 allocates
them on a stream of its own, and PyTorch does not reuse memory across streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringfa3.kernels.backward import STATISTIC_WORDS
from ringfa3.symmetric.ring_pass import BufferSpec
from ringfa3.symmetric.stream_ops import Buffer
from train.estimate.job import Job, parameters

HALF, FULL = 2, 4  # bytes of a bfloat16 and of a float32
# Layers whose saved tensors are on the device at the same time, if all but the last are offloaded:
# the last, one that is copied out, the one in its backward, the one that is copied back.
RESIDENT = 4
HIDDEN = 7  # tensors (tokens of a chunk, F) in the backward of the MLP
HIDDEN_WHOLE = 8  # the same if autograd saves them
LOGIT_BYTES = 2 * HALF + 2 * FULL  # logits and their gradient: rounded, and in float32


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by name: persistent ``parts``, and ``phases`` of which only the largest counts.

    ``host`` is the memory of a whole host.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    host: dict[str, int]

    @property
    def device(self) -> int:
        """Bytes on the device at the peak of a step."""
        return sum(self.parts.values()) + max(self.phases.values())

    @property
    def on_host(self) -> int:
        """Bytes on a host."""
        return sum(self.host.values())


def estimate_memory(job: Job) -> MemoryEstimate:
    """The memory of a step. Raises ``UnpredictableError``."""
    job.require_predictable()
    config, memory, ranks = job.config, job.config.memory, job.gpus
    block, embedding, head = parameters(config.model, job.rows)
    total = config.model.n_layers * block + embedding + head + config.model.dim
    share = -(-total // job.sharded_over)
    # fsdp2 holds unsharded gradients from the first micro-batch of a step to the last.
    summed = total if job.samples > 1 else share
    residual, attention = _kept(job)
    layers = config.model.n_layers
    resident = min(layers, layers - memory.offloaded(layers) + RESIDENT - 1)
    parts = {
        "weights": FULL * share,
        "gradients": FULL * summed,
        "Adam": 2 * FULL * share,
        "residual stream": residual * (layers if memory.offload == "none" else resident),
        "attention's (O, LSE)": attention * (layers if memory.offload != "all" else resident),
        "other activations": _others_kept(job) * layers,
        "shared K/V, dK/dV": shared_bytes(job),
        "CUDA context": round(config.hardware.context_gb * 1e9),
        "NCCL": round(config.hardware.nccl_gb * 1e9) if job.gpus > 1 else 0,
    }
    if memory.recompute == "full":
        parts["attention's (O, LSE)"] = 0
    host = {
        "offloaded activations": offloaded_bytes(job) * job.ranks_per_host,
        # A checkpoint copies a rank's part of weights and moments to a pinned buffer of this size.
        "checkpoints": 3 * FULL * total * job.ranks_per_host // ranks,
    }
    return MemoryEstimate(parts, _phases(job, block, embedding), host)


def offloaded_bytes(job: Job) -> int:
    """Bytes that a rank moves to its host in the forward of a sample."""
    memory, (residual, attention) = job.config.memory, _kept(job)
    of_layer = residual + attention if memory.offload == "all" else residual
    return of_layer * memory.offloaded(job.config.model.n_layers)


def shared_bytes(job: Job) -> int:
    """Bytes of a ring's buffers over NVLink, as ``ringfa3.symmetric.ipc_memory`` allocates them."""
    cp, model = job.config.parallel.cp, job.config.model
    if cp == 1:
        return 0
    shape = (job.tokens, model.n_kv_heads, model.resolved_head_dim())
    k = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    slot = dict.fromkeys(Buffer, 0)
    for pass_type in ("backward", "gathered"):
        for buffer, size in BufferSpec(job.plan, pass_type, k).slot_bytes.items():
            slot[buffer] = max(slot[buffer], size)
    blocks = min(2, cp - 1)
    shared = 2 * slot[Buffer.KV_SHARED] + blocks * slot[Buffer.DKV_OUT]
    by_hops = blocks * slot[Buffer.KV_RECV] + slot[Buffer.DKV_SUM] + slot[Buffer.DKV_RECV]
    return shared + max(slot[Buffer.KV_GATHERED], by_hops)


def _kept(job: Job) -> tuple[int, int]:
    """Bytes that a layer saves for its backward: (residual stream, attention's output and LSE)."""
    model, stream = job.config.model, _stream(job)
    row = model.n_heads * (model.resolved_head_dim() * HALF + FULL)
    if job.config.memory.recompute == "none" and stream == HALF:
        stream = 0  # the norms save a float32 copy, and nothing else needs it
    return job.tokens * model.dim * stream, job.tokens * row


def _stream(job: Job) -> int:
    return HALF if job.config.train.residual == "bfloat16" else FULL


def _projections(job: Job) -> int:
    """Bytes of q, k and v, or of their gradients."""
    model = job.config.model
    heads = model.n_heads + 2 * model.n_kv_heads
    return job.tokens * heads * model.resolved_head_dim() * HALF


def _normed(job: Job) -> int:
    """Bytes of a norm: its saved input and its rounded output.

    A float32 residual stream is itself the saved input.
    """
    model = job.config.model
    own = 0 if _stream(job) == FULL else FULL
    return job.tokens * model.dim * (own + HALF)


def _qk_normed(job: Job) -> int:
    """Bytes that the norms of q and k save, in float32."""
    model = job.config.model
    heads = model.n_heads + model.n_kv_heads
    return job.tokens * heads * model.resolved_head_dim() * FULL if model.qk_norm else 0


def _others_kept(job: Job) -> int:
    """Further bytes that a layer saves, if the backward recomputes nothing."""
    config, T = job.config, job.tokens
    if config.memory.recompute != "none":
        return 0
    # Each of wq, wk and wv saves its own rounded copy of a float32 input.
    copies = 2 * T * config.model.dim * HALF if _stream(job) == FULL else 0
    between = _kept(job)[0]  # the residual stream between attention and the MLP
    kept = _projections(job) + _qk_normed(job) + 2 * _normed(job) + copies + between
    if config.memory.mlp_chunk is None:
        kept += 4 * T * config.model.ffn_dim * HALF  # gate, up, silu, their product
    return kept


def _phases(job: Job, block: int, embedding: int) -> dict[str, int]:
    """Bytes of each phase in addition to the persistent parts, with the weights gathered for it."""
    model, memory, T = job.config.model, job.config.memory, job.tokens
    stream = T * model.dim * _stream(job)
    out = T * model.n_heads * model.resolved_head_dim() * HALF
    recomputed = 0
    if memory.recompute != "none":
        recomputed = _projections(job) + _qk_normed(job) + _normed(job)
    kv = T * 2 * model.n_kv_heads * model.resolved_head_dim()
    statistics = 2 * STATISTIC_WORDS[model.resolved_head_dim()] * FULL
    workspace = T * model.n_heads * (model.resolved_head_dim() * FULL + statistics)
    attention = workspace + out + kv * FULL + kv * HALF + out  # dO, float32 dK/dV, dK/dV, dQ
    if memory.recompute == "full":  # the backward recomputes (O, LSE)
        recomputed += _kept(job)[1]
    tokens = min(T, memory.mlp_chunk or T)
    hidden = tokens * model.ffn_dim * HALF
    if memory.mlp_chunk is not None or memory.recompute != "none":
        mlp = HIDDEN * hidden + 2 * T * model.dim * HALF  # the second term is dy and dx
    else:
        # `_others_kept` counts four of them: gate, up, silu, their product.
        mlp = (HIDDEN_WHOLE - 4) * hidden + 2 * T * model.dim * HALF
    if memory.recompute != "none":
        mlp += _normed(job) + stream
    chunk = min(T, memory.loss_tokens(job.rows))
    hidden_state = T * model.dim * (FULL + _stream(job))  # input and output of the last norm
    loss = chunk * job.rows * LOGIT_BYTES + hidden_state + stream
    sharded = job.sharded_over > 1
    # fsdp2 gathers a block and the next one, and reduces a block's gradients from a copy. Every
    # engine holds a block's rounded weights, and the float32 sums over the chunks of its MLP.
    of_block = block * (HALF + (2 + 2) * FULL) if sharded else block * (HALF + FULL)
    of_head = embedding * (HALF + FULL)  # rounded, and the float32 gradient
    if sharded and model.tied_embeddings:  # gathered for the whole step, with a whole gradient
        of_block += 2 * embedding * FULL
    if sharded:
        of_head += 2 * embedding * FULL + block * FULL
    return {
        "loss": loss + of_head,
        "backward of an MLP": mlp + recomputed + stream + of_block,
        "backward of attention": attention + recomputed + stream + of_block,
    }
