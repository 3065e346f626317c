"""Tables of a recording as Parquet files, one for each table that has rows. Needs pyarrow (extra `parquet`)."""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvwatch.errors import RecordingError
from kvwatch.recorder.tables import Row, Table, tables

ROWS_AT_ONCE = 4096
"""Rows that are kept before they are written."""


def write_parquet(rows: Iterable[tuple[str, Row]], folder: Path) -> dict[str, int]:
    """Write `FOLDER/TABLE.parquet`, replacing what is there; return the number of rows of each table.

    Raises:
        RecordingError: pyarrow is missing, or the folder cannot be written to.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise RecordingError("Parquet files need pyarrow; install it with: pip install 'kvwatch[parquet]'") from error
    known = tables()
    writers: dict[str, _Writer] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, row in rows:
                if name not in writers:
                    writers[name] = _Writer(pyarrow, known[name], folder)
                writers[name].add(row)
        finally:
            for writer in writers.values():
                writer.close()
    except OSError as error:
        raise RecordingError(f"{folder} cannot be written to ({error}); choose another folder") from error
    return {name: writer.num_rows for name, writer in writers.items()}


class _Writer:
    def __init__(self, pyarrow: ModuleType, table: Table, folder: Path) -> None:
        self._pyarrow = pyarrow
        self._schema = pyarrow.schema([(c.name, _arrow_type(pyarrow, c.type)) for c in table.columns])
        self._file = pyarrow.parquet.ParquetWriter(folder / f"{table.name}.parquet", self._schema)
        self._rows: list[Row] = []
        self.num_rows = 0

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self.num_rows += 1
        if len(self._rows) >= ROWS_AT_ONCE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            columns = [
                self._pyarrow.array([_pairs(value) for value in column], field.type)
                for column, field in zip(zip(*rows, strict=True), self._schema, strict=True)
            ]
            self._file.write_table(self._pyarrow.Table.from_arrays(columns, schema=self._schema))


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def _arrow_type(pyarrow: ModuleType, name: str) -> Any:
    """Return the Arrow type of a type of the lock file."""
    if name.startswith("optional<"):
        return _arrow_type(pyarrow, name[len("optional<") : -1])
    if name.startswith("list<"):
        return pyarrow.list_(_arrow_type(pyarrow, name[len("list<") : -1]))
    if name.startswith("map<"):
        key, value = name[len("map<") : -1].split(", ", 1)
        return pyarrow.map_(_arrow_type(pyarrow, key), _arrow_type(pyarrow, value))
    scalars = {
        "string": pyarrow.string, "bytes": pyarrow.binary, "int64": pyarrow.int64, "double": pyarrow.float64,
        "bool": pyarrow.bool_,
    }  # fmt: skip
    return scalars[name]()
