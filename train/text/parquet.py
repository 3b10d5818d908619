"""The rows of a ``.parquet``: one column of texts or of token ids, or conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.config import ConfigError
from train.sections.data import PLAIN
from train.text.chat import FIELDS, OPTIONAL, other_formats, record_text
from train.text.reading import At, Reading, Rows

ROWS_AT_A_TIME = 1024
STREAMED = {  # the defaults hold a whole column of a row group in memory
    "buffer_size": 2**20,
    "pre_buffer": False,
    "page_checksum_verification": True,
}


def parquet_rows(path: Path, reading: Reading, at: At) -> Rows:
    """The rows of one column, row group by row group, a few rows in memory at a time."""
    import pyarrow
    from pyarrow import parquet

    row, group, size = 0, 0, path.stat().st_size

    def position() -> str:
        return f"{path}:{row + 1} (row group {group})"

    try:
        with reading.readable(position), parquet.ParquetFile(path, **STREAMED) as file:
            ids, columns = False, [reading.text_field]
            records, key = reading.data_format != PLAIN, f"{reading.section}.format"
            if records:
                columns = _columns(file.schema_arrow.names, reading.data_format, key, path)
            else:
                ids = _holds_ids(file.schema_arrow, reading, path)
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(ROWS_AT_A_TIME, [group], columns=columns):
                    for value in batch.to_struct_array() if records else batch.column(0):
                        content = value.as_py() or ""
                        if ids and content:
                            content = value.values.to_numpy(zero_copy_only=False)
                        if records:
                            content = record_text(content, reading.data_format, key, position())
                        row += 1
                        yield row, content
                    at(size * row // max(1, file.metadata.num_rows))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{reading.path_key}: {position()} cannot be read: {error}; {reading.repair}"
        ) from None


def _columns(names: list[str], data_format: str, key: str, path: Path) -> list[str]:
    """The columns of a format; ``ConfigError``, which names all columns, if one is missing."""
    if not {*FIELDS[data_format]} <= {*names}:
        record_text(dict.fromkeys(names), data_format, key, str(path))
    return [name for name in (*FIELDS[data_format], *OPTIONAL) if name in names]


def _holds_ids(schema: Any, reading: Reading, path: Path) -> bool:
    """Whether the column has lists of integers; ``ConfigError`` unless it has them or strings."""
    from pyarrow import types

    index = schema.get_field_index(reading.text_field)
    dtype = schema.field(index).type if index >= 0 else None
    if dtype is not None and types.is_dictionary(dtype):
        dtype = dtype.value_type
    if dtype is not None and (types.is_string(dtype) or types.is_large_string(dtype)):
        return False
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    of_lists = dtype is not None and any(is_type(dtype) for is_type in lists)
    if of_lists and types.is_integer(dtype.value_type):
        return True
    found = ", ".join(f"{field.name} ({field.type})" for field in schema)
    raise ConfigError(
        f"{reading.section}.text_field={reading.text_field}: {path} has no such column of strings "
        f"or lists of token ids; it has: {found}"
        f"{other_formats(f'{reading.section}.format', schema.names)}"
    )
