"""Entry point of the trainer: ``[torchrun ...] train/pretrain.py [group=option] [key=value]``, or
``srun python train/pretrain.py ...``; with ``-m`` for a sweep.

Exit codes: 0 done, 1 failed while running or does not fit (mode=estimate), 2 invalid config or a
missing package (every process detects it before any process group exists, one per host prints it),
130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # modules are imported as train.*, from any working directory
    sys.path[0] = str(Path(__file__).absolute().parents[1])

from train.extras import missing_packages
from train.slurm import set_ranks

LOCAL_RANK_0_S = 10.0  # for local rank 0 to start and to print the error
MODULES = {
    **{mode: f"tasks.{mode}" for mode in ("train", "check", "estimate", "verify", "generate")},
    "export": "tasks.export",
    "eval": "probes.text_loss",
    "needle": "probes.needle",
    "rope": "probes.rope_sweep",
}


def end(problem: str, found_by_all: bool = True) -> NoReturn:
    """End with exit code 2; print the problem.

    If all processes have found it, only local rank 0 of each host prints it.
    """
    if not found_by_all or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"pretrain.py: {problem}", file=sys.stderr, flush=True)
    else:
        _wait_for_local_rank_0()
    sys.stdout.flush()
    os._exit(2)  # skips the destructors of process groups


def _wait_for_local_rank_0() -> None:
    """Wait for local rank 0 to print the error: torchrun ends all processes when one has failed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigtimedwait({signal.SIGTERM}, LOCAL_RANK_0_S)


set_ranks(os.environ)  # before anything reads a rank
if missing := missing_packages():  # the imports below would end in a traceback
    end(missing)

import hydra  # noqa: E402
import yaml  # noqa: E402
from hydra._internal.utils import get_args_parser  # noqa: E402
from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: E402
from hydra.errors import (  # noqa: E402
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from train.checks.config import check  # noqa: E402
from train.config import (  # noqa: E402
    GROUPS,
    NAME,
    RUN_MODES,
    SOURCES,
    Config,
    ConfigError,
    register_schema,
)
from train.help import help_text  # noqa: E402
from train.keys import default, nearest, schema_keys, source_name, to_schema_key  # noqa: E402
from train.run.inherit import resolve_inherited  # noqa: E402
from train.run.run_config import with_run_config  # noqa: E402
from train.run.stopper import Stopper  # noqa: E402
from train.sections.machine import ALL  # noqa: E402
from train.sections.renamed import RENAMED, RENAMED_VALUES  # noqa: E402


@dataclass(frozen=True)
class CommandLine:
    """The command line: Hydra's flags without ``-m``, the overrides, and which modes are set."""

    flags: list[str]
    overrides: list[str]
    multirun: bool
    help: bool


def read_command_line(arguments: list[str]) -> CommandLine:
    """Separate flags from overrides, in any order; ``ConfigError`` for an unknown flag.

    Hydra's own parser rejects a flag between two overrides.
    """
    parser = get_args_parser()
    parser.error = _reject_flag  # argparse would print its whole usage
    read = parser.parse_intermixed_args(arguments)
    left = list(read.overrides)
    flags = [a for a in arguments if not (left and a == left[0] and left.pop(0))]
    multirun = read.multirun or "hydra.mode=MULTIRUN" in read.overrides
    single = [flag for flag in flags if flag != "-m" and not "--multirun".startswith(flag)]
    overrides = [_quote_home(text) for text in read.overrides]
    return CommandLine(single, overrides, multirun, read.help)


def _quote_home(override: str) -> str:
    """``key=~/path`` with quotes, which Hydra needs; a shell expands no ``~`` after ``key=``."""
    return re.sub(r"^([^=]+=)(~[^'\",]*)$", r"\1'\2'", override)


def _reject_flag(message: str) -> NoReturn:
    raise ConfigError(f"{message}; settings are written key=value (--help lists all)")


def compose(arguments: list[str]) -> DictConfig | None:
    """Compose the config of ``configs/`` and ``arguments``. Returns None if Hydra only printed, or
    passed the configs to the launcher of a sweep.

    Training starts after Hydra has returned, so that Hydra reports no training error as a config
    error.
    """
    composed: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path="../configs", config_name="config")
    def collect(config: DictConfig) -> None:
        composed.append(config)

    sys.argv[1:] = declare_sources(arguments)
    collect()
    return composed[0] if composed else None


def check_command_line(line: CommandLine) -> list[str]:
    """The keys and groups on the command line; ``ConfigError`` for one that is not in the schema.

    Hydra itself allows ``+key=value`` and ``~key`` to change the schema, and suggests nothing for a
    misspelt key.
    """
    keys, given = schema_keys(), []
    for override in OverridesParser.create().parse_overrides(line.overrides):
        key = override.key_or_group
        if key.startswith(("hydra.", "hydra/")):
            continue
        known = key in GROUPS or to_schema_key(key) in keys
        if override.is_add() or override.is_delete():
            hint = f"write {key}=..." if known else _key_hint(key)
            raise ConfigError(f"{override.input_line}: keys are not added or removed; {hint}")
        if not known:
            raise ConfigError(f"{override.input_line}: no such key; {_key_hint(key)}")
        if override.is_sweep_override() and not line.multirun:
            raise ConfigError(
                f"{override.input_line}: several values are a sweep; add -m, or write one value "
                f"(a list is {key}=[...], a text with commas {key}='\"a, b\"')"
            )
        given.append(key)
    return given


