"""Trials of the needle in a haystack: a long text with needles, and a question about one of them.

A needle is a sentence that gives a value to a name. A trial is one document of a given number of
tokens: BOS, running text with needles in it, a question, and its answer. Only the answer's tokens
have labels. The running text is that of several documents, without their BOS and EOS. Three tasks:

    single      one needle with a number
    multi_key   as single, among ``others`` needles with other names and numbers
    variable    a number is given to a name, and passed on from name to name ``hops`` times; the
                question asks for the last name
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.config import ConfigError, NeedleConfig
from train.data.documents import Documents
from train.data.encoder import DocumentEncoder
from train.data.samples import IGNORED, Sample, choose_documents
from train.sections.modes import TASKS

LETTERS = list("BCDFGHJKLMNPQRSTVWXZ")


@dataclass(frozen=True)
class Trial:
    """A trial: its cell in the result, and its number in that cell."""

    task: str
    length: int
    depth: float
    number: int


def all_trials(needle: NeedleConfig) -> list[Trial]:
    """The trials of every task, length and depth, in this order."""
    return [
        Trial(task, length, depth, number)
        for task in needle.tasks
        for length in needle.lengths
        for depth in needle.depths
        for number in range(needle.trials)
    ]


class Haystack:
    """Makes the samples of trials from the running text of ``documents``.

    A sample depends only on the text, the encoder, ``needle`` and the trial.
    """

    def __init__(
        self, documents: Documents, encoder: DocumentEncoder, needle: NeedleConfig
    ) -> None:
        self.encoder, self.needle = encoder, needle
        longest = max(needle.lengths)
        text = np.concatenate(
            [
                documents.text(document)
                for document in choose_documents(documents, documents.text_lengths, 4 * longest)
            ]
        )
        if not len(text):
            raise ConfigError(
                "mode=needle: the text has no tokens; give another with eval.path=..."
            )
        self.text_tokens = len(text)  # that were read
        self.text = np.resize(text, max(len(text), 4 * longest))  # repeats a short text

    def sample(self, trial: Trial) -> Sample:
        """The tokens of a trial except the last, and their labels.

        Raises ``ConfigError`` if its needles and its question do not fit into its length.
        """
        where = [self.needle.seed, TASKS.index(trial.task), trial.length, trial.number]
        rng = np.random.default_rng([*where, round(1e6 * trial.depth)])
        needles, question, answer = self._parts(trial, rng)
        room = trial.length - 1 - sum(map(len, (*needles.values(), question, answer)))
        if room < 0:
            least = trial.length - room
            raise ConfigError(
                f"needle.lengths={self.needle.lengths}: the task {trial.task} takes {least} "
                f"tokens; nearest valid: needle.lengths=[{least}]"
            )
        start = int(rng.integers(0, len(self.text) - room + 1))
        text = self.text[start : start + room]
        tokens, done = [np.array([self.encoder.bos])], 0
        for depth in sorted(needles):
            stop = round(depth * room)
            tokens += [text[done:stop], needles[depth]]
            done = stop
        tokens += [text[done:], question, answer]
        whole = np.concatenate(tokens).astype(np.int64)
        labels = np.full(len(whole) - 1, IGNORED)
        labels[-len(answer) :] = answer
        return Sample(whole[:-1], labels, [0, len(whole) - 1])

    def _parts(
        self, trial: Trial, rng: np.random.Generator
    ) -> tuple[dict[float, NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]:
        """Needles by their depth in the text (0 to 1), the question and the answer, as tokens."""
        config = self.needle
        count = {"single": 1, "multi_key": 1 + config.others, "variable": 1 + config.hops}
        names = _names(rng, count[trial.task])
        digits = "".join(map(str, rng.integers(0, 10, config.digits)))
        answer = self._encode(f" {digits}")
        needles = {trial.depth: self._needle(names[0], answer)}
        if trial.task == "variable":
            depths = trial.depth + (1 - trial.depth) * np.sort(rng.random(config.hops))
            for depth, before, name in zip(depths.tolist(), names, names[1:], strict=False):
                needles[_free(depth, needles)] = self._needle(name, self._encode(f" {before}"))
            return needles, self._question(names[-1]), answer
        for name in names[1:]:
            other = self._encode(" " + "".join(map(str, rng.integers(0, 10, config.digits))))
            needles[_free(float(rng.random()), needles)] = self._needle(name, other)
        return needles, self._question(names[0]), answer

    def _needle(self, name: str, value: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([self._question(name), value, self._encode("\n")])

    def _question(self, name: str) -> NDArray[np.int64]:
        """The tokens before the value, the same in a needle and in the question."""
        return self._encode(f"\nThe value of {name} is")

    def _encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self.encoder.texts([text])[0], np.int64)


def _names(rng: np.random.Generator, count: int) -> list[str]:
    """Different names of five letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(LETTERS, 5))] = None
    return list(names)


def _free(depth: float, taken: dict[float, NDArray[np.int64]]) -> float:
    """``depth``, or the next float above it that is no key of ``taken``."""
    while depth in taken:
        depth = float(np.nextafter(depth, 2.0))
    return depth
