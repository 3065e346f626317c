"""What the observatory demands of everything that lives on its thread beside the ledger."""

import asyncio
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from kvwatch.ledger.collector import Follower
from kvwatch.ledger.view import Sample


class Part(Protocol):
    """Something that lives on the observatory's thread beside the ledger: an exporter, the recorder, the stream."""

    @property
    def name(self) -> str:
        """Value of the label `subscriber` in its own metrics; one for each part."""
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


@runtime_checkable
class FollowingPart(Part, Protocol):
    """A part that is brought what happens in the log."""

    @property
    def follower(self) -> Follower:
        """What the log's events are brought to."""
        ...

    @property
    def period_seconds(self) -> float:
        """How often they are brought: `POLL_SECONDS` unless somebody acts on them sooner."""
        ...
