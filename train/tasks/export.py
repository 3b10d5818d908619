"""``mode=export``: a checkpoint as a folder that transformers loads with ``from_pretrained``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from train.config import Config
from train.console import LineConsole
from train.data.encoder import DocumentEncoder
from train.data.tokenizer import vocabulary_size
from train.engine.shard import Box, Shard
from train.engine.stored_checkpoint import find_checkpoint, load_tensors
from train.hf.architecture import CONFIG, hf_config
from train.hf.ends import write_ends
from train.hf.names import shapes
from train.hf.origin import keep_origin
from train.hf.save import save_weights
from train.paths import discard, expand, make_folder, unusable
from train.run.run_folder import RunFolder
from train.tasks.load_model import read_tokenizer

Shapes = dict[str, tuple[int, ...]]
ROW_PER_TOKEN = ("embedding.weight", "output.weight")


def run(config: Config) -> NoReturn:
    """Write the folder and end the process."""
    console = LineConsole()
    folder = RunFolder(config)
    given = config.export.checkpoint
    checkpoint = find_checkpoint(
        folder.path if given is None else expand("export.checkpoint", given), console.print
    )
    target = export(config, folder, checkpoint)
    console.print(f"{checkpoint} is now {target}")
    sys.exit(0)


def export(config: Config, folder: RunFolder, checkpoint: Path) -> Path:
    """Write the weights of a verified ``checkpoint`` of the run in ``folder``; returns the target.

    A rename makes the target appear complete. Raises ``ConfigError`` if the checkpoint does not fit
    the run's model.
    """
    tokenizer = read_tokenizer(folder)
    here = shapes(config.model, config.model.rows(vocabulary_size(tokenizer)))
    rows = here["embedding.weight"][0]
    if not config.export.padding:
        rows = vocabulary_size(tokenizer)
    wanted = {name: (rows, *s[1:]) if name in ROW_PER_TOKEN else s for name, s in here.items()}

    def read(some: Shapes) -> dict[str, Tensor]:
        """The tensors of ``some`` from the checkpoint: as many of the first rows as its shapes."""
        tensors = {
            name: torch.empty(shape, dtype=torch.float32, device="cpu")
            for name, shape in some.items()
        }
        boxes = {
            f"model.{name}": Shard(torch.Size(here[name]), (Box((0,) * tensor.ndim, tensor),))
            for name, tensor in tensors.items()
        }
        load_tensors(checkpoint, boxes)
        return tensors

    target = expand("export.dir", config.export.dir or "").resolve()  # a link stays
    temporary = target.with_name(f".{target.name}.tmp")
    make_folder("export.dir", target.parent)
    try:
        keep_origin(folder.origin, temporary)
        temporary.mkdir(exist_ok=True)
        dtype = getattr(torch, config.export.dtype)
        save_weights(temporary, wanted, read, dtype, config.export.shard_bytes)
        _write_settings(temporary, config, rows, tokenizer)
        if folder.chat_template.is_file():  # transformers prefers it to the origin's others
            shutil.copyfile(folder.chat_template, temporary / folder.chat_template.name)
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        raise unusable("export.dir", target, "written", error) from None
    finally:
        discard(temporary)
    return target


def _write_settings(folder: Path, config: Config, rows: int, tokenizer: Tokenizer) -> None:
    """Write config and tokenizer: those of the run's origin, with the run's settings."""
    length, path = config.data.longest_document(), folder / CONFIG
    kept: dict[str, Any] = {"pad_token_id": None}
    if path.exists():
        there = json.loads(path.read_text("utf-8"))
        length = max(length, there.get("max_position_embeddings") or 0)
        kept |= {k: v for k, v in there.items() if k not in ("rope_parameters", "torch_dtype")}
    new = hf_config(config.model, rows, length, config.export.dtype)
    path.write_text(json.dumps(kept | new, indent=2) + "\n")
    write_ends(folder, DocumentEncoder(tokenizer, config.data))