def declare_sources(arguments: list[str]) -> list[str]:
    """Insert a declaration of every source of text before the first override that sets one.

    Hydra can set a key of an existing source or add a whole source, but not both at once.
    """
    overrides = [n for n, a in enumerate(arguments) if a.startswith((f"{SOURCES}.", f"{SOURCES}="))]
    if not overrides:
        return arguments
    names = {source_name(arguments[n].partition("=")[0]) for n in overrides} - {""}
    declared = f"++{SOURCES}={{{','.join(f'{name}:{{}}' for name in sorted(names))}}}"
    added = [f"++{a}" if a.startswith(f"{SOURCES}=") else a for a in arguments]
    return [*added[: overrides[0]], declared, *added[overrides[0] :]]


def _key_hint(key: str) -> str:
    if key in RENAMED:
        return f"its name is {RENAMED[key]} now"
    best = nearest(to_schema_key(key), [*GROUPS, *schema_keys()], cutoff=0) or ""
    best = best.replace(f".{NAME}", f".{source_name(key) or NAME}")
    return f"the nearest valid one is {best} (--help lists all)"


def explain(error: Exception) -> str:
    """Explain a config error, from Hydra, OmegaConf, YAML or the trainer, in one or two lines."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if new := RENAMED_VALUES.get(f"{group}={option}"):
            return f"{group}={option}: its name is {new} now"
        options = sorted(error.options or [])
        match = nearest(option, options)
        hint = f"did you mean {group}={match}? " if match else ""
        return f"{group}={option}: no such option; {hint}Allowed: {', '.join(options)}"
    if isinstance(error, OverrideParseException):
        key = str(error.override).partition("=")[0]
        return (
            f"{error.override} cannot be read; quote a value that holds special characters, "
            f"for example '{key}=\"~/text, two\"'"
        )
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _explain_key(cause.full_key, cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())  # it names the file and the line
    return str(error).strip().splitlines()[0]


def _explain_key(key: str, error: OmegaConfBaseException) -> str:
    key = key.partition("[")[0]  # the key of a list, if the error is about an element
    if to_schema_key(key) not in schema_keys():
        return f"{key}: no such key; {_key_hint(key)}"
    problem = str(error.msg or error).strip().splitlines()[0]
    usual = default(to_schema_key(key))
    if isinstance(error.value, float) and error.value.is_integer() and type(usual) is int:
        usual = int(error.value)  # such as train.steps=1e6
    return f"{key}: {problem}; valid would be {key}={'null' if usual is None else usual}"


def set_allocator() -> None:
    """Use expandable segments of CUDA memory, unless the environment configures the allocator.

    They avoid fragmentation: freed tensors leave no holes that are too small for later ones. Call
    this before torch is imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def main() -> None:
    """Compose, check and run; an invalid config ends in a short explanation and exit code 2."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    set_allocator()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file may have any name
    register_schema()
    stopper = None
    try:
        line = read_command_line(sys.argv[1:])
        if line.help:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may be `head`
            print(help_text(line.overrides, min(100, shutil.get_terminal_size().columns)))
            return
        given = check_command_line(line)
        if line.multirun:
            from train.tasks.sweep import run_sweep

            sys.exit(run_sweep(compose, line.flags, line.overrides))
        composed = compose([*line.flags, *line.overrides])
        if composed is None:
            return
        config = resolve_inherited(composed)
        if config.mode in ("generate", "export", *RUN_MODES):
            config = with_run_config(config, given)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if config.mode == "estimate":
            world = gpus_of(config, world)
        config = config.on(world)
        check(config, world)
        stopper = Stopper() if config.mode == "train" else None
        run_mode(config, world, stopper)
    except KeyboardInterrupt:
        os._exit(130)
    except (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if stopper is not None:
            stopper.disable()
        end(explain(error), not isinstance(error, ConfigError) or error.found_by_all)


def gpus_of(config: Config, world: int) -> int:
    """The GPUs of the job that ``mode=estimate`` predicts, started as ``world`` processes.

    Raises ``ConfigError`` if ``parallel.cp`` is all and nothing gives their number.
    """
    cp, gpus = config.parallel.cp, config.estimate.gpus
    if gpus is None and cp == ALL and world == 1:
        raise ConfigError(
            "parallel.cp=all is the number of GPUs of the job, which mode=estimate does not know; "
            "give it, for example estimate.gpus=8"
        )
    return gpus or (world if cp == ALL else max(world, cp))


def run_mode(config: Config, world: int, stopper: Stopper | None) -> None:
    """Run ``config.mode`` on ``world`` processes or, with ``mode=estimate``, GPUs.

    Only this imports torch, after all checks and after the stopper of ``mode=train`` has blocked
    signals: threads of torch inherit the blocked signals.
    """
    module = importlib.import_module(f"train.{MODULES[config.mode]}")
    if config.mode == "train":
        module.run(config, stopper)
    elif config.mode == "estimate":
        if not module.run(config, world):
            sys.exit(1)
    else:
        module.run(config)


if __name__ == "__main__":
    main()
