"""A Hugging Face model under the ring: loss and gradients of packed documents.

    torchrun --standalone --nproc-per-node 3 examples/hf_cp.py --tiny llama
    torchrun --standalone --nproc-per-node 8 examples/hf_cp.py --model FOLDER --checkpointing

Every rank prints the loss of all documents and the norm of the summed gradients. The numbers are
the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

import ringfa3.hf
from ringfa3 import ContextPlan, keep_attention, plan_context

CUMULATIVE = [0, 37, 38, 90, 128]  # cumulative lengths of four documents; the second has one token
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
TINY = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 8}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 9}),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 8, **MIXED}),
    "gpt-oss": (
        transformers.GptOssConfig,
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    ),
}


def tiny_model(name: str, attention: str = "ringfa3") -> nn.Module:
    """A random model of a few thousand weights, the same on every rank."""
    config_class, special = TINY[name]
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **special})
    # transformers 4 computes experts in this way alone
    experts = {"experts_implementation": "eager"} if transformers.__version__ >= "5" else {}
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, **experts
    )


def shifted_labels(ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The next token of each token, (total,); -100 for the last one of a document."""
    labels = ids.roll(-1)
    labels[[end - 1 for end in itertools.accumulate(lengths)]] = -100
    return labels


def loss_of(model: nn.Module, ids: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
    """This rank's part of the mean loss of all tokens. Sum it, and its gradients, over the ranks.

    ids: (total,) all tokens of all documents, on every rank.
    """
    labels = shifted_labels(ids, plan.lengths.tolist())  # before they are sharded
    logits = model(
        input_ids=plan.shard(ids)[None],
        position_ids=plan.positions[None].to(ids.device),
        use_cache=False,
        ringfa3_plan=plan,
    ).logits
    total = F.cross_entropy(logits[0].float(), plan.shard(labels), reduction="sum")
    return total / (labels != -100).sum()


def summed_gradients(model: nn.Module, plan: ContextPlan) -> dict[str, torch.Tensor]:
    """The gradients by parameter, in float32, summed over the ranks of the plan."""
    sums = {}
    for name, p in model.named_parameters():  # some ranks may have no gradient of an expert
        sums[name] = torch.zeros_like(p).float() if p.grad is None else p.grad.float()
        if plan.world > 1:
            dist.all_reduce(sums[name], group=plan.group)
    return sums


def results_of(model: nn.Module, ids: torch.Tensor, plan: ContextPlan) -> dict[str, torch.Tensor]:
    """The loss and the gradients by parameter, summed over the ranks of the plan."""
    loss = loss_of(model, ids, plan)
    loss.backward()
    total = loss.detach().clone()
    if plan.world > 1:
        dist.all_reduce(total, group=plan.group)
    return {"loss": total, **summed_gradients(model, plan)}


def checkpoint(model: nn.Module) -> None:
    """Recompute everything except attention in the backward, so that no ring runs twice."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})


def example_ids(vocabulary: int) -> torch.Tensor:
    """Random tokens of the documents, (total,)."""
    return torch.randint(
        1, vocabulary, (CUMULATIVE[-1],), generator=torch.Generator().manual_seed(1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", choices=TINY, help="a random model of this architecture")
    parser.add_argument("--model", help="a folder or name for from_pretrained, in place of --tiny")
    parser.add_argument("--checkpointing", action="store_true", help="recompute all but attention")
    parser.add_argument("--save", help="a file for the loss and the summed gradients")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if dist.is_torchelastic_launched():
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    elif os.environ.get("WORLD_SIZE", "1") != "1":
        raise SystemExit("WORLD_SIZE > 1: run torchrun --nproc-per-node 2 examples/hf_cp.py")
    ringfa3.hf.register()
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, attn_implementation="ringfa3", dtype=torch.bfloat16
        )
    else:
        model = tiny_model(args.tiny or "llama")
    model = model.to("cuda", torch.bfloat16) if cuda else model
    model.train()
    if args.checkpointing:
        checkpoint(model)
    plan = plan_context(CUMULATIVE)
    ids = example_ids(model.config.vocab_size).to(model.device)
    results = results_of(model, ids, plan)
    norm = torch.stack([g.norm() for name, g in results.items() if name != "loss"]).norm()
    loss = results["loss"]
    print(f"rank {plan.rank} of {plan.world}: loss {loss:.5f}, norm of gradients {norm:.5f}")
    if args.save and plan.rank == 0:
        torch.save(results, args.save)
    if dist.is_initialized():
        dist.barrier()  # a rank must not leave while another still uses the group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
