"""If this fails, a run trains on outdated or damaged tokens. Tokenised corpora: lossless, built
once, rebuilt after changes, verified when opened."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from pathlib import Path

import pytest

from train.config import ConfigError
from train.data import encoder, shards
from train.data.corpus import find_files, is_held_out, read_documents
from train.data.documents import DocumentError
from train.data.manifest import DamagedError, write_manifest
from train.data.shards import open_corpus
from train.data.tokenizer import encode, load_tokenizer, train_tokenizer
from train.run.run_folder import RunFolder
from train.sections.data import SourceConfig

BOS = "<|endoftext|>"


def texts_of(documents, tokenizer):
    for number in range(len(documents)):
        ids = documents.tokens(number, 0, int(documents.lengths[number])).tolist()
        assert [ids[0], ids[-1]] == [tokenizer.token_to_id(BOS)] * 2
        yield tokenizer.decode(ids[1:-1], skip_special_tokens=False)


def test_both_splits_hold_every_text_unchanged(config):
    corpus = open_corpus(config.data)
    expected = {"train": [], "held_out": []}
    for file in find_files(config.data):
        if file.path.suffix == ".txt":
            for document in read_documents(file):
                split = "held_out" if is_held_out(document.hash(0), 0.2) else "train"
                expected[split].append(document)
    for split, documents in expected.items():
        stored = getattr(corpus, split)
        assert list(texts_of(stored, corpus.tokenizer)) == [d.text for d in documents]
        assert stored.n_bytes.tolist() == [d.n_bytes for d in documents]
    assert len(expected["held_out"]) > 3


def test_one_of_many_processes_builds_the_corpus_once(config, monkeypatch):
    builds = []
    build = shards._build
    monkeypatch.setattr(shards, "_build", lambda *args: (builds.append(1), build(*args)))
    threads = [threading.Thread(target=open_corpus, args=(config.data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    open_corpus(config.data)
    assert len(builds) == 1


def test_a_changed_file_or_config_gives_a_new_corpus(config, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"number {number} " * 20)
    config.data.path = str(folder)
    first = open_corpus(config.data)
    assert open_corpus(config.data).digest == first.digest
    (folder / "3.txt").write_text("something else")
    changed = open_corpus(config.data)
    assert changed.digest != first.digest
    config.data.vocab_size = 270
    assert open_corpus(config.data).tokenizer.get_vocab_size() == 270
    assert len(list(Path(config.data.cache_dir).glob("*/manifest.json"))) == 3


def test_a_start_reads_nothing_that_another_start_wrote(config, text_folder, tmp_path):
    """The cache and the folder of a run are in the folder of the text, also behind a link."""
    folder = shutil.copytree(text_folder, tmp_path / "project")
    (tmp_path / "link").symlink_to(folder)
    config.data.path, config.data.cache_dir = str(tmp_path / "link"), str(folder / "cache")
    first = open_corpus(config.data)
    config.run.dir = str(folder / "runs" / "one")
    run = RunFolder(config)
    run.set_job("0")
    run.record_start("{}", "{}", None)
    run.evaluations.write_text('{"step": 1}')
    assert open_corpus(config.data).digest == first.digest
    config.data.cache_dir = str(folder)
    with pytest.raises(ConfigError, match=r"choose another data\.cache_dir$"):
        open_corpus(config.data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 301),
        ("held_out", 0.3),
        ("held_out_salt", 1),
        ("bos_token", "<s>"),
        ("eos_token", "</s>"),
        ("eos_token", "none"),
        ("special_tokens", "ids"),
        ("text_field", "body"),
        ("split_on", "\n"),
        ("split_bytes", 100),
        ("pattern", "deep/*"),
    ],
)
def test_every_value_that_changes_tokens_changes_the_key(config, name, value):
    before = shards.cache_key(config.data, find_files(config.data))
    setattr(config.data, name, value)
    assert shards.cache_key(config.data, find_files(config.data)) != before


def test_the_files_of_a_killed_build_are_replaced(config):
    key = shards.cache_key(config.data, find_files(config.data))
    leftover = Path(config.data.cache_dir) / f"{key}.{socket.gethostname()}.tmp"
    (leftover / "train").mkdir(parents=True)
    assert len(open_corpus(config.data).train)
    assert not leftover.exists()


def the_folder(config) -> Path:
    (manifest,) = Path(config.data.cache_dir).glob("*/manifest.json")
    return manifest.parent


def _damage(folder: Path, how: str) -> None:
    path = folder / "train" / "00000.bin"
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[:-2])
    elif how == "missing":
        path.unlink()
    elif how == "flipped bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "index":
        index = folder / "train" / "index.npz"
        content = bytearray(index.read_bytes())
        content[-1] ^= 1
        index.write_bytes(content)
    elif how == "manifest":
        (folder / "manifest.json").write_text("{")
    elif how == "format":
        write_manifest(folder, {"format": 1, "dtype": "uint16"})
    elif how == "sources":
        names = json.loads((folder / "files.json").read_text())
        (folder / "files.json").write_text(json.dumps({"books": names[""]}))
        write_manifest(folder, {"format": shards.FORMAT, "dtype": "uint16"})


@pytest.mark.parametrize(
    "how",
    ["truncated", "missing", "flipped bit", "index", "manifest", "format", "sources"],
)
def test_a_damaged_corpus_is_rejected_with_the_remedy(config, how):
    open_corpus(config.data)
    folder = the_folder(config)
    _damage(folder, how)
    with pytest.raises(DamagedError, match=rf"delete {folder}"):
        open_corpus(config.data)


def test_without_verify_only_the_token_files_are_trusted(config):
    open_corpus(config.data)
    folder = the_folder(config)
    config.data.verify = False
    _damage(folder, "flipped bit")
    open_corpus(config.data)
    _damage(folder, "index")
    with pytest.raises(DamagedError, match=r"index\.npz differs"):
        open_corpus(config.data)


def line_of(number: int) -> str:
    return f"Line {number} of a long tale, " * 5


@pytest.fixture
def mixture(config, text_folder, tmp_path):
    """Two sources that share a file name; one of them is a ``.jsonl``."""
    lines = [json.dumps({"body": line_of(n)}) for n in range(60)]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "1.txt").write_text("the same name, in another source")
    (tmp_path / "lines" / "a.jsonl").write_text("\n".join(lines))
    config.data.path = None
    config.data.sources["zoo"] = SourceConfig(path=str(text_folder), pattern="**/*.txt", weight=1)
    config.data.sources["lines"] = SourceConfig(
        path=str(tmp_path / "lines"), text_field="body", weight=3
    )
    return config


def test_a_mixture_is_one_corpus_in_the_order_of_the_names(mixture):
    corpus = open_corpus(mixture.data)
    for documents in (corpus.train, corpus.held_out):
        assert list(documents.sources.items()) == [("lines", 3), ("zoo", 1)]
        names = [documents.name(number) for number in range(len(documents))]
        of_lines, of_zoo = names[: documents.bounds[1]], names[documents.bounds[1] :]
        assert len(of_lines) > 3
        assert len(of_zoo) > 3
        assert all(name.startswith("lines/") for name in of_lines)
        assert all(name.startswith("zoo/") for name in of_zoo)
    stored = {}
    for documents in (corpus.train, corpus.held_out):
        texts = texts_of(documents, corpus.tokenizer)
        stored |= {documents.name(n): text for n, text in enumerate(texts)}
    assert len(stored) == 61 + 40
    for n in range(60):
        assert stored[f"lines/a.jsonl:{n + 1}"] == line_of(n)
    assert stored["lines/1.txt"] != stored["zoo/1.txt"]


def test_weights_change_no_token_but_every_other_key_of_a_source_does(mixture, text_folder):
    def key() -> str:
        return shards.cache_key(mixture.data, find_files(mixture.data))

    before = key()
    digest = open_corpus(mixture.data).digest
    mixture.data.sources["zoo"].weight = 17
    assert open_corpus(mixture.data).digest == digest
    assert key() == before
    keys = {before}
    for name, value in (
        ("path", str(text_folder / "deep")),
        ("text_field", "other"),
        ("pattern", "0.*"),
    ):
        setattr(mixture.data.sources["zoo"], name, value)
        keys.add(key())
    mixture.data.sources["zoom"] = mixture.data.sources.pop("zoo")
    assert len(keys | {key()}) == 5


def test_a_source_with_an_empty_split_is_named(mixture, text_folder):
    mixture.data.sources["zoo"].pattern = "1.txt"
    with pytest.raises(ConfigError, match=r"of data\.sources\.zoo empty \(1 documents") as raised:
        open_corpus(mixture.data)
    assert not raised.value.found_by_all  # only the process that tokenised knows


def test_a_document_that_cannot_be_tokenised_is_named(mixture, monkeypatch):
    def fail(tokenizer, texts, special_tokens):
        if any(text == line_of(41) for text in texts):
            raise RuntimeError("out of vocabulary")
        return encode(tokenizer, texts, special_tokens)

    monkeypatch.setattr(encoder, "encode", fail)
    with pytest.raises(DocumentError, match=r"document lines/a\.jsonl:42: .*out of vocabulary"):
        open_corpus(mixture.data)


def test_of_two_hosts_that_build_at_once_the_first_to_finish_wins(config, monkeypatch):
    """The other host's lock is not visible: its folder appears while this one writes."""
    write = shards.write_corpus

    def write_while_another_finishes(data, files, folder, console):
        write(data, files, folder, console)
        monkeypatch.setattr(shards, "write_corpus", write)
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        shards._build(data, files, folder.parent / shards.cache_key(data, files))

    monkeypatch.setattr(shards, "write_corpus", write_while_another_finishes)
    assert len(open_corpus(config.data).train)
    assert not list(Path(config.data.cache_dir).glob("*.tmp"))


