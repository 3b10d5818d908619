"""If this fails, a job takes GPUs before it finds that its folders are wrong. Folders that a run
cannot start from: each is one line, before any process group and torch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from train.checks.config import check
from train.checks.origin import check_origin
from train.config import ConfigError
from train.engine.shard import whole
from train.hf.load import load_folder
from train.run.inherit import inherited_model, resolve_inherited

PLAIN = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(make_folder) -> Path:
    """Of one file."""
    return make_folder("llama", tie_word_embeddings=True)


@pytest.fixture
def sharded(make_folder) -> Path:
    return make_folder("qwen2", shards=True)


def change(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the one file; None removes one."""
    found = {**load_file(folder / PLAIN), **tensors}
    save_file({name: t for name, t in found.items() if t is not None}, folder / PLAIN)


def refusal(started: Any, folder: Path, **changes: Any) -> str:
    """The message of the check; a check without changes passes first."""
    config = started(folder)
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError) as raised:
        check_origin(config)
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    assert str(folder) in message
    return message


def test_a_good_folder_passes(started, folder, sharded):
    for good in (folder, sharded):
        check(started(good), world=1)
        check_origin(started(good))


def test_missing_extra_and_misshapen_tensors(started, folder):
    change(folder, {"model.inv_freq": torch.ones(3)})
    assert "has the tensor model.inv_freq, which the model does not have" in refusal(
        started, folder
    )
    change(folder, {"model.inv_freq": None, NORM: torch.ones(25)})
    assert f"{NORM} is [25]; config.json says [24]" in refusal(started, folder)
    change(folder, {NORM: None})
    assert f"lacks the tensor {NORM} [24]" in refusal(started, folder)


def test_elements_that_float32_cannot_hold(started, folder):
    change(folder, {NORM: torch.ones(24, dtype=torch.float64)})
    message = f"{folder / PLAIN}: {NORM} is of type F64; the trainer reads F32, BF16, F16"
    assert refusal(started, folder) == message


@pytest.mark.parametrize("cut", [1, 1000, 10**9])
def test_a_truncated_file(started, folder, sharded, cut):
    for place, path in (
        (folder, folder / PLAIN),
        (sharded, sorted(sharded.glob("*.safetens*"))[1]),
    ):
        content = path.read_bytes()
        path.write_bytes(content[: max(0, len(content) - cut)])
        assert f"{path} is damaged" in refusal(started, place)


