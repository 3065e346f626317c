"""The page that the scripted life of an engine gives: always the same bytes, for the golden file."""

from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.gateway import gateway_samples
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.exporters.prometheus.process import ProcessMetrics
from kvwatch.exporters.prometheus.writer import Format
from kvwatch.ledger.collector import Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.log import EventLog

IDENTITY = EngineIdentity("scripted", 0, "scripted-model")
ACCEPT: dict[Format, str] = {"text": "text/plain", "openmetrics": "application/openmetrics-text"}


def sample_page(form: Format) -> bytes:
    """Return the page after the scenario, in one of the two formats."""
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    mirror = Mirror(clock, view_interval_seconds=0)
    collector = Collector(log, lambda _: opening_snapshot(), mirror)
    collector.heal()
    play(log, clock)
    collector.finish()
    process = ProcessMetrics(lambda: [collector], lambda: {"observatory": 0.25, "render": 0.125})
    page = MetricsPage(
        ViewCollector(lambda: mirror.view, [process, lambda: gateway_samples(mirror.view)], IDENTITY), clock
    )
    return page.render(ACCEPT[form]).body
