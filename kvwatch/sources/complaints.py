"""What went wrong with a source: counted by kind, logged at most once a minute."""

import time
from collections import Counter
from collections.abc import Iterable

import structlog

from kvwatch.wire.foreign import SKIP_KINDS

LOG_SECONDS = 60.0

MAX_LETTERS = 500
"""Of what an engine said, in a line."""

logger = structlog.get_logger(__name__)


class Complaints:
    """Counts and a log that cannot be flooded. One thread; reading counts on any.

    Args:
        about: Fields that every line has, such as the engine's name.
    """

    def __init__(self, **about: object) -> None:
        self._about = about
        self._logged: dict[str, float] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(SKIP_KINDS, 0))
        """Parts of messages that were left out, by kind."""

    def skipped(self, kinds: Iterable[str]) -> None:
        """Parts of a message were left out."""
        for kind in kinds:
            self.counts[kind] += 1
        self.warn("parts of an engine's KV events were left out", so_far=dict(+self.counts))

    def warn(self, message: str, **fields: object) -> None:
        """Log a line unless the same message was logged less than a minute ago."""
        now = time.monotonic()
        logged = self._logged.get(message)
        if logged is None or now - logged >= LOG_SECONDS:
            self._logged[message] = now
            cut = {name: text[:MAX_LETTERS] if isinstance(text, str) else text for name, text in fields.items()}
            logger.warning(message, **self._about, **cut)