def test_a_header_that_is_none(started, folder):
    path = folder / PLAIN
    for content in (b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{{"):
        path.write_bytes(content)
        assert f"{path} is damaged" in refusal(started, folder)


def test_pickled_weights_and_none_at_all(started, folder):
    (folder / PLAIN).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle, which can run code" in refusal(started, folder)
    (folder / "pytorch_model.bin").unlink()
    assert f"neither {PLAIN} nor {INDEX}" in refusal(started, folder)


def test_an_index_that_differs_from_the_files(started, sharded):
    path = sharded / INDEX
    index = json.loads(path.read_text())
    places: dict[str, str] = index["weight_map"]
    name, first, last = NORM, places[NORM], places["model.embed_tokens.weight"]
    assert first != last
    wrong = {
        "names '../else.safetensors', which is not a file of its folder": "../else.safetensors",
        f"names '{sharded / first}', which is not a file": str(sharded / first),
        "gone.safetensors cannot be read": "gone.safetensors",
        f"places {name} in {last}, which lacks it": last,
    }
    for message, place in wrong.items():
        path.write_text(json.dumps({**index, "weight_map": {**places, name: place}}))
        assert message in refusal(started, sharded)
    path.write_text(json.dumps({"weight_map": {k: v for k, v in places.items() if k != name}}))
    assert f"holds {name}, which {INDEX} does not place there" in refusal(started, sharded)
    for torn in ("{", "[]", '{"weight_map": 3}'):
        path.write_text(torn)
        assert f"{path} is not an index of weights" in refusal(started, sharded)


def test_a_vocabulary_beside_the_tokenizers(started, folder, tmp_path):
    assert "null trains another; nearest valid: data.tokenizer=" in refusal(
        started, folder, data__tokenizer=None
    )
    other = tmp_path / "other.json"
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["more"] = 300
    other.write_text(json.dumps(content))
    assert "has other tokens than hf:" in refusal(started, folder, data__tokenizer=str(other))
    content["model"]["vocab"]["more"] = 304
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "has token 304, the embedding of" in refusal(started, folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer.json" in refusal(started, folder)


def test_another_model_than_that_of_the_folder(started, folder):
    message = refusal(started, folder, model__n_kv_heads=4)
    assert "model.n_kv_heads=4 differs from hf:" in message
    assert "valid: model.n_kv_heads=2 (or model=inherit" in message
    config = started(folder)
    config.model.rope.type, config.model.rope.factor = "linear", 4.0  # the run's own choice
    check_origin(config)
    shutil.rmtree(folder)
    assert "must be a folder with config.json" in refusal_of(config)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/name-1.5b", "org/name-1.5b"),
        ("name", "name"),
        ("//org/name/", "org/name"),
        ("https://huggingface.co/org/name", "org/name"),
    ],
)
def test_a_name_of_a_hub_needs_a_local_folder(given, name, config):
    """By model=inherit and by the check of a run. A path that does not exist is no such name."""
    paths = ("/nowhere/name", "./nowhere", "../nowhere", "~/nowhere", "a/b/nowhere")
    for origin, hint in ((f"hf:{given}", True), *((f"hf:{path}", False) for path in paths)):
        config.checkpoint.init_from = origin
        for refuse in (lambda: inherited_model(origin), lambda: check_origin(config)):  # noqa: B023
            with pytest.raises(ConfigError, match=f"init_from={origin}: .* must be a folder") as e:
                refuse()
            command = f"hf download {name} " if hint else "hf download"
            assert (command in str(e.value)) == hint


def test_the_cache_of_a_hub_has_the_folder_below(config, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    config.checkpoint.init_from = f"hf:{snapshot.parents[1]}"
    assert refusal_of(config).endswith(f"nearest valid: checkpoint.init_from=hf:{snapshot}")


def test_tables_of_rope_are_skipped(started, folder, sharded):
    """In one file and in several, and of any type."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tables = {name: torch.ones(3), "model.rotary_emb.original_inv_freq": torch.ones(3).double()}
    change(folder, tables)
    check_origin(started(folder))
    index = json.loads((sharded / INDEX).read_text())
    path = sharded / index["weight_map"][NORM]
    save_file(load_file(path) | tables, path)
    check_origin(started(sharded))  # not in the index
    index["weight_map"] |= dict.fromkeys(tables, path.name)
    (sharded / INDEX).write_text(json.dumps(index))
    check_origin(started(sharded))


def test_a_tied_head_may_be_stored_with_the_embedding_or_alone(started, folder):
    """Its weights are loaded, to the last bit. Another one, or another type, is refused."""
    embedding = load_file(folder / PLAIN)["model.embed_tokens.weight"]
    for tensors in ({}, {"model.embed_tokens.weight": None}):
        change(folder, {"lm_head.weight": embedding.clone(), **tensors})
        check_origin(started(folder))
        loaded = whole(torch.zeros_like(embedding))
        load_folder(folder, {"model.embedding.weight": loaded})
        assert torch.equal(loaded.boxes[0].values, embedding)
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding.bfloat16(), embedding[:-1].clone()):
        change(folder, {"lm_head.weight": head, "model.embed_tokens.weight": embedding})
        message = refusal(started, folder)
        assert "lm_head.weight differs from model.embed_tokens.weight" in message


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_ignored_keys_of_rope_are_named_in_one_line(
    started, make_folder, monkeypatch, capsys, rank, lines
):
    folder = make_folder("llama", "yarn")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= {"finetuned": True, "low_freq_factor": 1.0}
    path.write_text(json.dumps(config))
    monkeypatch.setenv("RANK", rank)
    check_origin(started(folder))
    line = "RoPE has no finetuned, low_freq_factor; ignored, as by transformers"
    assert capsys.readouterr().out.count(line) == lines


def refusal_of(config: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        check_origin(config)
    return str(raised.value)


def test_model_inherit_takes_the_model_of_the_folder(pretrain, folder, text_folder, tmp_path):
    """By experiment=extend, on the command line: keys that are given win; a damaged folder exits 2
    with one line."""
    arguments = ["mode=check", "experiment=extend", f"checkpoint.init_from=hf:{folder}"]
    arguments += [f"data.sources.{name}.path={text_folder}" for name in ("long", "short")]
    arguments += [f"data.tokenizer={folder}/tokenizer.json", f"run.dir={tmp_path}/run"]
    arguments += ["model.rope.factor=4", "model.rope.original_len=256", "data.seq_len=1024"]
    done = pretrain(*arguments)
    assert done.returncode == 0, done.stderr
    path = folder / PLAIN
    path.write_bytes(path.read_bytes()[:-1])
    done = pretrain(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{path} is damaged" in line


def test_model_inherit_takes_the_model_of_a_run_that_is_resumed(config, tmp_path):
    config.model.dim = 96
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    composed = OmegaConf.structured(config)
    composed.model.inherit, composed.model.dim = True, "???"
    composed.checkpoint.resume = str(tmp_path)
    assert resolve_inherited(composed).model.dim == 96
    composed.model.dim, composed.checkpoint.resume = "???", str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=.*nothing is no hf:FOLDER, no run"):
        resolve_inherited(composed)


def test_model_inherit_needs_an_origin(tmp_path):
    with pytest.raises(ConfigError, match=r"from checkpoint\.init_from, which is null"):
        inherited_model(None)
    with pytest.raises(ConfigError, match=r"is no hf:FOLDER, no run and no checkpoint"):
        inherited_model(str(tmp_path))
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json, the settings of a run, cannot be"):
            inherited_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=f"nearest valid: checkpoint.init_from=hf:{tmp_path}"):
        inherited_model(str(tmp_path))
