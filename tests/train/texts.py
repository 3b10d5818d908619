"""Texts whose words repeat, as files for runs of the trainer."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ["ring", "attention", "keeps", "every", "token", "of", "a", "long", "tale", "naïve", "λ"]


def make_text(seed: int, words: int) -> str:
    """``words`` words with line breaks, a function of the seed."""
    chosen = random.Random(seed).choices(WORDS, k=words)
    return " ".join(w + ("\n" if i % 9 == 8 else "") for i, w in enumerate(chosen))


def long_text(folder: Path) -> list[str]:
    """Writes 10 documents of 20,000 words, tens of thousands of tokens each; returns the keys."""
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(make_text(number, 20_000))
    text = [f"data.path={folder}", f"data.cache_dir={folder}-cache", "data.vocab_size=300"]
    return [*text, "data.held_out=0.2"]
