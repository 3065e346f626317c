"""The report as one HTML file: no script, nothing from the network, every text of the target escaped."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvwatch.bench.errors import SavedRunError
from kvwatch.bench.json_report import json_report
from kvwatch.bench.measurement import Measurement
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.plots import Bar, Line, Point, bar_plot, cumulative, line_plot
from kvwatch.bench.report import Report
from kvwatch.bench.signals import Reading
from kvwatch.bench.statistics import Quantiles, percentile
from kvwatch.bench.text_report import text_report

_MAX_BARS = 400
_NUM_BINS = 60
_AXIS_FACTOR = 1.5
"""A distribution's axis ends at so many times its 99th percentile, or at its largest value."""
_STYLE = """
:root{--ink:#1c2126;--soft:#66707a;--line:#dfe3e7;--page:#fff;--card:#f6f7f9;--bad:#c62828;--good:#2e7d32;
--c0:#1f6fb4;--c1:#d9700a;--c2:#2c8f3c;--c3:#b8312f;--c4:#7c55b0;--c5:#80564a;--c6:#c75aa4;--c7:#6e7781;--c8:#96951b;
--c9:#1597a5;--c10:#3b4fb8;--c11:#8a6d00}
@media(prefers-color-scheme:dark){:root{--ink:#e3e7eb;--soft:#98a2ad;--line:#343b43;--page:#15191d;--card:#1d2228;
--bad:#ff8a80;--good:#81c784;--c0:#6db3f2;--c1:#ffac5c;--c2:#7bd48a;--c3:#ff8f8c;--c4:#bfa3ea;--c5:#c9a297;
--c6:#f29bd3;--c7:#aeb7c0;--c8:#d8d763;--c9:#63d3df;--c10:#9aa8ff;--c11:#e0c14d}}
body{margin:0 auto;max-width:1220px;padding:24px 16px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:22px}h2{font-size:17px;margin-top:30px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:10px}
.card{background:var(--card);border-radius:8px;padding:10px 12px}.card b{display:block;font-size:20px}
.card span,.note{color:var(--soft);font-size:13px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.bad{color:var(--bad)}.good{color:var(--good)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px}
figure{margin:0;background:var(--card);border-radius:8px;padding:10px}figcaption{font-weight:600}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--line)}
.line{fill:none;stroke:currentColor;stroke-width:1.3}.thick{stroke-width:3}
.bar{fill:currentColor}.wait{color:var(--line)}.serve{color:var(--c0)}.fail{color:var(--bad)}.gone{color:var(--c7)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;margin:4px 0 0;padding:0;font-size:12px}
.legend li::before{content:"\\25A0";margin-right:4px}
pre{overflow-x:auto;background:var(--card);padding:10px;border-radius:8px;font-size:12px}
""" + "".join(f".c{number}{{color:var(--c{number})}}" for number in range(12))


def write_html(path: Path, measurement: Measurement) -> None:
    """Write the report.

    Raises:
        SavedRunError: the file cannot be written.
    """
    try:
        path.write_text(html_report(measurement), encoding="utf-8")
    except OSError as error:
        raise SavedRunError(f"--html: {path} cannot be written ({error.strerror}); name another file") from error


def html_report(measurement: Measurement) -> str:
    """Return the report as a page."""
    report = measurement.report
    when = datetime.fromtimestamp(report.started_unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    title = f"{report.target.model} at {report.target.url}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>kvwatch bench: {escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="note">{when}, {report.duration_seconds:.1f} s, kvwatch '
        f"{escape(report.kvwatch_version)}{', interrupted' if report.is_interrupted else ''}. In an open loop "
        f"latencies count from the moment at which a request was due, not from when it was sent.</p>\n"
        f"{_cards(report)}{_assertions(report)}{_table(report)}{_errors(report)}"
        f'<h2>Plots</h2>\n<div class="plots">\n{_plots(measurement)}</div>\n'
        f"<h2>As text</h2>\n<pre>{escape(text_report(report))}</pre>\n"
        f"<details><summary>As JSON</summary><pre>{escape(json_report(report))}</pre></details>\n</body></html>\n"
    )


