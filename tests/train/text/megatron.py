"""Files of token ids as Megatron writes them, and damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_megatron(path: Path, parts, ends, code=4, /, **changes) -> Path:
    """A ``.bin`` and its ``.idx``, field by field as Megatron's ``_IndexWriter`` writes them."""
    dtype = np.dtype(CODES.get(code, "<i4"))
    content = [np.array(ids, dtype).tobytes() for ids in parts]
    path.write_bytes(b"".join(content))
    sizes = np.cumsum([0, *map(len, content)])
    fields = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", code),
        "sequences": struct.pack("<Q", len(parts)),
        "documents": struct.pack("<Q", len(ends)),
        "lengths": np.array([len(ids) for ids in parts], np.int32).tobytes(),
        "pointers": sizes[:-1].astype(np.int64).tobytes(),
        "document_index": np.array(ends, np.int64).tobytes(),
    }
    path.with_suffix(".idx").write_bytes(b"".join((fields | changes).values()))
    return path
