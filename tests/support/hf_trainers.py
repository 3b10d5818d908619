"""Steps of Hugging Face's trainers, in processes that share one import of transformers and trl.

`run` starts a process that imports them. It forks the stock trainer, in a process of its own, and
the ranks of each CP size. Each writes what its trainer did.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.ranks import SERVER, free_port

STEPS = 2
VOCABULARY = 97


@dataclass(frozen=True)
class Case:
    """What is trained.

    model      a name of `hf_models`
    attention  of the stock trainer; "eager" where transformers' own separates packed documents
    collator   "flattening" (packed), "left" or "right" (padded), "unequal" (between ranks);
               "packing" or "padding_free", of TRL; "loop": a loop with accelerate alone, packed
    options    of the arguments of the trainer
    config     of the model, changes
    dp         CP groups
    worlds     numbers of processes; with `dp` of them it is the stock trainer, under DDP
    lora       whether peft's LoRA trains adapters of random weights
    stream     whether the data are an IterableDataset
    resume     whether a second trainer goes on from the checkpoint after half of the steps
    fsdp       whether FSDP2 shards the model of the ring
    refused    name of a trainer of TRL that computes another loss
    """

    model: str
    attention: str = "eager"
    collator: str = "flattening"
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    worlds: tuple[int, ...] = (1, 2, 3)
    lora: bool = False
    stream: bool = False
    resume: bool = False
    fsdp: bool = False
    refused: str = ""

    @property
    def trl(self) -> bool:
        return self.collator in ("packing", "padding_free") or bool(self.refused)


# "grads": by step and name; "logs": of the trainer; "error": a message; "sharded": whether FSDP
# has sharded the model; "resumed": the grads of the second trainer; "weights": of both after the
# last step
Outcome = dict[str, Any]


def run(cases: dict[str, Case], folder: Path, limit: float) -> None:
    """Write `folder/CASE-WORLD.pt`, the `Outcome` on rank 0, for the worlds of each case."""
    process = SERVER.Process(target=_start_worlds, args=(cases, str(folder)))
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, (folder / "errors").read_text()


def _start_worlds(cases: dict[str, Case], folder: str) -> None:
    import accelerate.optimizer  # noqa: F401
    import transformers.trainer  # noqa: F401

    if any(case.trl for case in cases.values()):
        import trl.trainer.sft_trainer  # noqa: F401

    fork = multiprocessing.get_context("fork")
    exits = []
    for world in sorted({world for case in cases.values() for world in case.worlds}):
        here = {name: case for name, case in cases.items() if world in case.worlds}
        port = free_port()
        ranks = [
            fork.Process(target=_rank, args=(rank, world, port, here, folder))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        exits += [rank.exitcode for rank in ranks]
    os._exit(any(exits))


def _rank(rank: int, world: int, port: int, cases: dict[str, Case], folder: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    code = 0
    for name, case in cases.items():
        with Path(folder, "errors").open("a") as errors, contextlib.redirect_stdout(errors):
            try:
                outcome = train(case, world, f"{folder}/{name}-{world}")
            except BaseException:
                errors.write(f"{name}, rank {rank} of {world}:\n{traceback.format_exc()}\n")
                code = 1
                break
        if rank == 0:
            torch.save(outcome, Path(folder, f"{name}-{world}.pt"))
    os._exit(code)


def train(case: Case, world: int, shared: str) -> Outcome:
    """A few steps of one case on this rank; `shared` is a folder of all ranks."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    grads: list[dict[str, torch.Tensor]] = []
    if case.collator == "loop":
        return {"grads": run_loop(case, world), "logs": []}
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as stack:
        folder = shared if case.resume else own
        if case.fsdp and world > case.dp:
            stack.enter_context(fsdp_on_cpus())
        try:
            trainer = make_trainer(case, world, folder, grads)
            trainer.train()
        except (TypeError, ValueError) as refused:
            return {"error": f"{type(refused).__name__}: {refused}"}
    found: Outcome = {"grads": grads, "logs": trainer.state.log_history}
    found["sharded"] = any(hasattr(p, "full_tensor") for p in trainer.model.parameters())
    if case.resume:
        resumed: list[dict[str, torch.Tensor]] = []
        second = make_trainer(case, world, folder, resumed)
        second.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}")
        weights = [dict(x.model.named_parameters()) for x in (trainer, second)]
        found |= {"resumed": resumed, "weights": weights}
    return found


