"""Values as Grafana writes them, for the units that panels have. Knows nothing of panels."""

from collections.abc import Callable, Sequence

_DECIMAL = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " K"), (1.0, ""))
_BINARY = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
_BYTE_RATES = ((1e9, " GB/s"), (1e6, " MB/s"), (1e3, " KB/s"), (1.0, " B/s"))
_TIMES = ((86400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))


def _scaled(value: float, scale: Sequence[tuple[float, str]]) -> str:
    for size, suffix in scale:
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    size, suffix = scale[-1]
    return f"{value / size:.3g}{suffix}"


def _percent(value: float) -> str:
    return f"{value:.3g}%"


def _seconds(value: float) -> str:
    return "0 s" if value == 0 else _scaled(value, _TIMES)


_FORMATS: dict[str, Callable[[float], str]] = {
    "short": lambda value: _scaled(value, _DECIMAL),
    "percentunit": lambda value: _percent(100 * value),
    "percent": _percent,
    "s": _seconds,
    "bytes": lambda value: _scaled(value, _BINARY),
    "Bps": lambda value: _scaled(value, _BYTE_RATES),
    "cps": lambda value: _scaled(value, _DECIMAL) + " c/s",
    "reqps": lambda value: _scaled(value, _DECIMAL) + " req/s",
}


def written(value: float, unit: str) -> str:
    """Return a value with its unit.

    Raises:
        KeyError: no panel has that unit so far; add it here.
    """
    return _FORMATS[unit](value)
