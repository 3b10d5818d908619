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
from ringfa3.symmetric.ipc_memory import ring_bytes
from train.estimate.job import Job, parameters

HALF, FULL = 2, 4  # bytes of a bfloat16 and of a float32
# Layers whose saved tensors are on the device at the same time, if all but the last are offloaded:
# the last, one that is copied out, the one in its backward, the one that is copied back.
RESIDENT = 4
HIDDEN = 7  # tensors (tokens of a chunk, F) in the backward of the MLP
HIDDEN_WHOLE = 8  # the same if autograd saves them
# Tensors (T, F) that an MLP saves: gate, up, silu, their product. A compiled block repeats silu.
HIDDEN_KEPT, HIDDEN_COMPILED = 4, 3
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
    # With engine.reduce=step whole gradients exist from the first micro-batch to the last.
    summed = total if job.micro_batches > 1 and config.engine.reduce == "step" else share
    layers = config.model.n_layers
    recomputed = memory.recomputed(layers)
    whole = layers - recomputed  # layers that keep all activations
    resident = min(recomputed, recomputed - memory.offloaded(layers) + RESIDENT - 1)
    on_device = resident if memory.offload != "none" else recomputed
    outputs = resident if memory.offload == "all" else recomputed
    if memory.recompute == "full":
        outputs = 0
    parts = {
        "weights": FULL * share,
        "gradients": FULL * summed,
        "Adam": 2 * FULL * share,
        "residual stream": _stream_kept(job, True) * on_device + _stream_kept(job, False) * whole,
        "attention's (O, LSE)": _outputs(job) * (outputs + whole),
        "other activations": _others_kept(job) * whole,
        "shared K/V, dK/dV": shared_bytes(job),
        "CUDA context": round(config.hardware.context_gb * 1e9),
        "NCCL": round(config.hardware.nccl_gb * 1e9) if job.gpus > 1 else 0,
    }
    host = {
        "offloaded activations": offloaded_bytes(job) * job.ranks_per_host,
        # A checkpoint copies a rank's part of weights and moments to a pinned buffer of this size.
        "checkpoints": 3 * FULL * total * job.ranks_per_host // ranks,
    }
    return MemoryEstimate(parts, _phases(job, block, embedding, parts["other activations"]), host)


def offloaded_bytes(job: Job) -> int:
    """Bytes that a rank moves to its host in the forward of a sample."""
    memory, of_layer = job.config.memory, _stream_kept(job, True)
    if memory.offload == "all":
        of_layer += _outputs(job)
    return of_layer * memory.offloaded(job.config.model.n_layers)


def shared_bytes(job: Job) -> int:
    """Bytes of a ring's buffers over NVLink."""
    cp, model = job.config.parallel.cp, job.config.model
    if cp == 1:
        return 0
    shape = (job.tokens, model.n_kv_heads, model.resolved_head_dim())
    k = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return ring_bytes(job.plan, k)


def _outputs(job: Job) -> int:
    """Bytes of a layer's output of attention and its LSE."""
    model = job.config.model
    return job.tokens * model.n_heads * (model.resolved_head_dim() * HALF + FULL)


def _stream_kept(job: Job, recomputes: bool) -> int:
    """Bytes of the residual stream that a layer saves for its backward."""
    stream = _stream(job)
    if not recomputes and stream == HALF and not job.compiled:
        stream = 0  # the norms save a float32 copy, and nothing else needs it
    return job.tokens * job.config.model.dim * stream


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
    """Further bytes that a layer saves if its backward recomputes nothing."""
    config, T = job.config, job.tokens
    hidden = T * config.model.ffn_dim * HALF if config.memory.mlp_chunk is None else 0
    if job.compiled:
        # In 16 bits: outputs of the norms, that of attention's projection, inputs of QK-norm.
        kept = _projections(job) + _qk_normed(job) * HALF // FULL + 3 * T * config.model.dim * HALF
        return kept + HIDDEN_COMPILED * hidden
    # Each of wq, wk and wv saves its own rounded copy of a float32 input.
    copies = 2 * T * config.model.dim * HALF if _stream(job) == FULL else 0
    between = _stream_kept(job, False)  # the residual stream between attention and the MLP
    kept = _projections(job) + _qk_normed(job) + 2 * _normed(job) + copies + between
    return kept + HIDDEN_KEPT * hidden


