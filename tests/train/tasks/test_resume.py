"""What a run keeps of the folder that its weights come from."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from train.engine.parallel import ParallelLayout
from train.run.run_folder import RunFolder
from train.tasks.resume import prepare_folder

ALONE = ParallelLayout(0, 1, 1, torch.device("cpu"))


def test_the_origin_is_that_of_the_start_that_made_a_checkpoint(config, tmp_path):
    """A start that was killed before its first checkpoint leaves no settings to a later one."""
    folder = RunFolder(config)

    def start_with(name: str) -> str:
        theirs = tmp_path / name
        theirs.mkdir(exist_ok=True)
        (theirs / "config.json").write_text(json.dumps({"name": name}))
        config.checkpoint.init_from = f"hf:{theirs}"
        folder.path.mkdir(exist_ok=True)
        prepare_folder(config, folder, ALONE)
        kept: Path = folder.origin / "config.json"
        return json.loads(kept.read_text())["name"]

    assert start_with("first") == "first"
    assert start_with("second") == "second"
    (folder.checkpoints / "step-00000003").mkdir()
    assert start_with("third") == "second"
