"""``mode=generate``: text from a checkpoint, token by token.

The text goes to stdout as it comes, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from train.config import Config, ConfigError, GenerateConfig
from train.data.tokenizer import bos_id, encode
from train.engine.parallel import choose_device, join
from train.model.kv_cache import KVCache
from train.model.transformer import LanguageModel
from train.run.run_folder import RunFolder
from train.tasks.load_model import load_model


def run(config: Config) -> NoReturn:
    """Write ``generate.samples`` texts and end the process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "mode=generate under torchrun: one process writes text; start python "
            "train/pretrain.py mode=generate ... without torchrun"
        )
    say = Console(stderr=True, markup=False, highlight=False).print
    settings = config.generate
    parallel = join(config.parallel, choose_device(config))
    trained = load_model(config, RunFolder(config), parallel, settings.checkpoint, say)
    bos = bos_id(trained.tokenizer, config.data.bos_token)
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    tokens = [bos, *encode(trained.tokenizer, [prompt])[0]]
    say(f"{trained.checkpoint}; a prompt of {len(tokens) - 1:,} tokens", soft_wrap=True)
    known = config.data.piece_len or config.data.seq_len
    if len(tokens) + settings.tokens > known:
        say(f"beyond {known:,} tokens the model meets positions that it was not trained on")
    try:
        for sample in range(settings.samples):
            if settings.samples > 1:
                say(f"sample {sample + 1} of {settings.samples}")
            written = continuation(trained.model, tokens, settings, sample, never=bos)
            for text in as_text(trained.tokenizer, written):
                sys.stdout.write(text)
                sys.stdout.flush()
            print(flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def continuation(
    model: LanguageModel, prompt: list[int], settings: GenerateConfig, sample: int, never: int
) -> Iterator[int]:
    """``settings.tokens`` tokens that follow ``prompt``, which holds at least one.

    The same seed and the same ``sample`` (a number) give the same tokens. ``never`` is a token that
    is not written: the one that starts documents, which no training label ever is.
    """
    device = next(model.parameters()).device
    state = np.random.SeedSequence([settings.seed, sample]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
    capacity = len(prompt) + settings.tokens
    caches = [KVCache(capacity) for _ in model.transformer.blocks]
    following = prompt
    for _ in range(settings.tokens):
        logits = model.next_logits(torch.tensor(following, device=device), caches).cpu()
        logits[never] = -torch.inf
        token = choose(logits, settings, generator)
        yield token
        following = [token]


def choose(logits_V: Tensor, settings: GenerateConfig, generator: torch.Generator) -> int:
    """The next token: the most probable one at temperature 0, else drawn."""
    if settings.temperature == 0:
        return int(logits_V.argmax())
    share = probabilities(logits_V, settings.temperature, settings.top_k, settings.top_p)
    return int(torch.multinomial(share, 1, generator=generator))


def probabilities(
    logits_V: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """What the next token is drawn from, (V,) float64.

    Of the softmax of ``logits / temperature`` the ``top_k`` most probable tokens stay, and of what
    they share among them the fewest, most probable first, that reach ``top_p`` together.
    """
    ordered, order = (logits_V.double() / temperature).sort(descending=True, stable=True)
    if top_k is not None:
        ordered[top_k:] = -torch.inf
    share = ordered.softmax(0)
    if top_p is not None:
        share[share.cumsum(0) - share >= top_p] = 0  # what is before them reaches it already
        share /= share.sum()
    return torch.zeros_like(share).scatter(0, order, share)


def as_text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of ``tokens`` in pieces, each complete in UTF-8; together that of all at once."""
    stream = DecodeStream(skip_special_tokens=False)
    seen: list[int] = []
    written = 0
    for token in tokens:
        seen.append(token)
        if text := stream.step(tokenizer, token):
            written += len(text)
            yield text
    yield tokenizer.decode(seen, skip_special_tokens=False)[written:]  # a character cut in two
