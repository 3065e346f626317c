"""Reads wanted series off a Prometheus page, quickly: the page is read while latencies are measured."""

import math
import re
from collections.abc import Collection
from typing import NamedTuple

_SERIES = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


class Series(NamedTuple):
    """One sample."""

    labels: dict[str, str]
    value: float


Page = dict[str, list[Series]]
"""Series name -> its samples."""


def parse_page(text: str, wanted: Collection[str]) -> Page:
    """Return the wanted series of a page; lines that are no series, and values that are no numbers, are skipped.

    Args:
        text: A page in Prometheus' or OpenMetrics' text format.
        wanted: Names of series, `_total` included.
    """
    page: Page = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in wanted:
            continue
        match = _SERIES.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        labels = {key: _unescaped(raw) for key, raw in _LABEL.findall(match[2] or "")}
        page.setdefault(name, []).append(Series(labels, value))
    return page


def _unescaped(raw: str) -> str:
    return re.sub(r"\\.", lambda match: _ESCAPES.get(match[0], match[0]), raw) if "\\" in raw else raw
