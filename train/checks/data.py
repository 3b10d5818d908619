"""The checks of ``data.*`` and ``eval.*``: sources, lengths, and paths that exist."""

from __future__ import annotations

import re
from pathlib import Path

from train.config import SOURCES, Config, ConfigError, DataConfig
from train.keys import nearest
from train.paths import expand
from train.sections.data import NO_EOS, PLAIN

# The smallest share of a source. A block of the mixture has a sample of each source, so its length
# grows with 1 / share.
MIN_SHARE = 1e-6


def check_data(data: DataConfig) -> None:
    """Raise ``ConfigError`` for the first key of ``data`` that cannot work."""
    if data.validation_path is not None and data.held_out != 0:
        raise ConfigError(
            f"data.held_out={data.held_out} and data.validation_path={data.validation_path} both "
            f"name documents for validation; nearest valid: data.held_out=0 "
            f"(or data.validation_path=null)"
        )
    if data.validation_path is None and data.held_out == 0:
        raise ConfigError(
            "data.held_out=0 needs documents of data.validation_path; for example "
            "data.held_out=0.05 (or data.validation_path=PATH)"
        )
    if data.max_doc_len is not None and data.max_doc_len > data.seq_len:
        raise ConfigError(
            f"data.max_doc_len={data.max_doc_len} exceeds data.seq_len={data.seq_len}; "
            f"nearest valid: data.max_doc_len={data.seq_len}"
        )
    if data.packing == "best_fit" and not data.document_mask:
        raise ConfigError(
            "data.packing=best_fit keeps documents apart, which data.document_mask=false joins; "
            "nearest valid: data.packing=stream (or data.document_mask=true)"
        )
    _check_separators(data)
    if not data.bos_token:
        raise ConfigError(
            "data.bos_token is empty; give the token that starts a document, for example "
            f"data.bos_token='{DataConfig().bos_token}'"
        )
    ends_apart = data.eos_token not in (None, NO_EOS, data.bos_token)
    if data.tokenizer is None and ends_apart and data.vocab_size < 258:
        raise ConfigError(
            f"data.vocab_size={data.vocab_size} has no room for 256 bytes, data.bos_token and "
            f"data.eos_token={data.eos_token}; nearest valid: data.vocab_size=258"
        )
    _check_paths(data)
    formats = {"data.format": data.format}
    formats |= {f"{SOURCES}.{name}.format": source.format for name, source in data.sources.items()}
    for key, value in formats.items():
        if value not in (None, PLAIN) and data.tokenizer is None:
            raise ConfigError(
                f"{key}={value} needs a tokenizer whose special tokens the chat template has; give "
                f"data.tokenizer=PATH, for example that of checkpoint.init_from"
            )
    if data.tokenizer is not None and not expand("data.tokenizer", data.tokenizer).is_file():
        raise ConfigError(f"data.tokenizer={data.tokenizer} must be a file, a tokenizer.json")


def _check_separators(data: DataConfig) -> None:
    keys = {"data.split_on": data.split_on}
    keys |= {f"{SOURCES}.{name}.split_on": source.split_on for name, source in data.sources.items()}
    for key, value in keys.items():
        if value == "":
            raise ConfigError(f"{key} is empty; give a separator, for example '\\n\\n', or null")


def _check_paths(data: DataConfig) -> None:
    if data.sources:
        _check_sources(data)
    paths = {f"{SOURCES}.{name}.path": source.path for name, source in data.sources.items()}
    paths |= {"data.path": data.path, "data.tokenizer": data.tokenizer}
    paths |= {"data.validation_path": data.validation_path}
    paths |= {"data.chat_template": data.chat_template}
    for key, value in paths.items():
        _check_exists(key, value)


def _check_sources(data: DataConfig) -> None:
    if data.path is not None:
        raise ConfigError(
            f"data.path={data.path} and data.sources ({', '.join(data.sources)}) are both given; "
            f"choose one: data.path=null, or the path without the sources"
        )
    for name in data.sources:
        key = f"{SOURCES}.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(f"{key}: the name of a source has letters, digits, _ and - only")
    total = sum(source.weight for source in data.sources.values())
    for name, source in data.sources.items():
        if source.weight < MIN_SHARE * total:
            raise ConfigError(
                f"{SOURCES}.{name}.weight={source.weight} is less than {MIN_SHARE:g} of all "
                f"weights; nearest valid: {SOURCES}.{name}.weight={1.01 * MIN_SHARE * total:.3g}"
            )


def check_text(config: Config) -> None:
    """Raise ``ConfigError`` unless the text of ``eval.path``, or else that of ``data``, exists.

    Also for a separator or an ``eval.name`` that cannot work.
    """
    if config.eval.path is None:
        _check_paths(config.data)
    _check_separators(config.data)
    _check_exists("eval.path", config.eval.path)
    if config.eval.name is not None and Path(config.eval.name).name != config.eval.name:
        raise ConfigError(f"eval.name={config.eval.name} becomes part of a file name: no slashes")


def _check_exists(key: str, value: str | None) -> None:
    if value is not None and not expand(key, value).exists():
        raise ConfigError(f"{key}={value} does not exist; {nearest_path(value)}")


def nearest_path(value: str) -> str:
    """A suggestion for a path that does not exist."""
    missing = Path(value).expanduser().absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    names = sorted(entry.name for entry in missing.parent.iterdir())
    match = nearest(missing.name, names)
    if match and match != missing.name:  # a file may exist where a folder is wanted
        return f"did you mean {missing.parent / match}?"
    return f"nearest existing folder: {missing.parent}"
