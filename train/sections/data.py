"""``data``: the text, its tokenizer, its samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.sections.key import REQUIRED, key

NO_EOS = "none"  # as data.eos_token: no token ends a document
PLAIN, CHAT, COMPLETION = FORMATS = ("text", "chat", "completion")  # of data.format


@dataclass
class SourceConfig:
    """A source of a mixture; NAME is its name, of your choice."""

    path: str = key(REQUIRED)
    """a folder or a file, as data.path"""
    weight: float = key(1.0, above=0)
    """share of the samples, relative to the weights of the other sources"""
    pattern: str | None = None
    """which files below path; null is data.pattern"""
    text_field: str | None = None
    """as data.text_field; null is data.text_field"""
    format: str | None = key(None, choices=FORMATS)
    """as data.format; null is data.format"""
    split_on: str | None = None
    """as data.split_on; null is data.split_on"""
    split_bytes: int | None = key(None, at_least=4)
    """as data.split_bytes; null is data.split_bytes"""
    min_len: int | None = key(None, at_least=1)
    """as data.min_len; null is data.min_len"""


@dataclass
class DataConfig:
    """The text, its tokenizer, and how documents become samples."""

    path: str | None = key(REQUIRED, shown="null with data=stdlib, else none")
    """a folder or a file of text, .jsonl, .json, .parquet or token ids (.npy, or .bin with .idx).
    Text may be compressed: .gz, .bz2, .xz or .zst. The extra `parquet` reads .parquet and .zst.
    null is the standard library of the running Python"""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """several mixed sources instead of path; configs/data/mixture.yaml has an example"""
    pattern: str = "**/*"
    """glob of the files below path, for example **/*.parquet. Files whose name starts with a dot
    are skipped, as cache_dir and the folders of runs are"""
    text_field: str = "text"
    """the field of a record, or the column of a .parquet, with the text or token ids"""
    format: str = key(PLAIN, choices=FORMATS)
    """what a line or a row holds. text: text_field. chat: messages, a list of {role, content}.
    completion: prompt and completion, two texts or two lists of messages. What the assistant
    writes, or the completion, has loss, and so has EOS after it; the rest is context"""
    chat_template: str | None = None
    """the Jinja template of conversations, as in transformers; null: that in the folder of
    tokenizer, chat_template.jinja or in tokenizer_config.json"""
    split_on: str | None = None
    r"""cuts each text file into documents at this separator, for example '\n\n' or '<|endoftext|>';
    \n and \t are a line end (also \r\n) and a tab"""
    split_bytes: int | None = key(None, at_least=4)
    """cuts longer text files, or their parts, into documents of at most this many bytes, where
    possible at the end of a line"""
    held_out: float = key(0.05, at_least=0, below=1)
    """share of the documents for validation, chosen by a hash of their text; 0 with
    data.validation_path"""
    held_out_salt: int = 0
    """salt of that hash; another number holds out other documents"""
    validation_path: str | None = None
    """a validation set of its own, with held_out=0: a folder or a file, read as data.path. Training
    leaves out documents with the same text"""
    tokenizer: str | None = None
    """a tokenizer.json; null trains a byte-level BPE on the corpus"""
    vocab_size: int = key(4096, at_least=257)
    """vocabulary size of the BPE, if one is trained"""
    bos_token: str = "<|endoftext|>"
    """the token that starts every document; the tokenizer must have it"""
    eos_token: str | None = None
    """the special token that ends every document. null is the one that data.tokenizer has, found by
    its name (such as </s> or <|end_of_text|>), or bos_token if a BPE is trained. With none,
    documents do not end with a token: the model learns no end, and mode=generate finds none"""
    special_tokens: str = key("text", choices=("text", "ids"))
    """what the name of a special token inside a document becomes: ordinary text, or the id of that
    token. With ids, a document of unknown origin can contain the end of a document"""
    seq_len: int = key(4096, at_least=2)
    """tokens per sample, over all ranks of its CP group"""
    tokens_per_rank: int | None = key(None, at_least=1)
    """most tokens of each rank in a micro-batch. A CP group then shares several whole samples in
    one plan, tokens_per_rank x parallel.cp / seq_len of them. null: one sample for each group.
    The order of the samples does not depend on it. mode=eval and rope read as many samples at once
    as fit, at least one"""
    max_doc_len: int | None = key(None, at_least=1)
    """largest document length in a sample. Longer documents are cut into slices of this length,
    each of which counts as a document. With null, best_fit cuts at seq_len, and stream only where a
    sample ends"""
    document_mask: bool = True
    """attention, positions and labels of training samples stop at document borders; false: a sample
    is one document"""
    min_len: int | None = key(None, at_least=1)
    """training excludes documents with fewer tokens; null excludes none"""
    packing: str = key("stream", choices=("stream", "best_fit"))
    """how documents become samples. stream concatenates them and cuts a document where a sample of
    seq_len tokens ends. best_fit cuts only documents longer than max_doc_len (or seq_len). Each
    slice goes whole into the fullest sample with room for it"""
    cache_dir: str = "~/.cache/ringfa3/data"
    """the cache of tokenised corpora"""
    verify: bool = True
    """verify the checksum of every token file at the start (about 1 s per GB)"""

    def longest_document(self) -> int:
        """Tokens of the longest document in a sample: the context length of the training."""
        whole = self.seq_len if self.max_doc_len is None else self.max_doc_len
        return whole if self.document_mask else self.seq_len
