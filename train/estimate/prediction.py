"""A job's prediction: whether it fits, and the smallest change of settings that makes it fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from train.checks.training import check_compile, check_offload
from train.config import Config, ConfigError
from train.estimate.host_memory import host_memory
from train.estimate.job import Job, UnpredictableError
from train.estimate.memory import MemoryEstimate, estimate_memory
from train.estimate.step_time import StepTime, estimate_time
from train.keys import shown
from train.run.run_config import allowed_changes

# Settings that need less memory, the cheaper ones first. A change uses each key at most once.
CHANGES: tuple[tuple[str, object], ...] = (
    ("memory.loss_chunk", 1024),
    ("memory.mlp_chunk", 16384),
    ("train.residual", "bfloat16"),
    ("memory.loss_chunk", 512),
    ("memory.mlp_chunk", 4096),
    ("memory.recompute_layers", None),
    ("memory.recompute", "attention-saving"),
    ("engine", "fsdp2"),
    ("memory.offload", "residual"),
    ("memory.offload", "all"),
    ("memory.recompute", "full"),
)
ALL_RECOMPUTE = "memory.recompute_layers=null"


@dataclass(frozen=True)
class Limits:
    """Bytes of a device and of a host; infinite if unknown."""

    device: float
    host: float


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time; ``no_time`` is the reason if there is no time."""

    job: Job
    memory: MemoryEstimate
    time: StepTime | None
    no_time: str = ""

    def problems(self, limits: Limits) -> list[str]:
        """The limits that the job exceeds, each as a clause without a remedy."""
        timeout, found = self.job.config.parallel.timeout_s, []
        if self.memory.device > limits.device:
            found.append(
                f"a step needs {_gb(self.memory.device)} GB of device memory by prediction, and "
                f"there are {_gb(limits.device)}"
            )
        if self.memory.on_host > limits.host:
            found.append(
                f"the ranks of a host need {_gb(self.memory.on_host)} GB of its memory by "
                f"prediction, and there are {_gb(limits.host)}"
            )
        if self.time is not None and self.time.total > timeout:
            found.append(
                f"parallel.timeout_s={timeout:g} is less than the {self.time.total:.0f} s of a "
                f"step by prediction"
            )
        return found


def predict(job: Job) -> Prediction:
    """The prediction of ``job``. Raises ``UnpredictableError`` if its memory is unpredictable."""
    memory = estimate_memory(job)
    try:
        return Prediction(job, memory, estimate_time(job))
    except UnpredictableError as error:
        return Prediction(job, memory, None, str(error))


def limits_of(job: Job, device: float | None = None) -> Limits:
    """The limits of ``hardware`` in the config of ``job``.

    ``device``, in bytes, overrides ``hardware.memory_gb``. Without ``host_gb`` a job that runs here
    has this machine's host memory, and any other job no limit.
    """
    hardware, host = job.config.hardware, math.inf
    if hardware.host_gb is not None:
        host = hardware.host_gb * 1e9
    elif job.here:
        host = host_memory()
    return Limits(device or hardware.memory_gb * 1e9, host)


def smallest_change(job: Job, limits: Limits) -> list[str]:
    """The smallest set of changes with which ``job`` fits, as overrides; the fastest of equal size.

    Empty if the job fits, or if nothing helps. If no setting is enough, a micro-batch has fewer
    samples, or else more GPUs share it. A start that continues a run does not change settings that
    determine the run's result. If layers must recompute, only as many do as have to.
    """
    if not predict(job).problems(limits):
        return []
    allowed = allowed_changes(job.config, (key for key, _ in CHANGES))
    for wider, overrides in (*_with_fewer(job), *_on_more(job)):
        for size in range(4):
            fitting = []
            for number, (predicted, names) in enumerate(_changed(wider, size, allowed)):
                if not predicted.problems(limits):
                    seconds = math.inf if predicted.time is None else predicted.time.total
                    fitting.append((seconds, number, overrides + names, predicted.job))
            if fitting:
                _, _, names, fits = min(fitting, key=lambda found: found[:2])
                if not any(name.startswith("memory.recompute") for name in names):
                    return names
                fewer = fewer_layers(fits, limits)
                return [n for n in names if not (fewer and n == ALL_RECOMPUTE)] + fewer
    return []


def fewer_layers(job: Job, limits: Limits) -> list[str]:
    """The override with the fewest layers that recompute; empty if all that do have to.

    A job that offloads has none: copies hide behind the recomputation.
    """
    memory = job.config.memory
    most = memory.recomputed(job.config.model.n_layers) if memory.offload == "none" else 0
    for layers in range(1, most):
        less = dataclasses.replace(memory, recompute_layers=layers)
        config = dataclasses.replace(job.config, memory=less)
        if not predict(dataclasses.replace(job, config=config)).problems(limits):
            return [f"memory.recompute_layers={layers}"]
    return []


