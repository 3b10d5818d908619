"""Words in host memory that all ranks of one host map from one file of /dev/shm.

Containers of one host may have a /dev/shm each, where the path of a peer's file names nothing, or
another file. So a rank opens the file and never creates it, and looks in it for a number that only
its creator can have written. Pages that are not the peers' would let streams wait for ever.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DIRECTORY = "/dev/shm"
BYTES = 4  # of a word
NONCE_BYTES = 16


@contextmanager
def shared_file(words: int) -> Iterator[str]:
    """A new file of zeros, as a line for `map_words`. It is removed at the end: mappings stay.

    Raises OSError: there is no such directory, or no room in it.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    file, path = tempfile.mkstemp(prefix="ringfa3-", dir=DIRECTORY)
    try:
        try:
            size = words * BYTES
            os.posix_fallocate(file, 0, size + NONCE_BYTES)  # a full directory raises here: not
            os.pwrite(file, nonce, size)  # later, by SIGBUS, where a page is touched
        finally:
            os.close(file)
        yield json.dumps([path, nonce.hex()])
    finally:
        os.unlink(path)


def map_words(line: str, words: int) -> torch.Tensor:
    """The words of a `shared_file`, (words,) int32, which other processes write too.

    Raises OSError: this process sees no such file, or another one.
    """
    path, nonce = json.loads(line)
    size = words * BYTES
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        raise _not_shared(path, problem.strerror or type(problem).__name__) from None
    try:
        found = os.pread(file, NONCE_BYTES, size)
        if os.fstat(file).st_size != size + NONCE_BYTES or found.hex() != nonce:
            raise _not_shared(path, "another file has that name here")
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.int32)
    finally:
        os.close(file)


def _not_shared(path: str, why: str) -> OSError:
    return OSError(
        f"{path}, created by the group's first rank, cannot be opened ({why}): the ranks do not "
        f"share {DIRECTORY}: start their containers with --ipc=host and as one user, or use "
        "transport='nccl'"
    )
