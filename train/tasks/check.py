"""``mode=check``: the checks that come after those of the config, without a run."""

from __future__ import annotations

import os

from train.config import Config
from train.data.corpus import all_files
from train.data.encoder import DocumentEncoder
from train.data.tokenizer import load_tokenizer
from train.engine.parallel import choose_device
from train.log.profiler import require_profilable
from train.paths import expand
from train.sections.data import CHAT
from train.text.files import LeftOut


def run(config: Config) -> None:
    """Check device, files, tokenizer and chat template; rank 0 prints the result."""
    require_profilable(config.profile, choose_device(config))
    data, left_out = config.data, LeftOut()
    files = all_files(data, left_out)
    if data.tokenizer is not None:  # refuses a BOS or an EOS that the tokenizer does not have
        encoder = DocumentEncoder(load_tokenizer(expand("data.tokenizer", data.tokenizer)), data)
        if any(file.source.reading.data_format == CHAT for file in files):
            _ = encoder.template
    if os.environ.get("RANK", "0") == "0":
        for line in left_out.lines():
            print(line)
        print(f"The settings are valid; the corpus has {len(files)} files. Nothing was started.")
