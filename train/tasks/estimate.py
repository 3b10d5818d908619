"""``mode=estimate``: predict memory and time of a job without a GPU; the check before a run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from train.config import Config
from train.console import LineConsole
from train.data.mixture import training_samples
from train.data.samples import concatenate
from train.data.shards import Corpus
from train.data.tokenizer import load_tokenizer, vocabulary_size
from train.estimate.job import Job, UnpredictableError
from train.estimate.prediction import (
    Limits,
    Prediction,
    fewer_layers,
    limits_of,
    predict,
    require_fit,
    smallest_change,
)
from train.log.speed import typical
from train.paths import expand
from train.run.run_config import held_compile
from train.run.run_folder import RunFolder, write_atomically

# The measured category (`train.engine.time_split.CATEGORIES`) of each part of a predicted step.
PARTS = {
    "attention": "attention",
    "matrix products": "matmul",
    "elementwise": "rest",
    "optimiser": "rest",
    "exposed communication": "communication",
    "exposed offload": "idle",
}


def run(config: Config, gpus: int) -> bool:
    """Print the prediction of a job on ``gpus`` GPUs, write it to ``estimate.json``, and return
    whether the job fits.

    A job whose GPUs this machine has runs here. Raises ``UnpredictableError`` if its memory cannot
    be predicted.
    """
    if os.environ.get("RANK", "0") != "0":
        return True
    config.train.compile = held_compile(config)
    per_host = config.estimate.gpus_per_host
    here = torch.cuda.device_count() >= min(gpus, per_host)
    job = Job(config, gpus, per_host, _rows(config), _documents(config), here)
    prediction, limits = predict(job), limits_of(job)
    change = smallest_change(job, limits)
    folder = RunFolder(config)
    folder.make()
    path = folder.path / "estimate.json"
    write_atomically(path, json.dumps(as_json(prediction, limits, change), indent=1) + "\n")
    show(prediction, limits, change, LineConsole(), path)
    return not prediction.problems(limits)


def before_run(config: Config, corpus: Corpus, device: torch.device) -> Prediction | None:
    """The prediction of a run on GPUs, from its first micro-batch and this machine's memory.

    None for a job that cannot be predicted; rank 0 then prints the reason. Raises ``ConfigError``
    if the run does not fit.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    samples = training_samples(corpus.train, config.data, config.train.seed)
    rows = config.model.rows(vocabulary_size(corpus.tokenizer))
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    first = concatenate([samples[n] for n in range(config.samples_at_once())])
    job = Job(config, world, per_host, rows, first.cu_seqlens, here=True)
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        return require_fit(job, limits_of(job, total))
    except UnpredictableError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"No prediction of memory and time: {error}", flush=True)
        return None


def errors_of(prediction: Prediction, seconds: float, device_memory: int, offloaded: int) -> str:
    """A line with the errors of the prediction of a step.

    ``device_memory`` are the bytes that the driver counts on this device, ``offloaded`` the bytes
    of this rank's buffers for activations on the host.
    """
    rows = [("device memory", prediction.memory.device / 1e9, device_memory / 1e9, "GB")]
    if prediction.time is not None:
        rows.append(("step", prediction.time.total, seconds, "s"))
    expected = prediction.memory.host["offloaded activations"] / prediction.job.ranks_per_host
    if expected:
        rows.append(("offloaded activations of a rank", expected / 1e9, offloaded / 1e9, "GB"))
    texts = [
        f"{name} {found:.1f} {unit}, predicted {guess:.1f} ({100 * (found / guess - 1):+.1f}%)"
        for name, guess, found, unit in rows
    ]
    return f"first step against its prediction: {'; '.join(texts)}"


