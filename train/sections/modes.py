"""The folders of runs and sweeps, their records, and the modes that use a trained model."""

from __future__ import annotations

from dataclasses import dataclass

from train.sections.key import key
from train.sections.model import ROPE_TYPES

TASKS = ("single", "multi_key", "variable")
SCALED = tuple(name for name, keys in ROPE_TYPES.items() if keys)


@dataclass
class RunConfig:
    """The name and folder of a run."""

    name: str = "default"
    """name of the run"""
    dir: str = "runs/${run.name}"
    """folder for metrics, plots, TensorBoard and the summary"""
    overwrite: bool = False
    """replace the run in run.dir and its checkpoints, if it is complete or has another config. A
    stopped run continues; with checkpoint.resume=never it is replaced too"""


@dataclass
class LogConfig:
    """Weights & Biases."""

    wandb: bool = False
    """also send the scalars to Weights & Biases (WANDB_MODE=offline keeps them on this machine)"""
    wandb_project: str = "ringfa3"
    """the project at Weights & Biases"""


@dataclass
class ProfileConfig:
    """Traces of some steps."""

    steps: list[int] | None = key(None, at_least=1, length=2)
    """first and last step, counted from 1, of a trace for chrome://tracing or ui.perfetto.dev,
    written to profile/ in the run folder"""
    ranks: list[int] = key([0], at_least=0, distinct=True)
    """the ranks to trace"""
    memory: bool = False
    """also write the history of the CUDA allocator in these steps, for pytorch.org/memory_viz"""


@dataclass
class SweepConfig:
    """A sweep (-m): several runs of one command."""

    dir: str = "runs/${run.name}-sweep"
    """folder of a sweep (-m), with one run folder per job"""
    nproc_per_node: int | None = key(None, at_least=1)
    """start every job under torchrun with this many processes"""


@dataclass
class GenerateConfig:
    """``mode=generate`` writes text."""

    checkpoint: str | None = None
    """a checkpoint's folder; null is the newest of run.dir"""
    prompt: str = ""
    """the beginning of the text; "-" reads it from stdin"""
    tokens: int = key(200, at_least=1)
    """tokens to generate, at most: a text also ends where the model ends a document"""
    samples: int = key(1, at_least=1)
    """texts to generate, all from the same prompt"""
    temperature: float = key(0.8, at_least=0)
    """the logits are divided by it; 0 chooses the most probable token"""
    top_k: int | None = key(None, at_least=1)
    """sample from the K most probable tokens; null means all"""
    top_p: float | None = key(None, above=0, at_most=1)
    """sample from the smallest set of most probable tokens whose total probability reaches P; null
    means all"""
    seed: int = key(0, at_least=0)
    """the same seed gives the same text"""


@dataclass
class EvalConfig:
    """``mode=eval`` computes the loss of a text by position."""

    checkpoint: str | None = None
    """a checkpoint's folder; null is the newest of run.dir"""
    path: str | None = None
    """a text file or a folder of them; null is the run's held-out split"""
    name: str | None = None
    """the result is eval-NAME.json and .png in run.dir; null derives the name from path"""
    bytes: int | None = key(None, at_least=1)
    """stop after the document that reaches this many bytes; null means the whole text"""


@dataclass
class VerifyConfig:
    """``mode=verify`` compares a step with parallel.cp to the same step with cp 1."""

    seq_len: int | None = key(None, at_least=2)
    """tokens of a sample; null is data.seq_len. With cp 1 a process holds a whole sample"""


@dataclass
class EstimateConfig:
    """``mode=estimate`` predicts memory and the time of a step."""

    gpus: int | None = key(None, at_least=1)
    """GPUs of the job; null is parallel.cp, or the number of processes if that is more. With
    parallel.cp=all one process needs the key"""
    gpus_per_host: int = key(8, at_least=1)
    """GPUs of a host"""
    document: int | None = key(None, at_least=1)
    """tokens of each document in a sample; null is data.max_doc_len, or one document that fills the
    sample"""


@dataclass
class ExportConfig:
    """``mode=export`` writes a folder for Hugging Face's transformers."""

    dir: str | None = None
    """the folder to write, which must not exist or be empty"""
    checkpoint: str | None = None
    """a checkpoint's folder; null is the newest of run.dir"""
    dtype: str = key("float32", choices=("float32", "bfloat16"))
    """dtype of the weights"""
    padding: bool = False
    """also write the padding rows of embedding and head, which have no token"""
    shard_bytes: int = key(5_000_000_000, at_least=1)
    """largest size of a file of weights, in bytes"""


@dataclass
class NeedleConfig:
    """``mode=needle`` runs a needle in a haystack."""

    checkpoint: str | None = None
    """a checkpoint's folder; null is the newest of run.dir. The needles are hidden in the text of
    eval.path, or of the run's held-out split"""
    tasks: list[str] = key(["single", "multi_key", "variable"], choices=TASKS, distinct=True)
    """single asks for a number by its name, multi_key adds needles with other names, variable
    passes a number on from name to name"""
    lengths: list[int] = key([1024, 2048, 4096], at_least=2, distinct=True)
    """tokens of a trial"""
    depths: list[float] = key([0.0, 0.25, 0.5, 0.75, 1.0], at_least=0, at_most=1, distinct=True)
    """depth of the needle: 0 is the beginning of the text, 1 its end. With variable it is the depth
    of the first needle"""
    trials: int = key(4, at_least=1)
    """trials of each task, length and depth"""
    digits: int = key(5, at_least=1)
    """digits of a number"""
    others: int = key(3, at_least=0)
    """other names with numbers of their own (multi_key)"""
    hops: int = key(2, at_least=1)
    """how often the number is passed on (variable)"""
    seed: int = key(0, at_least=0)
    """the same seed gives the same trials"""


@dataclass
class RopeSweepConfig:
    """``mode=rope`` evaluates a text with other settings of RoPE."""

    checkpoint: str | None = None
    """a checkpoint's folder; null is the newest of run.dir"""
    types: list[str] = key(["linear", "yarn"], choices=SCALED)
    """types of RoPE to evaluate (linear, llama3, yarn), each with every factor, in addition to the
    run's own setting. The original length is the longest document of the run: max_doc_len or
    seq_len"""
    factors: list[float] = key([2.0, 4.0], above=1)
    """their factors"""
    thetas: list[float] = key([], above=1)
    """bases to evaluate, without scaling"""