# ---------------------------------------------------------------- numbers


def _cards(report: Report) -> str:
    server = report.server
    cards: list[tuple[str, str | None]] = [
        ("answered", f"{report.requests.ok}"),
        ("failed", f"{report.requests.failed}"),
        ("tokens/s out", f"{report.throughput.output_tokens_per_second:.1f}"),
        ("first token p99", _seconds(report.latency.ttft)),
        ("between tokens p99", _seconds(report.latency.itl)),
        ("end to end p99", _seconds(report.latency.e2e)),
        ("most at once", f"{report.peak_concurrency}"),
    ]
    if server is not None:
        exact = "" if server.is_min_free_exact else " seen"
        cards += [
            ("preemptions", _number(server.preemptions)),
            ("recomputed tokens", _number(server.num_recomputed_tokens)),
            ("prefix cache hits", _percent(server.hit_ratio)),
            ("waste", _percent(server.waste_ratio)),
            (f"fewest free blocks{exact}", _number(server.min_free_blocks)),
        ]
    if report.reservation is not None:
        cards.append(("waste if each reserved the limit", _percent(report.reservation.limit_waste_ratio)))
    shown = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in cards if value
    )
    return f'<div class="cards">{shown}</div>\n'


def _assertions(report: Report) -> str:
    if not report.assertions:
        return ""
    rows = "".join(
        f"<tr><td>{escape(each.text)}</td><td>{'not known' if each.value is None else f'{each.value:g}'}</td>"
        f'<td class="{"good" if each.is_met else "bad"}">{"met" if each.is_met else "not met"}</td></tr>'
        for each in report.assertions
    )
    return f"<h2>Assertions</h2>\n<table><tr><th>must hold</th><th>was</th><th></th></tr>{rows}</table>\n"


def _table(report: Report) -> str:
    head = "".join(f"<th>{name} p50</th><th>p99</th>" for name in ("first token", "between", "end to end", "waiting"))
    rows = [
        ("all", report.requests, report.latency),
        *((n, s.requests, s.latency) for n, s in report.scenarios.items()),
    ]
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{counts.ok}</td><td>{counts.failed or ''}</td>"
        + "".join(_cells(each) for each in (latency.ttft, latency.itl, latency.e2e, latency.waiting))
        + "</tr>"
        for name, counts, latency in rows
    )
    return (
        '<h2>Latencies in seconds</h2>\n<div class="scroll"><table>'
        f"<tr><th>scenario</th><th>answered</th><th>failed</th>{head}</tr>{body}</table></div>\n"
    )


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = "".join(
        f'<tr><td class="bad">{escape(kind)}</td><td>{each.count}</td><td>{escape(each.example)}</td></tr>'
        for kind, each in report.errors.items()
    )
    head = "<tr><th>kind</th><th>count</th><th>first</th></tr>"
    return f'<h2>Errors</h2>\n<div class="scroll"><table>{head}{rows}</table></div>\n'


def _cells(distribution: Quantiles | None) -> str:
    if distribution is None:
        return "<td></td><td></td>"
    return f"<td>{distribution.p50:.3f}</td><td>{distribution.p99:.3f}</td>"


def _seconds(distribution: Quantiles | None) -> str | None:
    return None if distribution is None else f"{distribution.p99:.3f} s"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


# ---------------------------------------------------------------- plots


def _plots(measurement: Measurement) -> str:
    whole = [outcome for outcome in measurement.outcomes if outcome.status == "ok"]
    return "".join(
        (
            _distribution("Time to first token", [(o, [o.ttft_seconds]) for o in whole if o.ttft_seconds is not None]),
            _distribution("Time between tokens", [(outcome, outcome.gaps) for outcome in whole]),
            _distribution("End to end", [(outcome, [outcome.e2e_seconds]) for outcome in whole]),
            _timeline(measurement.outcomes),
            _throughput(measurement.outcomes, measurement.report.duration_seconds),
            _requests_at_server(measurement.readings),
            _blocks_at_server(measurement.readings),
        )
    )