def require_fit(job: Job, limits: Limits) -> Prediction:
    """The prediction of ``job``.

    Raises ``ConfigError``, with the smallest change that helps, if the job does not fit and
    ``memory.force`` is false. Raises ``UnpredictableError`` if there is no prediction.
    """
    prediction = predict(job)
    problems = prediction.problems(limits)
    if problems and not job.config.memory.force:
        change = " ".join(smallest_change(job, limits))
        remedy = f"nearest valid: {change}" if change else "no setting of memory and engine helps"
        raise ConfigError(f"{problems[0]}; {remedy} (or memory.force=true)")
    return prediction


def _changed(job: Job, size: int, allowed: Sequence[str]) -> Iterator[tuple[Prediction, list[str]]]:
    """Predictions of ``job`` with each combination of ``size`` changes, and its overrides.

    The changes are of ``allowed`` keys and valid together. A combination also raises a timeout that
    is too short.
    """
    config = job.config
    open_changes = [
        (key, value) for key, value in CHANGES if key in allowed and _value(job, key) != value
    ]
    for chosen in itertools.combinations(open_changes, size):
        keys = [key for key, _ in chosen]
        if len(set(keys)) < size:
            continue
        changed = _apply(config, dict(chosen))
        if changed is None:
            continue
        names = [f"{key}={shown(value)}" for key, value in chosen]
        predicted = predict(dataclasses.replace(job, config=changed))
        time = predicted.time
        if time is not None and time.total > changed.parallel.timeout_s:
            seconds = 60 * math.ceil(2 * time.total / 60)
            parallel = dataclasses.replace(changed.parallel, timeout_s=seconds)
            changed = dataclasses.replace(changed, parallel=parallel)
            made = dataclasses.replace(job, config=changed)
            predicted = dataclasses.replace(predicted, job=made)
            names.append(f"parallel.timeout_s={seconds}")
        yield predicted, names


def _apply(config: Config, chosen: dict[str, object]) -> Config | None:
    """``config`` with the ``chosen`` settings; None if they are invalid or save no memory."""
    memory, train, engine = config.memory, config.train, config.engine
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        if key == "engine":
            engine = dataclasses.replace(engine, name=value, shard="all", reduce="micro")
        elif section == "memory":
            memory = dataclasses.replace(memory, **{name: value})
        else:
            train = dataclasses.replace(train, **{name: value})
    if config.memory.recompute == "full" and memory.recompute != "full":
        return None
    for chunk in ("mlp_chunk", "loss_chunk"):
        old, new = (getattr(m, chunk) for m in (config.memory, memory))
        if old is not None and new > old:
            return None
    changed = dataclasses.replace(config, memory=memory, train=train, engine=engine)
    try:
        check_offload(memory, config.model.n_layers)
        check_compile(changed)
    except ConfigError:
        return None
    return changed


def _value(job: Job, key: str) -> object:
    config = job.config
    if key == "memory.loss_chunk":
        return config.memory.loss_tokens(job.rows)
    section, _, name = key.partition(".")
    return config.engine.name if key == "engine" else getattr(getattr(config, section), name)


def _with_fewer(job: Job) -> Iterator[tuple[Job, list[str]]]:
    """``job``, then with ever fewer samples in a micro-batch, as many in a step; and overrides."""
    yield job, []
    config, batch = job.config, job.config.batch_over(job.dp)
    names = config.same_batch(job.dp)
    train = dataclasses.replace(
        config.train, global_batch_size=batch, gradient_accumulation_steps=None
    )
    while (tokens := config.fewer_tokens(batch, job.dp)) is not None:
        data = dataclasses.replace(config.data, tokens_per_rank=tokens)
        config = dataclasses.replace(config, data=data, train=train)
        # All documents of these samples. After samples shorter than seq_len come some of the next.
        ends = [end for end in job.cu_seqlens if end <= tokens * config.parallel.cp]
        made = dataclasses.replace(job, config=config, cu_seqlens=ends)
        yield made, [f"data.tokens_per_rank={tokens}", *names]


def _on_more(job: Job) -> Iterator[tuple[Job, list[str]]]:
    """``job`` with 2, 4 and 8 times the GPUs in each CP group, and its overrides.

    A CP group shares the same samples. It must fit on a host, and a host must have whole groups.
    """
    config = job.config
    for more in (2, 4, 8):
        cp, gpus = config.parallel.cp * more, job.gpus * more
        tokens, rest = config.data.tokens_per_rank, 0
        if tokens is not None:
            tokens, rest = divmod(tokens, more)
        if rest or cp > job.per_host or min(gpus, job.per_host) % cp:
            continue
        names = [f"parallel.cp={cp} on {gpus} GPUs"]
        names += [] if tokens is None else [f"data.tokens_per_rank={tokens}"]
        wider = dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, cp=cp),
            data=dataclasses.replace(config.data, tokens_per_rank=tokens),
        )
        yield dataclasses.replace(job, config=wider, gpus=gpus), names


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f}"
