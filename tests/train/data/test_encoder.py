"""If this fails, models do not learn where documents end. The ends of documents: EOS stands at the
end of a whole document, and is a target there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from train.checks.data import check_data
from train.config import Config, ConfigError, DataConfig
from train.data.encoder import DocumentEncoder
from train.data.mixture import training_samples
from train.data.samples import IGNORED
from train.data.shards import open_corpus
from train.data.tokenizer import load_tokenizer, train_tokenizer

BOS, EOS = "<|endoftext|>", "</s>"
TEXT = "the ring keeps every token of every text; " * 3


def tokenizer_of(*special: str) -> Tokenizer:
    tokenizer = train_tokenizer([TEXT], 300, special[0])
    tokenizer.add_special_tokens(list(special[1:]))
    return tokenizer


@pytest.mark.parametrize("eos", [None, EOS, "none"])
def test_documents_end_with_the_token_of_the_config(config, eos):
    """On disk, and in each split; ``none`` is the form of earlier versions."""
    config.data.eos_token = eos
    corpus = open_corpus(config.data)
    encoder = DocumentEncoder(corpus.tokenizer, config.data)
    assert encoder.eos == {None: 0, EOS: 1, "none": None}[eos]
    end = [] if encoder.eos is None else [encoder.eos]
    for split in (corpus.train, corpus.held_out):
        for number in range(len(split)):
            ids = split.tokens(number, 0, 10**6).tolist()
            text = split.text(number).tolist()
            assert ids == [encoder.bos, *text, *end]
            assert not {encoder.bos, encoder.eos} & {*text}
            assert split.text_lengths[number] == len(text)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("max_doc_len", [None, 30])
def test_an_epoch_has_every_end_once_as_a_target(config, packing, max_doc_len):
    """A slice within a document, or one that a sample's end cuts, does not end with EOS."""
    config.data.eos_token, config.data.packing, config.data.max_doc_len = EOS, packing, max_doc_len
    config.data.seq_len = 100
    documents = open_corpus(config.data).train
    samples = training_samples(documents, config.data, seed=3)
    tokens, targets, taken = [], [], 0
    index = 0
    while taken < documents.lengths.sum():
        sample = samples[index]
        left = int(documents.lengths.sum()) - taken  # a stream goes on with the next epoch
        tokens += sample.tokens[:left].tolist()
        targets += sample.labels[:left].tolist()
        taken, index = taken + len(sample.tokens), index + 1
        ends = [n for n, token in enumerate(sample.tokens) if token == 1]
        assert all(sample.labels[n] == IGNORED for n in ends)
        assert {n + 1 for n in ends} <= {*sample.cu_seqlens}  # attention stops there
    assert tokens.count(1) == targets.count(1) == len(documents)


@pytest.mark.parametrize("name", [BOS, "<|end_of_text|>", EOS, "<eos>"])
def test_a_tokenizer_file_has_an_eos_of_its_own(name):
    data = DataConfig(tokenizer="t.json", bos_token="<s>")
    tokenizer = tokenizer_of("<s>", "<|eot_id|>", name)
    assert DocumentEncoder(tokenizer, data).eos == tokenizer.token_to_id(name)


@pytest.mark.parametrize(
    ("special", "given", "message"),
    [
        (["<s>", "<|eot_id|>"], None, r"null .* none with a known name; .*\(<s>, <\|eot_id\|>\)"),
        (["<s>", EOS, "<eos>"], None, r"several, </s>, <eos>; choose one of"),
        (["<s>"], EOS, r"data\.eos_token=</s> is not a special token .* <s>, or .*=none"),
        (["<s>"], "", r"data\.eos_token= is not a special token .* <s>, or .*=none"),
        (["<s>"], "e", r"data\.eos_token=e is not a special token"),  # text could hold it
    ],
    ids=["unknown", "several", "missing", "empty", "ordinary"],
)
def test_an_eos_that_is_not_clear_is_refused(special, given, message):
    data = DataConfig(tokenizer="t.json", bos_token="<s>", eos_token=given)
    with pytest.raises(ConfigError, match=message):
        DocumentEncoder(tokenizer_of(*special), data)


@pytest.mark.parametrize(("special_tokens", "count"), [("text", 0), ("ids", 1)])
def test_the_name_of_a_special_token_in_a_text(config, tmp_path, special_tokens, count):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{TEXT}{BOS}{number}{EOS}")
    config.data.path, config.data.eos_token = str(folder), EOS
    config.data.special_tokens = special_tokens
    corpus = open_corpus(config.data)
    for split in (corpus.train, corpus.held_out):
        for number in range(len(split)):
            text = split.text(number).tolist()
            assert (text.count(0), text.count(1)) == (count, count)
            written = (folder / split.name(number)).read_text()
            assert corpus.tokenizer.decode(text, skip_special_tokens=False) == written


def test_a_tokenizer_with_two_special_tokens_needs_room_for_them(config):
    config.data.vocab_size = 257
    check_data(config.data)
    config.data.eos_token = EOS
    with pytest.raises(ConfigError, match=r"nearest valid: data\.vocab_size=258"):
        check_data(config.data)


def test_a_file_that_was_trained_with_two_tokens_ends_with_the_second(config: Config):
    config.data.eos_token = EOS
    digest = open_corpus(config.data).digest
    (stored,) = Path(config.data.cache_dir).glob("*/tokenizer.json")
    assert load_tokenizer(stored).token_to_id(EOS) == 1
    config.data.tokenizer = str(stored)
    assert open_corpus(config.data).digest == digest
