"""What the observatory demands of everything that lives on its thread beside the ledger."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from kvwatch.ledger.collector import Follower
from kvwatch.ledger.view import Sample


class Part(Protocol):
    """Something that lives on the observatory's thread beside the ledger: an exporter, the recorder, the stream."""

    @property
    def name(self) -> str:
        """Value of the label `subscriber` in its own metrics; one for each part."""
        ...

    @property
    def follower(self) -> Follower | None:
        """What the log's events are brought to; none if it needs none."""
        ...

    @property
    def period_seconds(self) -> float:
        """How often they are brought: `POLL_SECONDS` unless somebody acts on them sooner."""
        ...

    def open(self) -> None:
        """Take what may be refused (ports, files) on the caller's thread, before anything runs.

        Raises:
            ExporterError: with what was refused and the setting to change.
        """
        ...

    def samples(self) -> Iterable[Sample]:
        """Return its own metrics as they are now. Any thread."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Do what it does besides following, until `stop` is set."""
        ...

    def close(self) -> None:
        """Give back what `open` took; called once, on the observatory's thread, when nothing more will come."""
        ...