def speed_of_run(prediction: Prediction | None, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The contents of ``speed.json``: `typical` figures of all steps but the first, and of a
    prediction its figures and their relative errors.

    ``lines`` are those of the metrics, with the ``seconds`` of each step. In the first step blocks
    are compiled and buffers made. Parts of the predicted seconds have the names of measured ones.
    """
    steps = lines[1:]
    found = {"steps": [line["step"] for line in steps], **typical(steps)}
    if prediction is None:
        return found
    predicted = {"device_memory": float(prediction.memory.device)}
    parts: dict[str, float] = {}
    if prediction.time is not None:
        predicted["seconds"] = prediction.time.total
        for name, seconds in prediction.time.seconds.items():
            key = f"{PARTS[name]}_s"
            parts[key] = parts.get(key, 0) + seconds
    errors = {key: found[key] / guess - 1 for key, guess in predicted.items() if key in found}
    return {**found, "predicted": {**predicted, **parts}, "over_prediction": errors}


def as_json(prediction: Prediction, limits: Limits, change: list[str]) -> dict[str, Any]:
    """The prediction in bytes and seconds."""
    memory, time = prediction.memory, prediction.time
    found: dict[str, Any] = {
        "gpus": prediction.job.gpus,
        "device_memory": {
            "parts": memory.parts,
            "phases": memory.phases,
            "total": memory.device,
            "available": limits.device,
        },
        "host_memory": {
            **memory.host,
            "total": memory.on_host,
            "available": limits.host if math.isfinite(limits.host) else None,
        },
        "problems": prediction.problems(limits),
        "smallest_change": change,
        "timeout_s": prediction.job.config.parallel.timeout_s,
    }
    if time is None:
        return {**found, "no_step_time": prediction.no_time}
    step = {**time.seconds, "total": time.total}
    return {**found, "step_seconds": step, "flops": time.flops.model, **time.utilisation}


def show(
    prediction: Prediction, limits: Limits, change: list[str], console: LineConsole, path: Path
) -> None:
    """Print the prediction as a table, with its verdict."""
    job, memory, time = prediction.job, prediction.memory, prediction.time
    hardware = job.config.hardware
    table = Table("", "GB", title=f"{job.gpus} x {hardware.name}, {job.tokens:,} tokens each")
    table.columns[1].justify = "right"

    def add(name: str, n_bytes: float, **style: Any) -> None:
        table.add_row(name, f"{n_bytes / 1e9:.1f}", **style)

    for name, size in memory.parts.items():
        if size:
            add(name, size)
    largest = max(memory.phases, key=lambda name: memory.phases[name])
    for name, size in memory.phases.items():
        add(name if name == largest else f"({name}, at another time)", size)
    table.add_section()
    add("device, at the peak", memory.device)
    add("device, available", limits.device, end_section=True)
    for name, size in memory.host.items():
        add(f"host: {name}", size)
    if math.isfinite(limits.host):
        add("host, available", limits.host)
    else:
        table.add_row("host, available (give hardware.host_gb)", "?")
    console.print(table)
    if time is None:
        console.print(f"No time of a step: {prediction.no_time}")
    else:
        parts = ", ".join(f"{name} {s:.1f}" for name, s in time.seconds.items() if s >= 0.05)
        shares = ", ".join(f"{k.upper()} {100 * v:.0f}%" for k, v in time.utilisation.items())
        console.print(f"A step: {time.total:.1f} s ({parts}); {shares}")
    problems = prediction.problems(limits)
    for problem in problems:
        console.print(f"Does not fit: {problem}")
    if problems:
        remedy = " ".join(change) if change else "none of memory, engine and up to 8 times the GPUs"
        console.print(f"The smallest change that fits: {remedy}")
    else:
        less = " ".join(fewer_layers(job, limits))
        console.print(f"It fits, also with {less}, which is faster." if less else "It fits.")
    console.print(f"Written to {path}")


def _rows(config: Config) -> int:
    """Rows of embedding and head, for the given tokenizer or the one that a run would train."""
    data = config.data
    if data.tokenizer is None:
        return config.model.rows(data.vocab_size)
    tokenizer = load_tokenizer(expand("data.tokenizer", data.tokenizer))
    return config.model.rows(vocabulary_size(tokenizer))


def _documents(config: Config) -> list[int]:
    """Bounds of the documents in a micro-batch of a CP group.

    All but the last document of a sample have ``estimate.document`` tokens.
    """
    seq_len, total = config.data.seq_len, config.samples_at_once() * config.data.seq_len
    length = config.estimate.document or config.data.longest_document()
    starts = [
        n for first in range(0, total, seq_len) for n in range(first, first + seq_len, length)
    ]
    return [*starts, total]
