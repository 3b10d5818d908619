"""The sides of `compare_trainers`: what the processes of one side train, and how they are timed.

    torchrun --standalone --nproc-per-node N -m benchmarks.compare_trainers.sides SIDE FOLDER

All sides train the same model, of random weights, on the same documents. FOLDER has their settings
and the corpus; rank 0 writes SIDE.json there. `compare_trainers` starts them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

import ringfa3.hf
from benchmarks import compare_hf
from benchmarks.compare_hf import Shape
from benchmarks.compare_trainers import ring_flash_attn
from benchmarks.compare_trainers.stopwatch import RECORDED, UNDISTURBED, Stopwatch
from examples import hf_cp
from ringfa3 import plan_context
from ringfa3.bench.common import machine
from ringfa3.bench.common.fa3 import Fa3Ops

ROOT = Path(__file__).absolute().parents[2]
WARM_UP = 3  # steps of each figure that are not timed
PROFILED = UNDISTURBED + 1 + RECORDED  # steps with a profile; one warms the profiler up
TRACE = "trace.json"
PARTS = 32  # of a sample: its documents have 17, 8, 4, 2 and 1 of them
BOS = "<|endoftext|>"  # as data.bos_token of train/pretrain.py
RING = "SFTTrainer, RingFA3"
PAIRED, PEER = "SFTTrainer, RingFA3, alternating", "SFTTrainer, ring-flash-attn"
OWN, COMPILED = "train/pretrain.py", "train/pretrain.py, compiled"
ROWS = "SFTTrainer, accelerate's CP, one document a step"
DOCUMENTS = "SFTTrainer, accelerate's CP, a document at a time"
SHAPES = {
    "llama-1b": compare_hf.SHAPES["llama-1b"],
    "tiny": Shape(  # a smoke test
        ("LlamaConfig", {**hf_cp.SIZES, "tie_word_embeddings": True}), "sdpa", True, longest=128
    ),
}


@dataclass(frozen=True)
class Settings:
    """What all sides have in common.

    shape      a key of SHAPES
    tokens     of a sample; each optimiser step has one
    ranks      processes, which are one CP group
    steps      timed steps of each figure
    recompute  whether the backward recomputes every layer
    fa3        a library of FlashAttention-3's operators, for ring-flash-attn; None: without it
    device     "cuda" or "cpu"
    liger      whether layers of SFTTrainer's models are Liger's fused ones
    profile    whether rank 0 writes a trace of the last `RECORDED` steps
    """

    shape: str
    tokens: int
    ranks: int
    steps: int
    recompute: bool
    fa3: str | None
    device: str
    liger: bool = False
    profile: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the config of the model."""
        return SHAPES[self.shape].config[1]

    @property
    def all_steps(self) -> int:
        """Steps of a side with one figure."""
        return WARM_UP + self.steps

    def stopwatch(self, folder: Path, wait: bool = False) -> Stopwatch:
        """Of a side, with a trace in `folder` if `profile`."""
        return Stopwatch(self.all_steps, wait, folder / TRACE if self.profile else None)

    @property
    def samples(self) -> int:
        """Samples of the corpus: `peer` has two figures."""
        return 2 * self.all_steps

    def lengths(self) -> list[list[int]]:
        """The documents of each sample, in tokens.

        Best-fit packing restores the samples, without room for padding: see the test. No two
        samples are alike, so each step needs its own plan, as in training. All lengths are
        multiples of 2 * ranks, as accelerate's context parallelism needs.

        Raises ValueError: `tokens` is too small, or no multiple of 64 * ranks.
        """
        part, least = self.tokens // PARTS, 2 * self.ranks
        step = part // self.samples // least * least
        if self.tokens % (PARTS * least) or step == 0:
            raise ValueError(
                f"{self.tokens} tokens: they must be a multiple of {PARTS * least}, and at least "
                f"{PARTS * least * self.samples} for {self.steps} steps on {self.ranks} ranks"
            )
        return [
            [17 * part + n * step, 8 * part, 4 * part, 2 * part, part - n * step]
            for n in range(self.samples)
        ]

    def documents(self) -> list[np.ndarray[Any, Any]]:
        """Token ids of all documents, int64; each begins with BOS, id 0."""
        rng = np.random.default_rng(0)
        found = []
        for length in itertools.chain(*self.lengths()):
            ids = rng.integers(1, self.arguments["vocab_size"], length)
            ids[0] = 0
            found.append(ids)
        return found

    def write(self, folder: Path) -> None:
        """Write the settings, the tokenizer and the corpora of `train/pretrain.py`."""
        from tokenizers import Tokenizer, models

        words = [BOS, *(f"w{id}" for id in range(1, self.arguments["vocab_size"]))]
        ids = {word: id for id, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(ids, words[1]))
        tokenizer.add_special_tokens([BOS])
        tokenizer.save(str(folder / "tokenizer.json"))
        np.save(folder / "train.npy", np.concatenate(self.documents()))
        np.save(folder / "held_out.npy", np.arange(min(self.arguments["vocab_size"], 64)))
        (folder / "settings.json").write_text(json.dumps(asdict(self)))