@contextlib.contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """accelerate enables FSDP2 for accelerators only: it takes these processes for some."""
    from accelerate.state import DistributedType, PartialState

    init = PartialState.__init__

    def as_gpus(state: Any, *arguments: Any, **keywords: Any) -> None:
        init(state, *arguments, **keywords)
        state.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.object(PartialState, "__init__", as_gpus):
        yield
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def run_loop(case: Case, world: int) -> list[dict[str, torch.Tensor]]:
    """The gradients of each step of docs/huggingface.md's loop with accelerate."""
    import accelerate
    import transformers

    import ringfa3.hf

    cp = world // case.dp
    parallelism = {"parallelism_config": ringfa3.hf.ContextParallel(cp)} if cp > 1 else {}
    accelerator = accelerate.Accelerator(cpu=True, **parallelism)
    model = make_model(case, cp > 1)
    collator = transformers.DataCollatorWithFlattening()
    loader = torch.utils.data.DataLoader(rows(9, 0), 3, collate_fn=collator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    grads = []
    for batch in loader:
        if cp > 1:
            group = accelerator.torch_device_mesh["cp"].get_group()
            inputs, _, num_labels = ringfa3.hf.shard_batch(batch, group)
            loss = model(**inputs, num_items_in_batch=num_labels).loss * cp
        else:
            loss = model(**batch).loss
        accelerator.backward(loss)
        bare = accelerator.unwrap_model(model)
        grads.append({name: _whole(p) for name, p in bare.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return grads


def make_model(case: Case, ring: bool) -> Any:
    """A random model, the same on every rank."""
    import transformers

    import ringfa3.hf
    from tests.support.hf_models import EXPERTS, config_of

    ringfa3.hf.register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(case.model, initializer_range=0.15, use_cache=False, **case.config),
        attn_implementation="ringfa3" if ring else case.attention,
        **EXPERTS,
    )
    return with_adapters(model) if case.lora else model


def with_adapters(model: Any) -> Any:
    import peft

    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
        ),
    )


def make_trainer(case: Case, world: int, folder: str, grads: list[dict[str, torch.Tensor]]) -> Any:
    """A trainer that appends the gradients of each step to `grads`."""
    import transformers

    import ringfa3.hf

    cp = world // case.dp
    ring = cp > 1
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all" if transformers.__version__ >= "5" else "no",
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam would enlarge the rounding of small gradients
        "bf16": False,
        **case.options,
    }
    if ring:
        settings["parallelism_config"] = ringfa3.hf.ContextParallel(cp)
    if case.fsdp and ring:
        settings |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    model = make_model(case, ring)

    class Spy(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            grads.append({name: _whole(p) for name, p in model.named_parameters()})

    wrap: Callable[[type], type] = ringfa3.hf.context_parallel if ring else lambda x: x
    if case.refused:
        import trl

        return wrap(getattr(trl, case.refused))
    data: dict[str, Any] = {"train_dataset": rows(41, 0), "eval_dataset": rows(5, 1)}
    if case.stream:
        data = {name: Stream(found) for name, found in data.items()}
    if case.trl:
        return _sft_trainer(case, wrap, model, settings, data, Spy())
    flatten = transformers.DataCollatorWithFlattening()
    collator: Any = flatten
    if case.collator == "unequal":
        rank = int(os.environ.get("RANK", 0))
        collator = lambda documents: flatten(documents[rank % 2 :])  # noqa: E731
    elif case.collator != "flattening":
        collator = Padding(case.collator)
    arguments = transformers.TrainingArguments(**settings)
    return wrap(transformers.Trainer)(
        model=model, args=arguments, data_collator=collator, callbacks=[Spy()], **data
    )


def _whole(p: torch.Tensor) -> torch.Tensor:
    """A gradient, gathered if it is sharded; zero for an expert without tokens."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return grad.detach().clone()


def _sft_trainer(
    case: Case, wrap: Callable[[type], type], model: Any, settings: dict[str, Any], data: Any,
    spy: Any,
) -> Any:  # fmt: skip
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "w1")), pad_token="w0", eos_token="w2"
    )
    keywords: dict[str, Any] = {"packing": True, "max_length": 64}
    if case.collator == "padding_free":
        keywords = {"padding_free": True, "max_length": None}
    arguments = SFTConfig(**settings, **keywords)
    return wrap(SFTTrainer)(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        callbacks=[spy],
        **{name: Dataset.from_list(completions(found)) for name, found in data.items()},
    )


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Documents of 3 to 60 random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, n: int) -> list[int]:
        return torch.randint(low, high, (n,), generator=generator).tolist()

    ids = [numbers(4, VOCABULARY, length) for length in numbers(3, 60, count)]
    return [{"input_ids": x, "labels": x} for x in ids]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Documents without a length."""

    def __init__(self, documents: list[dict[str, list[int]]]) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.documents)


def completions(documents: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """The same documents; the first third of each is a prompt."""
    return [
        {
            "input_ids": document["input_ids"],
            "completion_mask": [int(3 * i >= n) for i in range(n)],
        }
        for document in documents
        for n in [len(document["input_ids"])]
    ]


class Padding:
    """Pads documents to the longest, on the left or on the right."""

    def __init__(self, side: str) -> None:
        self.side = side

    def __call__(self, documents: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(document["input_ids"]) for document in documents)

        def padded(values: list[int], by: int) -> list[int]:
            more = [by] * (longest - len(values))
            return more + values if self.side == "left" else values + more

        found = {
            "input_ids": [padded(x["input_ids"], 0) for x in documents],
            # Padding on the left predicts no first token.
            "labels": [padded([-100, *x["labels"][1:]], -100) for x in documents],
            "attention_mask": [padded([1] * len(x["labels"]), 0) for x in documents],
        }
        return {name: torch.tensor(values) for name, values in found.items()}
