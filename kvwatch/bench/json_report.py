"""The report for machines. Its fields are those of `report.Report`, listed in docs/bench.md."""

import msgspec

from kvwatch.bench.report import Report


def json_report(report: Report) -> str:
    """Return the report as JSON; seconds have microseconds, ratios six digits."""
    plain = msgspec.to_builtins(report)
    return msgspec.json.format(msgspec.json.encode(_rounded(plain)), indent=2).decode() + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value