@pytest.fixture
def validated(config, tmp_path):
    """Texts 0 to 19 to train on in two overlapping sources, and 15 to 24 to validate with."""
    for folder, numbers in (("one", range(20)), ("two", range(10, 20)), ("other", range(15, 25))):
        (tmp_path / folder).mkdir()
        for number in numbers:
            (tmp_path / folder / f"{folder}{number}.txt").write_text(line_of(number))
    config.data.path, config.data.held_out = None, 0.0
    for name in ("one", "two"):
        config.data.sources[name] = SourceConfig(path=str(tmp_path / name))
    config.data.validation_path = str(tmp_path / "other")
    return config


def texts_in(documents, corpus) -> list[str]:
    return [
        corpus.tokenizer.decode(documents.text(n).tolist(), skip_special_tokens=False)
        for n in range(len(documents))
    ]


def test_a_validation_set_is_never_trained_on(validated, capsys):
    for _ in range(2):  # every start says so
        corpus = open_corpus(validated.data)
        assert "10 documents are left out: data.validation_path has" in capsys.readouterr().out
    assert sorted(texts_in(corpus.held_out, corpus)) == [line_of(n) for n in range(15, 25)]
    assert corpus.held_out.name(0).startswith("other")
    assert dict(corpus.held_out.sources) == {"": 1.0}
    expected = [line_of(n) for n in (*range(15), *range(10, 15))]
    assert sorted(texts_in(corpus.train, corpus)) == sorted(expected)
    assert list(corpus.train.sources) == ["one", "two"]
    assert corpus.train.name(15).startswith("two/two1")


