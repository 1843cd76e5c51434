"""Tables of text, a document a row: .parquet files, and the .arrow files that Hugging Face `datasets` keeps.
They are read through pyarrow, a group of rows at a time (the extra `datasets` brings it)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyruntime.train.errors import ConfigError

SUFFIXES = {".parquet", ".arrow"}


def groups(path: Path) -> int:
    """Groups of rows in a file. Raises ConfigError where it is no table, or pyarrow is missing; OSError."""
    with _opened(path) as table:
        return table.num_row_groups if hasattr(table, "num_row_groups") else 1


def rows(path: Path, numbers: range, column: str) -> Iterator[tuple[int, str | None]]:
    """Number (from 0) and text of every row of some groups; None where a row holds null. Raises ConfigError
    where the column is not there or holds no text; OSError."""
    with _opened(path) as table:
        schema = table.schema_arrow if hasattr(table, "schema_arrow") else table.schema
        _check_column(path, schema, column)
        row = 0
        if hasattr(table, "num_row_groups"):
            row = sum(table.metadata.row_group(group).num_rows for group in range(numbers.start))
            batches = table.iter_batches(batch_size=1024, row_groups=list(numbers), columns=[column])
        else:
            batches = iter(table)
        for batch in batches:
            for value in batch.column(column):
                try:
                    text = value.as_py()
                except UnicodeDecodeError:
                    raise ConfigError(
                        f"data.paths: {path}, row {row} of its {column} is no text in UTF-8."
                    ) from None
                yield row, text
                row += 1


def _check_column(path: Path, schema: Any, column: str) -> None:
    import pyarrow

    if column not in schema.names:
        raise ConfigError(
            f"data.paths: {path} has no column {column}, but {', '.join(schema.names)}; name one in "
            "data.field."
        )
    if schema.names.count(column) > 1:
        raise ConfigError(
            f"data.paths: {path} has {schema.names.count(column)} columns {column}; rename all but one of "
            "them, or name another in data.field."
        )
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ConfigError(f"data.paths: the column {column} of {path} holds {kind} and no text.")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"data.paths: {path} is read through pyarrow, which is not installed; install "
            "pyruntime[datasets]."
        ) from error
    try:
        if path.suffix.lower() == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                yield table
        else:
            with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as table:
                yield table
    except pyarrow.ArrowException as error:
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ConfigError(f"data.paths: {path} is no table that pyarrow reads: {first}.") from error