class Alternation:
    """Every second step of a trainer has ring-flash-attn's attention instead of RingFA3's.

    Both shares of a step have as many tokens. That of ring-flash-attn gathers all KV heads at a
    time, which is faster than one by one.
    """

    def __init__(self, device: torch.device) -> None:
        from ringfa3.hf import batch, trainer

        self.device, self.on, self.shard_batch = device, False, batch.shard_batch
        batch.plan_context = self.plan_context
        trainer.shard_batch = self.shard

    def plan_context(self, cumulative: Any, group: Any, **options: Any) -> Any:
        layout = "contiguous" if self.on else "zigzag"
        return plan_context(cumulative, group, layout=layout, **options)

    def shard(self, inputs: Any, *given: Any) -> Any:
        found = self.shard_batch(inputs, *given)
        if self.on:
            del found.inputs["ringfa3_plan"]
            ring_flash_attn.register(found.plan, self.device)
        return found

    def begin(self, step: int, model: Any) -> None:
        self.on = step % 2 == 1
        name = ring_flash_attn.NAME if self.on else "ringfa3"
        model.config._attn_implementation = name


def ring(settings: Settings, folder: Path, device: torch.device) -> dict[str, Any]:
    """SFTTrainer with RingFA3's context parallelism, on packed documents."""
    trainer, watch = make_ring_trainer(settings, folder, device, settings.all_steps, None)
    trainer.train()
    return {"seconds": {RING: watch.seconds(settings.steps)}}


def peer(settings: Settings, folder: Path, device: torch.device) -> dict[str, Any]:
    """The same, alternating with ring-flash-attn."""
    assert settings.fa3 is not None
    Fa3Ops(Path(settings.fa3))  # loads it
    alternation = Alternation(device)
    trainer, watch = make_ring_trainer(settings, folder, device, settings.samples, alternation)
    trainer.train()
    seconds = watch.seconds(2 * settings.steps)
    return {"seconds": {PAIRED: seconds[0::2], PEER: seconds[1::2]}}


def make_ring_trainer(
    settings: Settings,
    folder: Path,
    device: torch.device,
    steps: int,
    alternation: Alternation | None,
) -> tuple[Any, Stopwatch]:
    """A trainer that packs the first `steps` samples. RuntimeError: it packs others."""
    ringfa3.hf.register()
    trainer, watch = make_trainer(
        settings, folder, device, settings.documents()[: 5 * steps], ringfa3.hf.context_parallel,
        "ringfa3", alternation, packing=True, max_steps=steps,
        parallelism_config=ringfa3.hf.ContextParallel(settings.ranks),
    )  # fmt: skip
    packed = [sorted(lengths, reverse=True) for lengths in trainer.train_dataset["seq_lengths"]]
    if sorted(packed) != sorted(settings.lengths()[:steps]):
        raise RuntimeError(f"SFTTrainer packs other samples than {settings.lengths()[:steps]}")
    return trainer, watch


def accelerate_cp(
    settings: Settings, folder: Path, device: torch.device, whole: bool
) -> dict[str, Any]:
    """SFTTrainer with accelerate's context parallelism, which refuses packing and needs FSDP2.

    The tokens of a step are one document if `whole`, else the documents of a sample, one at a time.
    """
    from accelerate import ParallelismConfig

    documents = settings.documents()[: 5 * settings.all_steps]
    if whole:
        documents = [np.concatenate(documents[n : n + 5]) for n in range(0, len(documents), 5)]
    trainer, watch = make_trainer(
        settings, folder, device, documents, lambda trainer: trainer, "sdpa",
        gradient_accumulation_steps=1 if whole else 5, max_steps=settings.all_steps,
        fsdp="full_shard auto_wrap", fsdp_config={"fsdp_version": 2},
        parallelism_config=ParallelismConfig(cp_size=settings.ranks),
    )  # fmt: skip
    trainer.train()
    return {"seconds": {ROWS if whole else DOCUMENTS: watch.seconds(settings.steps)}}


