"""A run from its first line to its last: set up, optimiser steps, validation, summary."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from train.baselines import count_nats_per_byte, gzip_nats_per_byte
from train.batches import Batch, ahead, make_batch
from train.config import Config, ConfigError
from train.corpus import find_sources
from train.evaluate import Evaluation, evaluate, mean_by_bucket
from train.loss import n_buckets, sum_by_bucket
from train.metrics import Recorder, StepProgress, peak_memory, prepare_folder
from train.model import LanguageModel, Transformer
from train.optim import learning_rate, make_optimizer, set_learning_rate
from train.parallel import (
    Mesh,
    choose_device,
    data_parallel,
    join,
    require_agreement,
    shutdown,
    sum_over_ranks,
)
from train.plots import plot_run
from train.samples import IGNORED, TrainingSamples, evaluation_documents
from train.shards import Corpus, open_corpus

SELF_ONLY = (0, 0)  # the attention window in which each token sees itself alone


def run(config: Config) -> NoReturn:
    """Do what ``config.mode`` says and end the process: 0 when done, 1 on a failure.

    ``ConfigError`` passes through: the caller explains it. Any other failure is one line on stderr
    that names the rank; its traceback goes to ``error-rank<N>.txt`` in the run folder.
    """
    device = choose_device(config)
    if config.mode == "check":
        _check_only(config)
    mesh, closers = None, []
    try:
        corpus = open_corpus(config.data)
        mesh = join(config.parallel, device)
        trainer = Trainer(config, corpus, mesh)
        closers = [trainer.close]
        trainer.train()
        trainer.finish()
        shutdown(mesh, 0, closers)
    except ConfigError:
        raise
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # the outermost frame: nothing may leave without naming its rank
        _report(error, config)
        code = 1
    shutdown(mesh, code, closers)


def _check_only(config: Config) -> NoReturn:
    sources = find_sources(config.data)
    if os.environ.get("RANK", "0") == "0":
        print(f"The settings are valid; the corpus has {len(sources)} files. Nothing was started.")
    sys.exit(0)


def _report(error: Exception, config: Config) -> None:
    rank = os.environ.get("RANK", "0")
    folder = Path(config.run.dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"error-rank{rank}.txt"
    log.write_text("".join(traceback.format_exception(error)))
    summary = " ".join(str(error).split())
    print(f"rank {rank}: {type(error).__name__}: {summary} (traceback: {log})", file=sys.stderr)


class Trainer:
    """The state of a run on one rank."""

    def __init__(self, config: Config, corpus: Corpus, mesh: Mesh) -> None:
        self.config, self.corpus, self.mesh = config, corpus, mesh
        self.console = Console(quiet=mesh.rank != 0, markup=False, highlight=False)
        settings = json.dumps(dataclasses.asdict(config), indent=1)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        require_agreement(mesh, {"configuration": digest, "corpus": corpus.digest})
        data, train = config.data, config.train
        self.samples = TrainingSamples(corpus.train, data.seq_len, data.piece_len, train.seed)
        self.vocab_size = corpus.tokenizer.get_vocab_size()
        self.model = build_model(config, self.vocab_size, mesh)
        self.optimizer = make_optimizer(self.model.transformer, config.optim)
        self.wrapped = data_parallel(self.model, mesh)
        self.folder = Path(config.run.dir).expanduser()
        self.recorder = None
        if mesh.rank == 0:
            prepare_folder(self.folder)
            (self.folder / "config.json").write_text(settings + "\n")
            self.recorder = Recorder(self.folder)
        self.train_seconds = 0.0

    def close(self) -> None:
        """Close the files of the run."""
        if self.recorder is not None:
            self.recorder.close()

    def train(self) -> None:
        """All optimiser steps, with a validation every ``train.eval_every`` of them."""
        self._introduce()
        train = self.config.train
        with StepProgress(self.console, train.steps) as progress:
            begin = previous = time.perf_counter()
            for step, batches in enumerate(ahead(self._batches, 0, train.steps)):
                record, by_bucket = self.step(step, batches)
                now = time.perf_counter()
                tokens = self.config.data.seq_len * train.accumulation * self.mesh.dp
                record["tokens_per_s"] = tokens / (now - previous)
                record["memory"] = peak_memory(self.mesh.device)
                if self.recorder is not None:
                    self.recorder.step(record, by_bucket)
                progress.update(record)
                done = step + 1
                if train.eval_every and done % train.eval_every == 0 and done < train.steps:
                    progress.say(self._validate(done))
                    now = time.perf_counter()
                previous = now
            self.train_seconds = time.perf_counter() - begin

    def step(self, step: int, batches: list[Batch]) -> tuple[dict[str, Any], list[float]]:
        """One optimiser step: its line of metrics, and its loss by position bucket.

        The gradient is that of the sum of all token losses over the number N of valid tokens of
        all ranks and micro-batches. ``data_parallel`` averages over W ranks, hence W / N.
        """
        mesh, optim = self.mesh, self.config.optim
        n_valid = sum_over_ranks(mesh, torch.tensor(sum(batch.n_valid for batch in batches)))
        scale = mesh.world / n_valid.clamp(min=1)
        buckets = n_buckets(self.config.data.seq_len)
        sums = torch.zeros(2, buckets, dtype=torch.float64, device=mesh.device)
        for batch, context in self._micro_batches(batches):
            with context:
                losses = self.wrapped(batch)
                (losses.sum() * scale).backward()
            sums[0] += sum_by_bucket(losses.detach(), batch.buckets, buckets)
            sums[1] += sum_by_bucket((batch.labels != IGNORED).float(), batch.buckets, buckets)
        limit = optim.clip if optim.clip is not None else float("inf")
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        lr = learning_rate(optim, step, self.config.train.steps)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        losses_by_bucket, tokens_by_bucket = sum_over_ranks(mesh, sums).tolist()
        record = {
            "step": step + 1,
            "loss": sum(losses_by_bucket) / max(1, int(n_valid)),
            "grad_norm": float(grad_norm),
            "lr": lr,
        }
        return record, mean_by_bucket(losses_by_bucket, [round(n) for n in tokens_by_bucket])

    def finish(self) -> None:
        """Final evaluation, baselines, plots, ``summary.json`` and a table."""
        max_bytes = self.config.train.final_eval_bytes
        full = self._evaluate(max_bytes)
        self_only = self._evaluate(max_bytes, SELF_ONLY)
        if self.recorder is None:
            return
        self._record_evaluation(self.config.train.steps, full)
        self.console.print("Counting the baselines ...")
        summary = self._summary(full, self_only)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        self._draw(full, self_only)
        self._print_table(summary)

    def _batches(self, step: int) -> list[Batch]:
        accumulation, mesh = self.config.train.accumulation, self.mesh
        indices = [(step * accumulation + m) * mesh.dp + mesh.dp_rank for m in range(accumulation)]
        layout = self.config.parallel.layout
        return [make_batch(self.samples[index], mesh, layout) for index in indices]

    def _micro_batches(
        self, batches: list[Batch]
    ) -> Iterator[tuple[Batch, contextlib.AbstractContextManager[None]]]:
        """Each batch on the device, with the context that reduces gradients after the last only."""
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches) or self.mesh.world == 1
            context = contextlib.nullcontext() if last else self.wrapped.no_sync()
            yield batch.to(self.mesh.device), context

    def _evaluate(self, max_bytes: int | None, window: tuple[int, int] = (-1, -1)) -> Evaluation:
        held_out = self.corpus.held_out
        return evaluate(self.model, held_out, self.config, self.mesh, max_bytes, window)

    def _validate(self, step: int) -> str:
        evaluation = self._evaluate(self.config.train.eval_bytes)
        self._record_evaluation(step, evaluation)
        return (
            f"step {step}: held out {evaluation.nats_per_byte:.3f} nats per byte "
            f"({evaluation.n_bytes:,} bytes)"
        )

    def _record_evaluation(self, step: int, evaluation: Evaluation) -> None:
        if self.recorder is not None:
            record = {
                "step": step,
                "nats_per_byte": evaluation.nats_per_byte,
                "bytes": evaluation.n_bytes,
                "tokens": evaluation.tokens,
            }
            self.recorder.evaluation(record, evaluation.loss_by_bucket)

    def _introduce(self) -> None:
        mesh, corpus = self.mesh, self.corpus
        parameters = sum(p.numel() for p in self.model.parameters())
        self.console.print(
            f"{parameters:,} parameters in {_precision_name(self.model.dtype)} on {mesh.world} x "
            f"{mesh.device.type} (dp {mesh.dp}, cp {mesh.cp}); "
            f"{len(corpus.train):,} documents of {corpus.train.lengths.sum():,} tokens, "
            f"{len(corpus.held_out):,} held out; run folder {self.folder}",
            soft_wrap=True,
        )

    def _summary(self, full: Evaluation, self_only: Evaluation) -> dict[str, Any]:
        corpus, config = self.corpus, self.config
        chosen = evaluation_documents(corpus.held_out, config.train.final_eval_bytes)
        texts = (_text(corpus, document) for document in chosen)
        unigram, bigram = count_nats_per_byte(
            corpus.train, corpus.held_out, chosen, self.vocab_size
        )
        return {
            "nats_per_byte": full.nats_per_byte,
            "nats_per_byte_self_only": self_only.nats_per_byte,
            "gzip": gzip_nats_per_byte(texts),
            "unigram": unigram,
            "bigram": bigram,
            "train_seconds": self.train_seconds,
            "steps": config.train.steps,
            "world_size": self.mesh.world,
            "cp": self.mesh.cp,
            "seq_len": config.data.seq_len,
            "held_out_bytes": full.n_bytes,
            "held_out_tokens": full.tokens,
        }

    def _draw(self, full: Evaluation, self_only: Evaluation) -> None:
        try:
            plot_run(self.folder, full, self_only)
        except ModuleNotFoundError as error:
            self.console.print(f"no plots: {error}; pip install 'ringfa3[plots]'", soft_wrap=True)

    def _print_table(self, summary: dict[str, Any]) -> None:
        title = f"Held out: {summary['held_out_bytes']:,} bytes"
        table = Table("", "nats per byte", title=title, title_justify="left")
        rows = {
            "this model": "nats_per_byte",
            "this model, each token seeing only itself": "nats_per_byte_self_only",
            "gzip -9": "gzip",
            "unigram": "unigram",
            "bigram": "bigram",
        }
        for label, key in rows.items():
            table.add_row(label, f"{summary[key]:.3f}")
        self.console.print(table)
        self.console.print(
            f"{summary['steps']} steps in {summary['train_seconds']:.0f} s; everything is in "
            f"{self.folder}",
            soft_wrap=True,
        )


def build_model(config: Config, vocab_size: int, mesh: Mesh) -> LanguageModel:
    """The model on this rank's device, the same weights on every rank."""
    transformer = Transformer(
        config.model,
        vocab_size,
        config.train.seed,
        recompute=config.train.recompute,
        group=mesh.cp_group,
        layout=config.parallel.layout,
        transport=config.parallel.transport,
    )
    dtype = compute_dtype(config.train.precision, mesh.device)
    return LanguageModel(transformer.to(mesh.device), dtype, config.train.loss_chunk)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What ``train.precision`` means on ``device``."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, precision)


def _precision_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(corpus: Corpus, document: int) -> str:
    """The text of a held-out document, from its tokens."""
    ids = corpus.held_out.tokens(document, 1, int(corpus.held_out.lengths[document]))
    return corpus.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
