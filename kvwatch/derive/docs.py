"""Tables for the documentation, and the markers between which they stand.

<!-- derived:metrics begin: run `make derive` -->
...
<!-- derived:metrics end -->
"""

from collections.abc import Iterable, Sequence

from kvwatch.derive.lock import wire_type
from kvwatch.derive.metrics import MetricSpec, full_name
from kvwatch.errors import SchemaError
from kvwatch.telemetry.schema import Cardinality, EventSpec, FieldSpec, MetricKind, label_values


def replace_section(page: str, section: str, content: str) -> str:
    """Return `page` with what is between the section's markers replaced by `content`.

    Raises:
        SchemaError: the page lacks the markers.
    """
    begin, end = f"<!-- derived:{section} begin: run `make derive` -->", f"<!-- derived:{section} end -->"
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise SchemaError(f"the page lacks the markers of section {section}; put back {begin} and {end}")
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(header), ["---"] * len(header), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def metrics_section(specs: Iterable[MetricSpec]) -> str:
    """Return the table of metrics and the table of histogram bounds."""
    all_specs = list(specs)
    rows = [
        (
            f"`{spec.name}`",
            str(spec.metric.kind),
            _unit(spec.metric.unit),
            ", ".join(f"`{name}`" for name in spec.metric.labels) or "-",
            spec.metric.brief,
            spec.metric.moves,
            spec.metric.aggregate,
            spec.metric.action or "-",
            ", ".join(f"`{name}`" for name in spec.fed_by) or "-",
        )
        for spec in all_specs
    ]
    header = ("metric", "kind", "unit", "labels", "meaning", "moves", "aggregate by", "what to do", "fed by")
    bounds = [
        (f"`{spec.name}`", ", ".join(f"{bound:g}" for bound in spec.metric.buckets))
        for spec in all_specs
        if spec.metric.kind is MetricKind.HISTOGRAM
    ]
    return f"{table(header, rows)}\n\n## Histogram bounds\n\n{table(('metric', 'upper bounds'), bounds)}"


def events_section(specs: Iterable[EventSpec]) -> str:
    """Return one chapter for each event, with the table of its fields."""
    return "\n\n".join(_event(spec) for spec in specs)


def _event(spec: EventSpec) -> str:
    rows = [
        (
            str(field.number),
            f"`{name}`",
            wire_type(spec.types[name]),
            _unit(field.unit) if field.cardinality is Cardinality.VALUE else "-",
            _use(spec, name, field),
            field.brief,
        )
        for name, field in sorted(spec.fields.items(), key=lambda item: item[1].number)
    ]
    feeds = ", ".join(f"`{name}`" for name in dict.fromkeys(full_name(feed.metric) for feed in spec.feeds))
    note = " ".join((spec.cls.__doc__ or "").split())
    return "\n\n".join(
        [
            f"### {spec.number} `{spec.name}`",
            f"{spec.brief} {note}",
            f"Feeds: {feeds or 'no metric'}.",
            table(("number", "field", "type", "unit", "use", "meaning"), rows),
        ]
    )


def _use(spec: EventSpec, name: str, field: FieldSpec) -> str:
    values = label_values(spec, name)
    return f"{field.cardinality}: {', '.join(values)}" if values else str(field.cardinality)


def _unit(unit: str) -> str:
    return {"1": "count", "": "-"}.get(unit, unit)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
