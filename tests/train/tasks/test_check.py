"""If this fails, `mode=check` accepts a job that cannot start. ``mode=check`` looks at the files of
the corpus and the special tokens of the tokenizer."""

from __future__ import annotations

import pytest

from train.config import ConfigError
from train.tasks import check


@pytest.mark.parametrize(
    ("key", "value"), [("bos_token", "<s>"), ("eos_token", "</s>"), ("tokenizer", None)]
)
def test_a_token_that_the_tokenizer_lacks_is_refused(config, tokenizer_file, key, value, tmp_path):
    config.data.tokenizer = str(tokenizer_file)
    check.run(config)
    if key == "tokenizer":
        value = str(tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer.json").write_text("{}")
    setattr(config.data, key, value)
    with pytest.raises(ConfigError, match=rf"^data\.{key}={value} is not [^\n]*$"):
        check.run(config)


def test_a_check_names_what_is_left_out(config, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.csv").write_text("b")
    config.data.path = str(tmp_path)
    check.run(config)
    left_out, last = capsys.readouterr().out.splitlines()
    assert left_out.startswith("data.path: 1 left out (b.csv): CSV is not text; ")
    assert last == "The settings are valid; the corpus has 1 files. Nothing was started."
