"""Events of a foreign engine's own event stream: what is known of its cache becomes void, or whole. Numbers 90 to 99.

A vLLM or an SGLang tells which hashes became resident and which are gone. That becomes `BlocksStored`, `BlocksEvicted`
and `CacheCleared` without block ids; these events say how far what follows from them can be trusted.
"""

from typing import Annotated, Literal

from kvwatch.telemetry.schema import Event, event, label, value


@event(90, "source.reset", "What was known of a foreign engine's cache is void: nothing is known to be resident.")
class SourceReset(Event):
    """The engine restarted, or numbers its batches anew."""

    reason: Annotated[Literal["restart", "sequence", "unknown"], label(1, "How it was noticed.")]
    is_complete: Annotated[bool, value(2, "Whether the history is known to be whole from here on.", "1")]


@event(91, "source.gap", "Batches of a foreign engine's events were lost and could not be replayed.")
class SourceGap(Event):
    """What is known to be resident stays, but may be wrong from here on: the history is not whole any more."""

    num_batches: Annotated[int, value(1, "Batches lost.", "1")]


@event(92, "source.completeness", "The history of a foreign engine is known to be whole, or no longer.")
class SourceCompleteness(Event):
    """Whole means known from a moment at which the engine's cache was empty."""

    is_complete: Annotated[bool, value(1, "Whether it is whole.", "1")]
