"""If this fails, an exported model reads text as other tokens than it was trained on. An exported
folder reads a text as the trainer does: its tokens, BOS, EOS, and their loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, processors

from tests.train.hf.loaded_runs import load_run
from tests.train.hf.test_hf_weights import ALONE, exported
from tests.train.hf_folders import BOS
from train.config import Config, DataConfig
from train.data.batches import make_batch
from train.data.encoder import DocumentEncoder
from train.data.samples import DocumentSlice, pack
from train.data.shards import open_corpus
from train.data.tokenizer import train_tokenizer
from train.hf.ends import write_ends
from train.run.run_folder import RunFolder
from train.tasks.load_model import load_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EOS = "</s>"


@pytest.fixture
def own(config: Config) -> Config:
    """A run without an origin, with a trained tokenizer and random weights."""
    config.model = dataclasses.replace(config.model, dim=32, ffn_dim=48, n_layers=2)
    config.model = dataclasses.replace(config.model, zero_init=False)
    return config


@pytest.fixture
def with_origin(make_folder, started) -> Config:
    """A run that started from a folder whose tokenizer adds EOS and no BOS."""
    origin = make_folder("llama")
    tokenizer = Tokenizer.from_file(str(origin / "tokenizer.json"))
    tokenizer.add_special_tokens([EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    tokenizer.save(str(origin / "tokenizer.json"))
    tokens = {"bos_token": None, "eos_token": BOS, "add_bos_token": False, "add_eos_token": True}
    settings = {"tokenizer_class": "LlamaTokenizerFast", "model_max_length": 77, **tokens}
    (origin / "tokenizer_config.json").write_text(json.dumps(settings))
    (origin / "special_tokens_map.json").write_text(json.dumps({"eos_token": BOS}))
    config = started(origin)
    config.data.eos_token = EOS
    return config


def origin_of(config: Config) -> Path:
    return Path(config.checkpoint.init_from.removeprefix("hf:"))


def losses_here(config: Config) -> dict[str, float]:
    """The trainer's mean loss of each of 20 documents, by the name of its file."""
    documents = open_corpus(config.data).train
    model = load_model(config, RunFolder(config), ALONE, None, print).model
    losses = {}
    for number in range(20):
        whole = DocumentSlice(number, 0, int(documents.lengths[number]))
        batch = make_batch(pack(documents, [whole]), None, "zigzag")
        with torch.no_grad():
            losses[documents.name(number)] = float(model(batch).double().sum()) / batch.n_valid
    return losses


def losses_there(target: Path, folder: Path, names: list[str]) -> dict[str, float]:
    """Those of transformers, tokenised by the folder's tokenizer, with EOS at the end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    losses = {}
    for name in names:
        text = (folder / name).read_text() + tokenizer.eos_token
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            losses[name] = float(model(ids, labels=ids).loss)
    return losses


@pytest.mark.parametrize("case", ["own", "with_origin"])
def test_the_loss_of_a_document_is_that_of_the_trainer(case, request, text_folder, tmp_path):
    """20 documents, each to 1e-5. ``export.padding`` keeps rows of the softmax without a token."""
    config = request.getfixturevalue(case)
    load_run(config, ALONE)
    target = exported(config, tmp_path / "out")
    expected = losses_here(config)
    got = losses_there(target, text_folder, list(expected))
    assert got == pytest.approx(expected, rel=1e-5)


def test_settings_of_the_origin_that_name_no_bos_or_other_ends_are_replaced(with_origin, tmp_path):
    load_run(with_origin, ALONE)
    target = exported(with_origin, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert tokenizer.model_max_length == 77
    assert json.loads((target / "special_tokens_map.json").read_text())["eos_token"] == EOS
    bos, eos = tokenizer.convert_tokens_to_ids([BOS, EOS])
    (first, second) = tokenizer("a ring", "of tokens").input_ids, tokenizer("a ring").input_ids
    assert [first.count(bos), second.count(bos), first.count(eos)] == [2, 1, 0]
    settings = transformers.AutoConfig.from_pretrained(target)
    assert (settings.bos_token_id, settings.eos_token_id) == (bos, eos)


def test_a_run_without_eos_leaves_the_ends_of_its_origin(with_origin, tmp_path):
    with_origin.data.eos_token = "none"
    load_run(with_origin, ALONE)
    target = exported(with_origin, tmp_path / "out")
    before, after = (
        json.loads((folder / "config.json").read_text())["eos_token_id"]
        for folder in (origin_of(with_origin), target)
    )
    assert before == after
    assert transformers.AutoTokenizer.from_pretrained(target).eos_token == BOS


@pytest.mark.parametrize("stored", [None, {"eos_token_id": [5, 7]}])
def test_generation_stops_at_the_ends_of_the_origin(tmp_path, stored):
    """transformers reads the ends in ``config.json`` only without ``generation_config.json``."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    tokenizer = train_tokenizer(["the ring"], 270, BOS, eos_token=EOS)
    write_ends(tmp_path, DocumentEncoder(tokenizer, DataConfig(eos_token=EOS)))
    settings = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert settings.eos_token_id == ([1, 5, 7] if stored else [1, 7])


@pytest.mark.parametrize("bos", ["$A", "a:0", "<|endoftext|>"])
def test_any_name_of_bos_begins_texts(tmp_path, bos):
    """Templates of ``tokenizers`` give dollar signs and colons a meaning."""
    tokenizer = train_tokenizer(["the ring"], 270, bos)
    text = tokenizer.encode("the ring").ids
    write_ends(tmp_path, DocumentEncoder(tokenizer, DataConfig(bos_token=bos)))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("the ring").input_ids == [0, *text]
    assert loaded.bos_token == bos


@pytest.mark.soak
def test_a_model_learns_to_end_a_document(pretrain, tmp_path):
    """80 steps on documents of one sentence; the trainer and transformers stop after it."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the ring keeps text number {number}.")
    text = [f"data.path={tmp_path}/text", f"data.cache_dir={tmp_path}/cache", "data.held_out=0.2"]
    model = ["model.dim=32", "model.ffn_dim=64", "model.n_layers=2", "parallel.threads=1"]
    own = [f"run.dir={tmp_path}/run", "generate.temperature=0", "generate.tokens=100"]
    length = ["train.steps=80", "data.seq_len=200", "data.vocab_size=300", "train.eval_every=0"]
    pretrain(*text, *model, *length, *own).check_returncode()
    generated = pretrain("mode=generate", *own, "generate.prompt='the ring keeps'").stdout
    assert generated.endswith(".\n")
    assert len(generated) < 30
    pretrain("mode=export", *own[:1], f"export.dir={tmp_path}/out").check_returncode()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = tokenizer("the ring keeps", return_tensors="pt")
    whole = model.generate(**prompt, do_sample=False, max_new_tokens=100)[0].tolist()
    assert whole[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(whole, skip_special_tokens=True) == f"the ring keeps{generated[:-1]}"
