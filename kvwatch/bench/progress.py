"""A progress bar on a terminal; nothing anywhere else."""

import sys
import time
from typing import TextIO

from kvwatch.bench.measurement import Watcher
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.target import Target

_WIDTH = 30
_INTERVAL_SECONDS = 0.1


class ProgressBar(Watcher):
    """Draws one line again and again. Event loop only."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Create a bar on a stream (default: stderr); it draws only on a terminal."""
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty()
        self._num_requests = 0
        self._num_ended = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._began = 0.0
        self._drawn = 0.0

    def prepared(self, target: Target, num_requests: int) -> None:
        """Draw the empty bar."""
        self._num_requests = num_requests
        self._began = time.monotonic()
        if self._is_shown:
            self._stream.write(f"{target.model} at {target.url} ({target.kind}), {target.limit_tokens} tokens\n")
            self._draw()

    def ended(self, outcome: RequestOutcome) -> None:
        """Move on."""
        self._num_ended += 1
        self._num_failed += outcome.status == "failed"
        self._num_tokens += outcome.num_output_tokens
        if self._is_shown and time.monotonic() - self._drawn >= _INTERVAL_SECONDS:
            self._draw()

    def close(self) -> None:
        """Draw the last state and end the line."""
        if self._is_shown and self._num_requests:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        filled = _WIDTH * self._num_ended // self._num_requests
        seconds = self._drawn - self._began
        rate = self._num_tokens / seconds if seconds > 0 else 0.0
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        self._stream.write(
            f"\r\033[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {self._num_ended}/{self._num_requests} "
            f"{seconds:.0f} s, {rate:.0f} tokens/s{failed}"
        )
        self._stream.flush()
