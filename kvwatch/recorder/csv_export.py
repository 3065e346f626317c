"""Tables of a recording as CSV files, one for each table that has rows. Arrays and maps are written as JSON."""

import csv
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvwatch.errors import RecordingError
from kvwatch.recorder.show import plain
from kvwatch.recorder.tables import Row, tables


def write_csv(rows: Iterable[tuple[str, Row]], folder: Path) -> dict[str, int]:
    """Write `FOLDER/TABLE.csv`, replacing what is there; return the number of rows of each table.

    Raises:
        RecordingError: the folder cannot be written to.
    """
    known, counts = tables(), {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            writers: dict[str, Any] = {}
            for name, row in rows:
                if name not in writers:
                    file = files.enter_context((folder / f"{name}.csv").open("w", encoding="utf-8", newline=""))
                    writers[name] = csv.writer(file)
                    writers[name].writerow(column.name for column in known[name].columns)
                    counts[name] = 0
                writers[name].writerow([_cell(value) for value in row])
                counts[name] += 1
    except OSError as error:
        raise RecordingError(f"{folder} cannot be written to ({error.strerror}); choose another folder") from error
    return counts


def _cell(value: object) -> object:
    if isinstance(value, list | dict):
        return msgspec.json.encode(plain(value)).decode()
    return value.hex() if isinstance(value, bytes) else value
