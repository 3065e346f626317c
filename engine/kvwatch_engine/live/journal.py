"""What is live and not declared, in a file: the next start can say what ended with this process, however it ended.

The file changes nothing: the declared configuration always wins. Any thread.
"""

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from kvwatch.control import SettingValue

logger = structlog.get_logger(__name__)


class LiveJournal:
    """The file of one server."""

    def __init__(self, folder: Path, server: str) -> None:
        """Name the file after the server, as no other one on this machine is called; nothing is read or written yet."""
        stem = re.sub(r"[^\w.-]", "_", server)
        self._path = folder / f"live-{stem}.json"
        self._lock = threading.Lock()

    def take(self) -> dict[str, SettingValue]:
        """Return what was live when the last process ended, and forget it; say so in the log."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=dict[str, SettingValue])
        except (OSError, msgspec.MsgspecError):  # there is none, or it is not ours
            found = {}
        self.write({})
        if found:
            logger.warning(
                "settings that the last run had changed live are not in force: what is declared wins", live=found
            )
        return found

    def write(self, drifted: Mapping[str, SettingValue]) -> None:
        """Note what is live and not declared; a file that cannot be written is logged, and stops nobody."""
        with self._lock:
            try:
                if not drifted:
                    self._path.unlink(missing_ok=True)
                    return
                self._path.parent.mkdir(parents=True, exist_ok=True)
                part = self._path.with_suffix(".part")
                part.write_bytes(msgspec.json.encode(dict(drifted)))
                os.replace(part, self._path)
            except OSError as error:
                logger.warning("live settings could not be noted", error=type(error).__name__)
