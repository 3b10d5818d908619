"""`python -m ringfa3.hf.verify_model MODEL`: is a model right under a ring? Prints a verdict.

Exit codes: 0 right, 1 wrong, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringfa3.hf.batch import IGNORED
from ringfa3.hf.registration import NAME, register
from ringfa3.hf.verification import Verification, verify

COLUMNS: tuple[str, ...] = ("input_ids", "labels")
GRACE_S = 2.0  # between the first rank that fails and the end of all
RANDOM_DOCUMENTS = (37, 1, 40, 200, 130, 104)  # tokens of the default batch


def main(arguments: list[str] | None = None) -> int:
    """The exit code of this rank."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    if "RANK" not in os.environ:
        return _start_ranks(options.cp, arguments)
    rank = int(os.environ["RANK"])
    try:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group()
        found = _verify(options, device)
    except Exception as error:  # a traceback would end with 1, which means "wrong"
        if rank == 0 or not isinstance(error, TypeError | ValueError):  # these are every rank's
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    if rank == 0:
        _report(found, options)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if found else 1


def _start_ranks(ranks: int, arguments: list[str]) -> int:
    """Run this program on `ranks` processes of this host. The exit code of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    running = []
    for rank in range(ranks):
        place = {**job, "RANK": rank, "LOCAL_RANK": rank}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
        environment |= {name: str(value) for name, value in place.items()}
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "ringfa3.hf.verify_model", *arguments]
        running.append(subprocess.Popen(command, env=environment))
    while any(process.poll() is None for process in running):
        if any(process.poll() for process in running):
            time.sleep(GRACE_S)  # the others may be about to end, too
            break
        time.sleep(0.05)
    for process in running:
        process.kill()
    codes = {process.wait() for process in running}
    return max(codes) if codes <= {0, 1} else 2  # it could not run, or was killed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ringfa3.hf.verify_model", description=__doc__)
    parser.add_argument("model", type=_model, help="a folder or name for from_pretrained")
    parser.add_argument("--cp", type=int, default=2, help="ranks, without torchrun; default 2")
    parser.add_argument("--data", type=Path, help="a .jsonl of input_ids, maybe labels; or a text")
    parser.add_argument("--tokens", type=int, default=512, help="of the batch, at most")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--reference", default=NAME, help="attn_implementation on one rank")
    parser.add_argument("--random", action="store_true", help="random weights, from config.json")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser


def _model(name: str) -> str:
    """transformers takes a path that does not exist for a name at the Hub."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}")
    return name


def _verify(options: argparse.Namespace, device: torch.device) -> Verification:
    import transformers

    register()
    torch.manual_seed(0)
    keywords = {"attn_implementation": NAME, "dtype": getattr(torch, options.dtype)}
    auto: Any = transformers.AutoModelForCausalLM
    if options.random:
        config = transformers.AutoConfig.from_pretrained(options.model)
        model = auto.from_config(config, **keywords)
    else:
        model = auto.from_pretrained(options.model, **keywords)
    documents = _documents(options, model.config.get_text_config().vocab_size)
    return verify(model.to(device), _packed(documents, device), reference=options.reference)


def _documents(options: argparse.Namespace, vocabulary: int) -> list[dict[str, list[int]]]:
    """Documents of --data, at most --tokens; or random ones."""
    if options.data is None:
        ids = [
            torch.randint(0, vocabulary, (n,), dtype=torch.int64, device="cpu").tolist()
            for n in RANDOM_DOCUMENTS
        ]
        documents = [{"input_ids": x} for x in ids]
    elif options.data.suffix == ".jsonl":
        documents = [json.loads(line) for line in options.data.read_text().splitlines() if line]
    else:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        texts = options.data.read_text().split("\n\n")
        documents = [{"input_ids": tokenizer(text).input_ids} for text in texts if text.strip()]
    if any("input_ids" not in document for document in documents):
        raise ValueError(f"{options.data}: each line needs input_ids, a list of token ids")
    left = options.tokens
    chosen: list[dict[str, list[int]]] = []
    for document in documents:
        cut = {name: list(document[name][:left]) for name in COLUMNS if name in document}
        if cut["input_ids"]:
            chosen.append(cut)
        left -= len(cut["input_ids"])
    if not chosen:
        source = options.data or "the random batch"
        raise ValueError(f"{source} has no documents within --tokens {options.tokens}")
    return chosen


def _packed(documents: list[dict[str, list[int]]], device: torch.device) -> dict[str, Any]:
    """One row of all documents; the first token of each has no label."""
    ids = [i for document in documents for i in document["input_ids"]]
    labels = [
        label
        for document in documents
        for label in (IGNORED, *document.get("labels", document["input_ids"])[1:])
    ]
    positions = [i for document in documents for i in range(len(document["input_ids"]))]
    named = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {
        name: torch.tensor([values], dtype=torch.int64, device=device)
        for name, values in named.items()
    }


def _report(found: Verification, options: argparse.Namespace) -> None:
    """A table of the gradients by parameter type, and the verdict; the figures as JSON."""
    width = max(map(len, found.errors))
    for name, error in found.errors.items():
        mark = "wrong" if name in found.wrong else ""
        print(f"{name:{width}}  {error:.1e} of {found.bounds[name]:.1e}  {mark}".rstrip())
    if options.json is not None:
        figures = {"model": options.model, "right": bool(found), **asdict(found)}
        options.json.write_text(json.dumps(figures, indent=1))
    print(found, flush=True)


if __name__ == "__main__":
    sys.exit(main())
