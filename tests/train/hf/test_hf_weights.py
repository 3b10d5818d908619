"""If this fails, weights change on the way from transformers or back. Weights from transformers to
the trainer and back; logits against transformers."""

from __future__ import annotations

import dataclasses
import json
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.nn import functional as F

from tests.support.double import double
from tests.support.hf_models import difference, tokens
from tests.support.ranks import sacrifice
from tests.train.engine.test_engines import DDP, FSDP2, ZERO
from tests.train.hf.loaded_runs import load_run, load_runs
from tests.train.hf_folders import BOS, N_TOKENS, ROPES, ROWS
from train.checks.config import check
from train.config import Config, ConfigError, EngineConfig, ExportConfig
from train.data.batches import make_batch
from train.data.samples import Sample
from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.engine.shard import whole
from train.engine.stored_checkpoint import find_checkpoint
from train.hf.load import load_folder
from train.model.transformer import build_model
from train.run.run_config import with_run_config
from train.run.run_folder import RunFolder
from train.tasks.export import export, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ALONE = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))
MODELS = [
    *(pytest.param("llama", rope, {}, id=f"llama {rope}") for rope in ROPES),
    pytest.param("qwen2", "yarn", {"tie_word_embeddings": True}, id="qwen2 tied yarn"),
    pytest.param("qwen2", "default", {}, id="qwen2"),
    pytest.param("qwen2", "default", {"use_sliding_window": True}, id="qwen2 windows"),
    pytest.param("qwen3", "llama3", {"tie_word_embeddings": True}, id="qwen3 tied llama3"),
    pytest.param("qwen3", "yarn, all keys", {"num_key_value_heads": 1}, id="qwen3 yarn, all keys"),
]


