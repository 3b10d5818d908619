"""Hugging Face's `Trainer` with context parallelism, on packed documents of random tokens.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

`ringfa3.hf.context_parallel(trl.SFTTrainer)` is used in the same way.
"""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

import ringfa3.hf

ringfa3.hf.register()
torch.manual_seed(0)  # every rank makes the same documents and weights
config = Qwen3Config(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="ringfa3")
documents = [torch.randint(100, (length,)).tolist() for length in range(20, 60)]

trainer = ringfa3.hf.context_parallel(Trainer)(
    model=model,
    args=TrainingArguments(
        output_dir="runs/hf",
        use_cpu=not torch.cuda.is_available(),
        parallelism_config=ringfa3.hf.ContextParallel(2),  # data parallel: the processes / 2
        per_device_train_batch_size=4,
        max_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=[{"input_ids": ids, "labels": ids} for ids in documents],
    data_collator=DataCollatorWithFlattening(),
)
trainer.train()
