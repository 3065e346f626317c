"""What of the dashboards shows nothing, and for what reason that is as it should be."""

from collections.abc import Iterable, Iterator

from kvwatch_dashboards.preview.reading import Reading

OCCASIONAL: dict[str, str] = {}
"""Title of a panel -> why a run in which everything else happens leaves it empty."""


def silent(readings: Iterable[Reading]) -> Iterator[str]:
    """Yield each panel, or query of a panel, that brought nothing."""
    for reading in readings:
        if not reading.shown:
            yield reading.panel.title
        elif reading.silent:
            names = ", ".join(query.column or query.legend for query in reading.silent)
            yield f"{reading.panel.title}: {names}"
