"""``optim``, ``train``, ``memory``, ``checkpoint`` and ``guard``: the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass

from train.sections.key import BY_SIZE, key

AUTO = "auto"  # as train.eval_bytes or train.final_eval_bytes: at least these bytes
AUTO_BYTES = {"eval_bytes": 100_000, "final_eval_bytes": 16_000_000}
# The default chunk of the loss has at most 2^26 logits, but at least 1,024 tokens: matrix products
# of fewer rows are slow.
MOST_LOGITS, LEAST_LOSS_TOKENS = 2**26, 1024


@dataclass
class OptimConfig:
    """AdamW and the schedule of its learning rate."""

    lr: float = key(3e-3, above=0, shown=BY_SIZE)
    """peak learning rate: 6e-4 for 125m, 3e-4 for 1b and 8b, and 3e-3 for tiny; train/recipe.py has
    the table with its sources"""
    embedding_lr_scale: float = key(1.0, at_least=0)
    """the learning rate of the embedding is lr times this"""
    betas: list[float] = key([0.9, 0.95], at_least=0, below=1, length=2)
    """decay of the first and second moment"""
    eps: float = key(1e-8, above=0)
    """added to the root of the second moment"""
    weight_decay: float = key(0.1, at_least=0)
    """decoupled weight decay of matrices; embeddings and norms have none"""
    schedule: str = key("cosine", choices=("cosine", "linear", "wsd"))
    """decay of the learning rate after the warm-up. wsd (warm-up, stable, decay) is constant, and
    decays linearly in the last decay_steps"""
    warmup_steps: int | None = key(None, at_least=0)
    """steps of linear warm-up; null means 2,000, but at most a tenth of the schedule. A warm-up
    longer than the schedule is shortened likewise"""
    schedule_steps: int | None = key(None, at_least=1)
    """length of the schedule in steps, from the first step of the run; null means train.steps.
    After its end the learning rate is final_lr_ratio times lr, which must not be 0"""
    decay_steps: int | None = key(None, at_least=1)
    """decay steps of schedule wsd; null means a tenth of its length"""
    final_lr_ratio: float = key(0.0, at_least=0)
    """final learning rate, as a fraction of lr"""
    clip: float | None = key(1.0, above=0)
    """clip gradients to this global norm; null means no clipping"""


@dataclass
class TrainConfig:
    """The steps of a run, their precision, and its evaluations."""

    steps: int = key(300, at_least=1)
    """optimiser steps"""
    global_batch_size: int | None = key(None, at_least=1)
    """global batch size: samples per optimiser step, at any number of processes. It must be a
    multiple of the samples in a micro-batch of all ranks: the data-parallel size, times
    data.tokens_per_rank x parallel.cp / data.seq_len if that is given. null means
    gradient_accumulation_steps micro-batches, or else the samples of batch_tokens"""
    gradient_accumulation_steps: int | None = key(None, at_least=1)
    """gradient accumulation: micro-batches per optimiser step. A CP group has one sample in a
    micro-batch, or those of data.tokens_per_rank. It must be null or 1 if global_batch_size is
    given"""
    batch_tokens: int | None = key(None, at_least=1, shown=BY_SIZE)
    """tokens per optimiser step, if global_batch_size and gradient_accumulation_steps are null: the
    nearest number of micro-batches, at least one. 2^19 for 125m and 1b, 2^22 for 8b, null for tiny:
    one micro-batch"""
    precision: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """dtype of matrix products and attention; weights are always float32. auto is bfloat16 on CUDA
    and float32 on the CPU"""
    residual: str = key("float32", choices=("float32", "bfloat16"))
    """dtype of the residual stream, which every layer saves for the backward. bfloat16 halves that
    memory and needs precision bfloat16"""
    seed: int = key(0, at_least=0)
    """seed of the initial weights and of the order of the samples"""
    deterministic: bool = False
    """bit-equal steps from run to run on the same GPUs, also after a kill and a restart. It chooses
    deterministic algorithms of RingFA3, PyTorch, cuBLAS and NCCL, at some cost"""
    attention: str = key("ringfa3", choices=("ringfa3", "sdpa"))
    """the implementation of attention. sdpa is a baseline: PyTorch's scaled_dot_product_attention,
    document by document (parallel.cp=1 only)"""
    compile: str = key(AUTO, choices=(AUTO, "block", "none"))
    """block compiles every block of a training step to one graph, with attention as a node. This
    fuses norms, RoPE, activations and casts. The first steps are slow. It needs
    memory.offload=none, deterministic=false and a compiler. auto is block on GPUs where that works,
    else none, and a line names the reason. A run that was started with none continues with it"""
    eval_every: int = key(100, at_least=0)
    """steps between validations; 0 validates only at the end"""
    eval_bytes: int | str | None = key(AUTO, at_least=1, words=(AUTO,))
    """held-out bytes per validation during training, as whole documents; null for all. auto is 100
    kB or more: at least 4 x data.seq_len tokens, and one document of the length that is trained (or
    the longest, if there is none)"""
    final_eval_bytes: int | str | None = key(AUTO, at_least=1, words=(AUTO,))
    """the same for the final evaluation; auto: 16 MB or more"""
    final_eval_last: int | None = key(None, at_least=1)
    """the final evaluation also reports the loss on the last N positions of a full window
    (data.max_doc_len, or data.seq_len)"""
    final_eval_len: int | None = key(None, at_least=2)
    """the final evaluation also reads documents in windows of N tokens, for example the context
    length before an extension"""
    speed_test: bool = False
    """measure the speed alone: the run ends after its last step, without an evaluation and without
    a checkpoint. In run.dir the file speed.json gets the medians of all steps but the first, and
    the errors of the prediction. Both checkpoint.every and train.eval_every must be 0"""
    max_wall_time: float | None = key(None, above=0)
    """seconds after which the run saves and ends, as after SIGTERM"""


@dataclass
class MemoryConfig:
    """What is recomputed or offloaded, so that long samples fit."""

    recompute: str = key("none", choices=("none", "full", "attention-saving"))
    """activation checkpointing. none recomputes nothing. full recomputes every layer in the
    backward. attention-saving is selective checkpointing: it recomputes everything except
    attention, so the ring runs once"""
    mlp_chunk: int | None = key(None, at_least=1)
    """MLP chunk size in tokens; hidden states are recomputed in the backward. null means one
    chunk"""
    loss_chunk: int | None = key(None, at_least=1)
    """loss chunk size in tokens; logits are recomputed in the backward. null means 2^26 logits per
    chunk, but at least 1,024 tokens: 8,192 tokens for a vocabulary of 8,192"""
    offload: str = key("none", choices=("none", "residual", "all"))
    """what is offloaded to host memory between forward and backward, if recompute is not none.
    residual offloads the input of each layer, the residual stream. all also offloads attention's
    output and LSE (recompute=attention-saving only)"""
    offload_layers: int | None = key(None, at_least=1)
    """number of layers that offload, the first ones. Fewer layers need less host memory and more
    device memory. null means all that recompute but the last of them"""
    recompute_layers: int | None = key(None, at_least=1)
    """with recompute, number of layers that the backward recomputes, the first ones. The others
    keep their activations, which saves time and costs memory; null means all"""
    force: bool = False
    """on GPUs, start even if the prediction is that device or host memory is too small, or that a
    step takes longer than parallel.timeout_s"""

    def loss_tokens(self, rows: int) -> int:
        """Tokens in a chunk of the loss, if each has ``rows`` logits."""
        if self.loss_chunk is not None:
            return self.loss_chunk
        return max(LEAST_LOSS_TOKENS, MOST_LOGITS // rows)

    def recomputed(self, n_layers: int) -> int:
        """How many of ``n_layers`` layers the backward recomputes: the first ones."""
        if self.recompute == "none":
            return 0
        return n_layers if self.recompute_layers is None else self.recompute_layers

    def offloaded(self, n_layers: int) -> int:
        """How many of ``n_layers`` layers offload their tensors: the first of those that recompute.

        The last of those does not: its backward fetches the tensors of the one before it.
        """
        if self.offload == "none":
            return 0
        last = self.recomputed(n_layers) - 1
        return last if self.offload_layers is None else self.offload_layers


@dataclass
class CheckpointConfig:
    """When a run is saved, and from where it starts."""

    every: int = key(100, at_least=0)
    """steps between checkpoints; 0 saves only at the end and when stopped. A thread writes them
    while training continues"""
    keep: int = key(2, at_least=1)
    """number of newest checkpoints to keep"""
    keep_every: int | None = key(None, at_least=1)
    """also keep the checkpoint of every N-th step"""
    resume: str = "auto"
    """with auto, the run in run.dir continues if its config is the same; docs/training/run.md lists
    the keys that may differ. With never, a folder that has a run is rejected. A path (of a run or a
    checkpoint) starts a new run with its weights, optimiser state and position in the data;
    train.steps counts the steps of both runs"""
    init_from: str | None = None
    """start a new run from the weights of this run or checkpoint, or of hf:FOLDER. Such a folder
    has a Llama, Qwen2 or Qwen3 of Hugging Face's transformers in safetensors. With model=inherit
    the model comes from there too, or from the path in resume"""
    reset_data: bool = False
    """a second stage. From the path in checkpoint.resume the new run takes weights and Adam's
    moments. Its steps, schedule and position in the data begin at 0, so it may have other data,
    another data.seq_len and other keys of model.rope"""
    accept_changes: list[str] = key([])
    """keys of the recipe that may change when the run in run.dir continues, for example [optim.lr,
    train.steps]. Here train.global_batch_size stands for the samples of a step, also if the number
    of processes changes them. The key train.steps stands for the length of the schedule"""
    stop_s: float = key(12.0, above=0)
    """seconds that a stop waits for the end of an update that has begun. After them it ends without
    saving. Large models on the CPU, and a roll-back to a large checkpoint, need more. torchrun then
    needs a longer --shutdown-timeout (default 30), which also covers the write"""

    def resumes(self) -> bool:
        """Whether ``resume`` is the path of another run or checkpoint."""
        return self.resume not in ("auto", "never")


@dataclass
class GuardConfig:
    """The spike filter: it skips optimiser steps with a bad loss or gradient norm."""

    sigma: float | None = key(None, above=0)
    """skip a step whose loss or gradient norm is more than this many standard deviations above the
    mean of the last steps. null skips only steps that are not finite"""
    window: int = key(128, at_least=2)
    """number of steps in that mean"""
    patience: int = key(10, at_least=1)
    """after so many consecutive skips, roll back to the newest checkpoint that was not saved during
    skips, and continue with the data after the skipped steps"""