def logits_of(config: Config, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of the trainer's model in float64, with the weights of ``folder``."""
    with double():
        model = build_model(config, N_TOKENS, torch.device("cpu"))
    named = model.transformer.named_parameters()
    load_folder(folder, {f"model.{name}": whole(p) for name, p in named})
    cu_seqlens = [0, len(ids)]
    batch = make_batch(Sample(ids.numpy(), ids.numpy(), cu_seqlens), None, "zigzag")
    with torch.no_grad(), double():
        hidden = model.transformer(batch.tokens, batch.positions, batch.plan)
        return F.linear(hidden, model.transformer.head)


def logits_of_transformers(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of a model with the weights of ``model``, in float64."""
    with torch.no_grad(), double():
        wide = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
        wide.load_state_dict(model.state_dict())
        return wide.eval()(ids[None]).logits[0]


@pytest.mark.parametrize(("name", "rope", "changes"), MODELS)
def test_logits_are_those_of_transformers(make_folder, started, name, rope, changes):
    """200 tokens, more than any original length: 1e-12 of the largest logit, in float64."""
    folder = make_folder(name, rope, **changes)
    config = started(folder)
    check(config, world=1)
    ids = tokens(200)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    expected = logits_of_transformers(theirs, ids)
    assert difference(logits_of(config, folder, ids), expected) <= 1e-12


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files; each in one file, and in the index if there is one."""
    found: dict[str, torch.Tensor] = {}
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                found[name] = file.get_tensor(name)
                places[name] = path.name
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(set(places.values())) > 1)
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == places
    return found


def exported(config: Config, target: Path, **keys: object) -> Path:
    keys = {"dir": str(target), "padding": True, **keys}
    config = dataclasses.replace(config, export=ExportConfig(**keys))
    check(dataclasses.replace(config, mode="export"), world=1)
    folder = RunFolder(config)
    return export(config, folder, find_checkpoint(folder.path, print))


def check_round_trip(
    make_folder, started, tmp_path: Path, engines: dict[str, EngineConfig]
) -> None:
    """Under each engine on two ranks, of one file and of several, tied and not: equal bits."""
    configs, origins = [], []
    cases = {"llama": (False, False), "qwen2": (True, True), "qwen3": (False, True)}
    for name, (tied, shards) in cases.items():
        origin = make_folder(name, "yarn", shards, tie_word_embeddings=tied)
        config = started(origin)
        open_corpus(config.data)
        for engine, settings in engines.items():
            run = dataclasses.replace(config.run, dir=str(tmp_path / f"run-{name}-{engine}"))
            data, keep = dataclasses.replace(config.data), dataclasses.replace(config.checkpoint)
            configs.append(
                dataclasses.replace(config, run=run, engine=settings, data=data, checkpoint=keep)
            )
            check(configs[-1], world=2)
            origins.append((origin, tied, shards))
    by_rank = sacrifice(2, 60, load_runs, configs, limit=20 * len(configs))
    for number, (config, (origin, tied, shards)) in enumerate(zip(configs, origins, strict=True)):
        before = tensors_in(origin)
        size = sum(tensor.numel() for tensor in before.values())
        read = [counts[number] for counts in by_rank]
        replicas = 2 if config.engine.name == "ddp" else 1
        assert sum(read) == replicas * size  # every rank reads its own rows
        assert max(read) <= 0.6 * replicas * size
        shard_bytes = 20_000 if shards else 10**9
        target = tmp_path / f"out-{number}"
        exported(config, target, shard_bytes=shard_bytes)
        after = tensors_in(target)
        assert (len(list(target.glob("*.safetensors"))) > 1) == shards
        assert before.keys() == after.keys()
        assert ("lm_head.weight" in after) != tied
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        model = transformers.AutoModelForCausalLM.from_pretrained(target)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(origin)
        with torch.no_grad():
            assert torch.equal(model(tokens(1, 90)).logits, theirs(tokens(1, 90)).logits)


def test_weights_go_in_and_out_unchanged(make_folder, started, tmp_path):
    check_round_trip(make_folder, started, tmp_path, {"ddp": DDP, "fsdp2": FSDP2})


@pytest.mark.deepspeed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_weights_go_in_and_out_of_deepspeed_unchanged(make_folder, started, tmp_path):
    check_round_trip(make_folder, started, tmp_path, ZERO)


def test_an_exported_folder_loads_with_its_tokenizer(make_folder, started, tmp_path):
    """bfloat16 goes in and out unchanged; rows that no token has are left out; settings of the
    origin are kept, such as other tokens that end a text."""
    origin = make_folder("qwen3", "llama3", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(origin, dtype="bfloat16")
    model.config.eos_token_id = model.generation_config.eos_token_id = 7
    model.save_pretrained(origin)
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    config = started(origin)
    check(config, world=1)
    load_run(config, ALONE)
    target = exported(config, tmp_path / "out", padding=False, dtype="bfloat16")
    before, after = tensors_in(origin), tensors_in(target)
    name = "model.embed_tokens.weight"
    assert before[name].shape[0] == ROWS
    before[name] = before[name][:N_TOKENS]
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == torch.bfloat16
        assert torch.equal(tensor, after[name]), name
    settings = transformers.AutoConfig.from_pretrained(target)
    assert (settings.vocab_size, settings.eos_token_id) == (N_TOKENS, [0, 7])
    assert transformers.GenerationConfig.from_pretrained(target).eos_token_id == [0, 7]
    assert settings.max_position_embeddings == 256
    assert (target / "chat_template.jinja").exists()


def test_a_model_of_the_trainer_is_exported(config, tmp_path):
    """Without an origin, as on the command line: logits of transformers, and its tokenizer.

    The target is a link to an empty folder. A full disk is one line, and nothing stays behind.
    """
    config.model = dataclasses.replace(config.model, dim=32, ffn_dim=48, n_layers=2)
    config.model = dataclasses.replace(config.model, zero_init=False)
    load_run(config, ALONE)
    asked, target = Config(mode="export"), tmp_path / "out"
    (tmp_path / "disk").mkdir()
    target.symlink_to(tmp_path / "disk")
    asked.run.dir, asked.export.dir = config.run.dir, str(target)
    asked = with_run_config(asked, ["mode", "run.dir", "export.dir"])
    check(asked, world=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"export\.dir: the folder .*/disk cannot be written"):
            run(asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob(".*.tmp"))
    with pytest.raises(SystemExit, match="0"):
        run(asked)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    text = "ring attention keeps λ\n every  token"
    own = open_corpus(config.data).tokenizer
    assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text).ids
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (BOS, own.token_to_id(BOS))
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (own.token_to_id(BOS),) * 2
    assert model.generation_config.eos_token_id == own.token_to_id(BOS)
    ids = torch.arange(3, 120)
    expected = logits_of_transformers(model, ids)
    assert difference(logits_of(config, target, ids), expected) <= 1e-12
