"""If this fails, a chat model cannot be trained from a folder of transformers. From a folder of
transformers to a chat model: train on conversations, export, generate."""

from __future__ import annotations

import json

import pytest
import transformers

from tests.train.data.chats import BOS, TEMPLATES, chat_tokenizer, write_lines
from tests.train.hf.test_hf_weights import exported
from tests.train.trainers import make_trainer
from train.checks.config import check

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ANSWERS = {"ring": "It keeps every token.", "tale": "12 times, λ."}


@pytest.mark.parametrize("name", ["chatml", pytest.param("llama3", marks=pytest.mark.soak)])
def test_a_model_that_learned_to_chat_ends_its_answer(make_folder, started, tmp_path, name):
    """``generate`` of transformers gives both answers and stops at EOS, far before its limit."""
    eos, template = TEMPLATES[name]
    folder = make_folder("llama", vocab_size=320)
    chat_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    records = [
        {"messages": [{"role": "user", "content": f"{number} {word}"}]}
        for number in range(40)
        for word in ANSWERS
    ]
    for number, record in enumerate(records):
        answer = list(ANSWERS.values())[number % 2]
        record["messages"].append({"role": "assistant", "content": answer})
    config = started(folder)
    data = config.data
    data.path, data.format = str(write_lines(tmp_path / "chats.jsonl", records)), "chat"
    data.bos_token, data.eos_token, data.seq_len = BOS, eos, 256
    config.train.steps, config.train.global_batch_size, config.train.eval_every = 40, 2, 0
    config.optim.lr, config.optim.warmup_steps = 3e-3, 5
    config.checkpoint.every = 0
    check(config, world=1)
    trainer = make_trainer(config)
    trainer.train()
    trainer.close()
    target = exported(config, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert tokenizer.chat_template == template
    for word, answer in ANSWERS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"7 {word}"}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0].tolist()
        written = ids[prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(written) == answer + eos
