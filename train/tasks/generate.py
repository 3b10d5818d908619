"""``mode=generate``: text from a checkpoint, token by token.

The text is streamed to stdout; all messages go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from train.config import Config, GenerateConfig
from train.console import LineConsole
from train.data.encoder import DocumentEncoder
from train.data.tokenizer import vocabulary_size
from train.engine.parallel import choose_device, join
from train.model.kv_cache import KVCache
from train.model.transformer import LanguageModel
from train.run.affinity import set_affinity
from train.run.run_folder import RunFolder
from train.tasks.load_model import load_model


def run(config: Config) -> NoReturn:
    """Write ``generate.samples`` texts and end the process."""
    log = LineConsole(stderr=True).print
    options = config.generate
    device = choose_device(config)
    set_affinity(config.parallel, device)
    parallel = join(config.parallel, device)
    loaded = load_model(config, RunFolder(config), parallel, options.checkpoint, log)
    encoder = DocumentEncoder(loaded.tokenizer, config.data)
    never = never_generated(config, encoder)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    tokens = [encoder.bos, *encoder.texts([prompt])[0]]
    log(f"{loaded.checkpoint}; a prompt of {len(tokens) - 1:,} tokens")
    trained_len = config.data.longest_document()
    if len(tokens) + options.tokens > trained_len:
        log(f"beyond {trained_len:,} tokens the model meets positions that it was not trained on")
    try:
        for sample in range(options.samples):
            if options.samples > 1:
                log(f"sample {sample + 1} of {options.samples}")
            ids = continuation(loaded.model, tokens, options, sample, never, encoder.eos)
            for text in as_text(loaded.tokenizer, ids):
                sys.stdout.write(text)
                sys.stdout.flush()
            print(flush=True)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def continuation(
    model: LanguageModel,
    prompt: list[int],
    options: GenerateConfig,
    sample: int,
    never: list[int],
    eos: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow ``prompt``, which has at least one token.

    They are ``options.tokens``, or fewer if the model ends the document with ``eos``, which is not
    yielded. The same seed and the same ``sample`` number give the same tokens. Tokens in ``never``
    are not generated.
    """
    device = next(model.parameters()).device
    state = np.random.SeedSequence([options.seed, sample]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
    capacity = len(prompt) + options.tokens
    caches = [KVCache(capacity) for _ in model.transformer.blocks]
    following = prompt
    for _ in range(options.tokens):
        tokens_T = torch.tensor(following, dtype=torch.int64, device=device)
        logits = model.next_logits(tokens_T, caches).cpu()
        logits[never] = -torch.inf
        token = choose(logits, options, generator)
        if token == eos:
            return
        yield token
        following = [token]


def never_generated(config: Config, encoder: DocumentEncoder) -> list[int]:
    """Ids of no token, and BOS, which stands inside no document, unless it is EOS too."""
    tokens = set(encoder.tokenizer.get_vocab().values())
    if encoder.bos != encoder.eos:
        tokens.remove(encoder.bos)
    rows = config.model.rows(vocabulary_size(encoder.tokenizer))
    return [number for number in range(rows) if number not in tokens]


def choose(logits_V: Tensor, options: GenerateConfig, generator: torch.Generator) -> int:
    """The next token: the most probable one at temperature 0, else drawn."""
    if options.temperature == 0:
        return int(logits_V.argmax())
    share = probabilities(logits_V, options.temperature, options.top_k, options.top_p)
    return int(torch.multinomial(share, 1, generator=generator))


def probabilities(
    logits_V: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """The distribution of the next token, (V,) float64.

    The softmax of ``logits / temperature``, restricted to the ``top_k`` most probable tokens and
    renormalised, then to the fewest most probable tokens whose sum reaches ``top_p``.
    """
    ordered, order = (logits_V.double() / temperature).sort(descending=True, stable=True)
    if top_k is not None:
        ordered[top_k:] = -torch.inf
    share = ordered.softmax(0)
    if top_p is not None:
        share[share.cumsum(0) - share >= top_p] = 0  # the tokens before these reach top_p
        share /= share.sum()
    return torch.zeros_like(share).scatter(0, order, share)


def as_text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Decode ``tokens`` to parts of the text, each of whole characters."""
    stream = DecodeStream(skip_special_tokens=False)
    ids: list[int] = []
    written = 0
    for token in tokens:
        ids.append(token)
        if text := stream.step(tokenizer, token):
            written += len(text)
            yield text
    # The last character may be incomplete, and is then still missing.
    yield tokenizer.decode(ids, skip_special_tokens=False)[written:]