def make_trainer(
    settings: Settings,
    folder: Path,
    device: torch.device,
    documents: list[np.ndarray[Any, Any]],
    wrap: Callable[[type], type],
    attention: str,
    alternation: Alternation | None = None,
    **options: Any,
) -> tuple[Any, Stopwatch]:
    """An SFTTrainer of float32 weights under autocast, and its times."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    watch = settings.stopwatch(folder, wait=alternation is not None)

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, model: Any, **___: Any) -> None:
            if alternation is not None:
                alternation.begin(state.global_step, model)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_done()

    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=device.type == "cpu",
        bf16=True,
        per_device_train_batch_size=1,
        max_length=settings.tokens,
        gradient_checkpointing=settings.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",
        learning_rate=1e-5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_liger_kernel=settings.liger,
        # The host reads and moves batches, and issues updates, while the device computes.
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        accelerator_config={"non_blocking": True},
        logging_nan_inf_filter=False,
        **options,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="w1", eos_token=BOS
    )
    trainer = wrap(SFTTrainer)(
        model=SHAPES[settings.shape].model(attention, torch.float32, device),
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": documents}),
        callbacks=[Steps()],
    )
    return trainer, watch


def own(settings: Settings, folder: Path, device: torch.device, compiled: bool) -> None:
    """RingFA3's trainer, without its last checkpoint and evaluation. It ends the process."""
    from train.tasks.trainer import Trainer

    watch = settings.stopwatch(folder)
    step = Trainer.step

    def timed_step(trainer: Trainer, batches: list[Any], begin: float) -> dict[str, Any]:
        lengths = sorted(batches[0].plan.lengths.tolist(), reverse=True)
        if len(batches) > 1 or lengths not in settings.lengths():
            raise RuntimeError(f"a step has documents of {lengths} tokens: no sample of the corpus")
        record = step(trainer, batches, begin)
        watch.step_done()
        return record

    def finish(trainer: Trainer) -> None:
        name = "compiled" if compiled else "own"
        seconds = {COMPILED if compiled else OWN: watch.seconds(settings.steps)}
        write(folder / f"{name}.json", {"seconds": seconds}, device)

    Trainer.step, Trainer.finish, Trainer._require_saved = timed_step, finish, lambda _: None
    sys.argv = [str(ROOT / "train" / "pretrain.py"), *overrides(settings, folder, compiled)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def overrides(settings: Settings, folder: Path, compiled: bool) -> list[str]:
    """Of `train/pretrain.py`: the model of `settings.arguments`, and what SFTTrainer does."""
    model = settings.arguments
    heads = model["num_attention_heads"]
    return [
        *("model=tiny", f"model.n_layers={model['num_hidden_layers']}", f"model.n_heads={heads}"),
        *(f"model.n_kv_heads={model['num_key_value_heads']}", f"model.dim={model['hidden_size']}"),
        f"model.head_dim={model.get('head_dim', model['hidden_size'] // heads)}",
        *(f"model.ffn_dim={model['intermediate_size']}", "model.qk_norm=false"),
        *(f"model.tied_embeddings={model['tie_word_embeddings']}", "data=text"),
        *(f"data.path={folder}/train.npy", f"data.validation_path={folder}/held_out.npy"),
        *(f"data.tokenizer={folder}/tokenizer.json", "data.held_out=0"),
        *("data.eos_token=none", "data.packing=best_fit", f"data.seq_len={settings.tokens}"),
        *(f"data.cache_dir={folder}/cache", "engine=ddp", f"parallel.cp={settings.ranks}"),
        *(f"parallel.device={settings.device}", f"train.steps={settings.all_steps}"),
        *("train.gradient_accumulation_steps=1", "train.precision=bfloat16", "optim.lr=1e-5"),
        *("train.residual=float32", f"train.compile={'block' if compiled else 'none'}"),
        *("train.eval_every=0", "checkpoint.every=0", f"run.dir={folder}/run-{int(compiled)}"),
        f"memory.recompute={'full' if settings.recompute else 'none'}",
    ]


def errors(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Errors of the model's gradients in bfloat16, relative to those in float32."""
    found = compare_hf.measure(SHAPES[settings.shape], settings.tokens, 1, device)
    return {"errors": {"RingFA3": found.ours, SHAPES[settings.shape].attention: found.theirs}}


def write(path: Path, found: dict[str, Any], device: torch.device) -> None:
    """Add the machine and the most memory of a rank, in bytes; rank 0 writes."""
    if device.type == "cuda":
        peak = torch.tensor(torch.cuda.max_memory_allocated(device), device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        found["memory"] = int(peak)
    if dist.get_rank() == 0:
        found["machine"] = machine.describe(device, [])
        path.write_text(json.dumps(found))


SIDES: dict[str, Callable[[Settings, Path, torch.device], dict[str, Any] | None]] = {
    "ring": ring,
    "peer": peer,
    "own": functools.partial(own, compiled=False),
    "compiled": functools.partial(own, compiled=True),
    "rows": functools.partial(accelerate_cp, whole=True),
    "documents": functools.partial(accelerate_cp, whole=False),
    "errors": lambda settings, _, device: errors(settings, device),
}
NEED_GPUS = ("rows", "documents")  # PyTorch's context parallelism has no kernel for CPUs


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    settings = Settings(**json.loads((folder / "settings.json").read_text()))
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if name == "errors":  # the trainers make their groups
        dist.init_process_group()
    found = SIDES[name](settings, folder, device)
    assert found is not None
    write(folder / f"{name}.json", found, device)
    dist.barrier()  # no rank leaves while another still uses the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