def test_overlapping_sources_hold_out_the_same_texts(validated):
    validated.data.validation_path, validated.data.held_out = None, 0.3
    corpus = open_corpus(validated.data)
    held_out, trained = (texts_in(d, corpus) for d in (corpus.held_out, corpus.train))
    assert len(held_out) > len({*held_out}) > 1
    assert not {*held_out} & {*trained}


def test_another_validation_set_is_another_corpus(validated, tmp_path):
    digest = open_corpus(validated.data).digest
    (tmp_path / "other" / "other25.txt").write_text(line_of(25))
    assert open_corpus(validated.data).digest != digest
    validated.data.validation_path = str(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"leaves the split train of data\.sources\.one empty"):
        open_corpus(validated.data)


def test_an_empty_split_names_the_share(config, text_folder):
    config.data.path = str(text_folder / "1.txt")
    with pytest.raises(ConfigError, match=r"data\.held_out=0\.2"):
        open_corpus(config.data)
    assert not list(Path(config.data.cache_dir).glob("*/"))


def test_a_tokenizer_can_be_loaded_and_must_have_the_bos_token(config, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["some text to learn from"], 280, "<s>").save(str(path))
    config.data.tokenizer = str(path)
    with pytest.raises(ConfigError, match=r"data\.bos_token=.*special tokens: <s>"):
        open_corpus(config.data)
    config.data.bos_token = config.data.eos_token = "<s>"
    assert open_corpus(config.data).tokenizer.get_vocab_size() <= 280
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(path)


def test_special_tokens_in_a_text_stay_text():
    tokenizer = train_tokenizer([f"a {BOS} b"] * 3, 300, BOS)
    (ids,) = encode(tokenizer, [f"a {BOS} b"])
    assert 0 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a {BOS} b"


def test_the_same_texts_give_the_same_tokenizer():
    texts = ["the ring keeps every token", "λ naïve tokens"] * 5
    one, two = (train_tokenizer(texts, 300, BOS).to_str() for _ in range(2))
    assert one == two