def _distribution(title: str, samples: "Sequence[tuple[RequestOutcome, Sequence[float | None]]]") -> str:
    by_name: dict[str, list[float]] = {}
    for outcome, values in samples:
        by_name.setdefault(outcome.scenario, []).extend(value for value in values if value is not None)
    lines = [Line(name, cumulative(by_name[name]), colour + 1) for colour, name in enumerate(sorted(by_name))]
    everything = [value for values in by_name.values() for value in values]
    if len(lines) > 1:
        lines.insert(0, Line("all", cumulative(everything), 0, is_thick=True))
    # One straggler would squeeze everything else into a corner.
    most = _AXIS_FACTOR * percentile(sorted(everything), 99) if everything else 1.0
    return line_plot(f"{title}: which share was as fast", "seconds", "share", lines, most)


def _timeline(outcomes: Sequence[RequestOutcome]) -> str:
    ordered = sorted(outcomes, key=lambda outcome: (outcome.intended_seconds, outcome.index))
    shown = ordered[:: max(1, -(-len(ordered) // _MAX_BARS))]
    title = "Requests in the order of their start" + ("" if len(shown) == len(ordered) else " (a part of them)")
    legend = (("wait", "until the first token"), ("serve", "answer"), ("gone", "hung up"), ("fail", "failed"))
    return bar_plot(title, "seconds", "requests", [_bar(outcome) for outcome in shown], legend)


def _bar(outcome: RequestOutcome) -> Bar:
    css = {"ok": "serve", "hung_up": "gone"}.get(outcome.status, "fail")
    first = outcome.end_seconds if outcome.first_token_seconds is None else outcome.first_token_seconds
    words = f"request {outcome.index}, {outcome.scenario}: {outcome.error_kind or outcome.status}"
    # A request that never got a token is one piece in the colour of its end.
    pieces = (
        [(outcome.end_seconds, css)] if first == outcome.end_seconds else [(first, "wait"), (outcome.end_seconds, css)]
    )
    return Bar(outcome.intended_seconds, pieces, f"{words}, {outcome.e2e_seconds:.3f} s")


def _throughput(outcomes: Sequence[RequestOutcome], duration_seconds: float) -> str:
    width = max(duration_seconds, 1e-9) / _NUM_BINS
    bins = [0] * _NUM_BINS
    for outcome in outcomes:
        if outcome.first_token_seconds is None:
            continue
        moment = outcome.first_token_seconds
        for pause in (0.0, *outcome.pauses):
            moment += pause
            bins[min(_NUM_BINS - 1, max(0, int(moment / width)))] += 1
    points: list[Point] = [((place + 0.5) * width, count / width) for place, count in enumerate(bins)]
    return line_plot("Pieces of text per second", "seconds", "pieces/s", [Line("all", points, 0)] if any(bins) else [])


def _requests_at_server(readings: Sequence[Reading]) -> str:
    running = [(look.seconds, look.num_running) for look in readings if look.num_running is not None]
    waiting = [(look.seconds, look.num_waiting) for look in readings if look.num_waiting is not None]
    lines = [Line("running", running, 0), Line("waiting", waiting, 1)]
    return line_plot("Requests in the server, by its own metrics", "seconds", "requests", lines)


def _blocks_at_server(readings: Sequence[Reading]) -> str:
    free = [(look.seconds, look.free_blocks) for look in readings if look.free_blocks is not None]
    used = [(look.seconds, look.used_blocks) for look in readings if look.used_blocks is not None]
    lines = [Line("free", free, 2), Line("used", used, 3)]
    return line_plot("Blocks of the KV cache, by the server's own metrics", "seconds", "blocks", lines)
