"""Where a foreign engine publishes, one place for each data-parallel rank."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """What the subscription of one rank connects to."""

    dp_rank: int
    live: str
    """Address of the live events, as ZeroMQ takes it."""
    replay: str | None = None
    """Address of the replays, always connected to; none if the engine offers none."""
    topic: str = ""
    is_bound: bool = False
    """Whether the sidecar binds the live address, since the publisher connects to it."""
    may_be_bound: bool = False
    """Whether it is only by trying that can be told who binds the live address; see `who_binds`."""
