"""Reads tables of text, one document per row: .parquet files, and the .arrow files of Hugging Face
`datasets`. Reads one group of rows at a time, with pyarrow (extra `datasets`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyruntime.train.errors import ConfigError

SUFFIXES = {".parquet", ".arrow"}


def groups(path: Path) -> int:
    """Returns the number of row groups. Raises ConfigError if it is no table, or pyarrow is missing;
    OSError."""
    with _opened(path) as table:
        return table.num_row_groups if hasattr(table, "num_row_groups") else 1


def rows(path: Path, numbers: range, column: str) -> Iterator[tuple[int, str | None]]:
    """Yields number (from 0) and text of every row of some groups; the text of a null is None. Raises
    ConfigError if the column is missing or holds no text; OSError."""
    with _opened(path) as table:
        _check_column(path, _schema(table), column)
        row, batches = _batches(table, numbers, [column])
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


def columns(path: Path) -> list[str]:
    """Returns the names of its columns. Raises ConfigError if it is no table, or pyarrow is missing;
    OSError."""
    with _opened(path) as table:
        return list(_schema(table).names)


def objects(path: Path, numbers: range, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields number (from 0) and content of every row of some groups: the columns among `names` that are not
    null. Raises ConfigError; OSError."""
    with _opened(path) as table:
        wanted = [name for name in _schema(table).names if name in names]
        row, batches = _batches(table, numbers, wanted)
        for batch in batches:
            for content in batch.select(wanted).to_pylist():
                yield row, {name: value for name, value in content.items() if value is not None}
                row += 1


def _schema(table: Any) -> Any:
    return table.schema_arrow if hasattr(table, "schema_arrow") else table.schema


def _batches(table: Any, numbers: range, names: list[str]) -> tuple[int, Iterator[Any]]:
    """Returns the number of the first row, and the batches of rows."""
    if not hasattr(table, "num_row_groups"):
        return 0, iter(table)
    row = sum(table.metadata.row_group(group).num_rows for group in range(numbers.start))
    return row, table.iter_batches(batch_size=1024, row_groups=list(numbers), columns=names)


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