def _phases(job: Job, block: int, embedding: int, others: int) -> dict[str, int]:
    """Bytes of each phase in addition to the persistent parts, with the weights gathered for it.

    The last layers keep their activations, of together ``others`` bytes. They are free when the
    backward reaches a layer that recomputes.
    """
    memory = job.config.memory
    recomputed = memory.recomputed(job.config.model.n_layers)
    phases = _backward_phases(job, block, embedding, recomputes=False)
    if recomputed < job.config.model.n_layers:
        if recomputed:
            again = _backward_phases(job, block, embedding, recomputes=True)
            phases |= {f"{name}, recomputed": n - others for name, n in again.items()}
    else:
        phases = _backward_phases(job, block, embedding, recomputes=True)
    return {"loss": _loss(job, block, embedding), **phases}


def _backward_phases(job: Job, block: int, embedding: int, recomputes: bool) -> dict[str, int]:
    """Bytes of the phases of a layer's backward."""
    model, memory, T = job.config.model, job.config.memory, job.tokens
    stream = T * model.dim * _stream(job)
    out = T * model.n_heads * model.resolved_head_dim() * HALF
    recomputed = _projections(job) + _qk_normed(job) + _normed(job) if recomputes else 0
    kv = T * 2 * model.n_kv_heads * model.resolved_head_dim()
    statistics = 2 * STATISTIC_WORDS[model.resolved_head_dim()] * FULL
    workspace = T * model.n_heads * (model.resolved_head_dim() * FULL + statistics)
    attention = workspace + out + kv * FULL + kv * HALF + out  # dO, float32 dK/dV, dK/dV, dQ
    if recomputes and memory.recompute == "full":
        recomputed += _outputs(job)
    tokens = min(T, memory.mlp_chunk or T)
    hidden = tokens * model.ffn_dim * HALF
    if memory.mlp_chunk is not None or recomputes:
        mlp = HIDDEN * hidden + 2 * T * model.dim * HALF  # the second term is dy and dx
    else:
        kept = HIDDEN_COMPILED if job.compiled else HIDDEN_KEPT  # `_others_kept` counts them
        mlp = (HIDDEN_WHOLE - kept) * hidden + 2 * T * model.dim * HALF
    if recomputes:
        mlp += _normed(job) + stream
    # Every engine holds the float32 sums over the chunks of a block's MLP. ddp also rounds a
    # block's weights. fsdp2 gathers them rounded, with those of the next block, rounds the
    # gradients, and reduces them from a float32 copy.
    of_block = block * (3 * HALF + 2 * FULL if job.sharded_over > 1 else HALF + FULL)
    if job.sharded_over > 1 and model.tied_embeddings:  # whole in float32, as its gradient
        of_block += 2 * embedding * FULL
    return {
        "backward of an MLP": mlp + recomputed + stream + of_block,
        "backward of attention": attention + recomputed + stream + of_block,
    }


def _loss(job: Job, block: int, embedding: int) -> int:
    """Bytes of the loss and of its backward."""
    model, T = job.config.model, job.tokens
    stream = T * model.dim * _stream(job)
    chunk = min(T, job.config.memory.loss_tokens(job.rows))
    hidden_state = T * model.dim * (FULL + _stream(job))  # input and output of the last norm
    of_head = embedding * (HALF + FULL)  # rounded, and the float32 sums of its gradient
    if job.sharded_over > 1:  # the copy that is reduced, and the next block
        of_head += embedding * FULL + block * HALF
        # A tied embedding is gathered in float32. The gradient of a rounded head is rounded.
        of_head += embedding * (FULL if model.tied_embeddings else HALF)
    return chunk * job.rows * LOGIT_BYTES + hidden_state + stream + of_head
