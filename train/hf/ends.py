"""The tokens that begin and end a text, in the settings of an exported folder.

transformers begins a text as the trainer begins a document, and ends it where the model has learned
to. It ends no text that it tokenises: prompts have no end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from train.data.encoder import DocumentEncoder
from train.hf.architecture import CONFIG

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"  # of old folders: it has priority over TOKENIZER


def write_ends(folder: Path, encoder: DocumentEncoder) -> None:
    """Write ``tokenizer.json``, and BOS and EOS into the settings that are in ``folder``.

    The other tokens of a folder's origin that end a text stay. The tokenizer is loaded from
    ``tokenizer.json`` alone: other classes of transformers would build parts of it anew.
    """
    tokenizer = encoder.tokenizer
    names = {"bos_token": tokenizer.id_to_token(encoder.bos)}
    if encoder.eos is not None:
        names["eos_token"] = tokenizer.id_to_token(encoder.eos)
    added = {"add_bos_token": True, "add_eos_token": False}
    loader = {"tokenizer_class": "PreTrainedTokenizerFast"}
    _update(folder / TOKENIZER, loader | names | added)
    if (folder / SPECIAL).exists():
        _update(folder / SPECIAL, names)
    for name in (CONFIG, GENERATION):
        settings = _read(folder / name)
        # transformers reads the ends in CONFIG only if there is no GENERATION.
        eos = _ends(encoder.eos, (settings or _read(folder / CONFIG)).get("eos_token_id"))
        if name == CONFIG or settings or encoder.eos is not None:
            _update(folder / name, {"bos_token_id": encoder.bos, "eos_token_id": eos})
    _begin_with_bos(tokenizer, encoder.bos)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _update(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(_read(path) | values, indent=2) + "\n")


def _ends(eos: int | None, stored: int | list[int] | None) -> int | list[int] | None:
    """The ids that end a text: ``eos``, then those that the origin has ``stored``."""
    others = stored if isinstance(stored, list) else [stored]
    ids = [number for number in dict.fromkeys([eos, *others]) if number is not None]
    return ids if len(ids) > 1 else next(iter(ids), None)


def _begin_with_bos(tokenizer: Tokenizer, bos: int) -> None:
    """Let ``tokenizer`` add BOS, and nothing else, to each text; training ignored what it adds."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    if tokenizer.encode("a").ids == [bos, *text]:
        return
    # Templates have a label for the token: its name may have a colon, or begin with a dollar sign.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["BOS:0", "$A:0"],
        pair=["BOS:0", "$A:0", "BOS:1", "$B:1"],
        special_tokens=[{"id": "BOS", "ids": [bos], "tokens": [tokenizer.id_to_token(bos)]}],
    )
