"""Metrics over OTLP: the same series and values as on the metrics page, and nothing typed by hand."""

from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.sdk.resources import Resource
from otlp_receiver import attributes
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.otel.metrics import MetricsEncoder, Reading
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import MetricKind

Series = tuple[str, tuple[tuple[str, str], ...]]
BEGIN_NS, NOW_NS = 1_700_000_000_000_000_000, 1_700_000_060_000_000_000


def played() -> tuple[View, ScenarioClock]:
    """The view at the end of the scenario, in which every event happens."""
    clock = ScenarioClock()
    log = EventLog(4096, clock)
    cursor = log.subscribe("test")
    mirror = Mirror(clock, 0)
    mirror.load(opening_snapshot())
    play(log, clock)
    mirror.apply(cursor.read(4096))
    mirror.publish()
    return mirror.view, clock


def encoded(view: View, model_name: str = "tiny") -> list[Metric]:
    encoder = MetricsEncoder(Resource({"service.name": "kvwatch"}), EngineIdentity("e", 0, model_name), BEGIN_NS)
    samples: tuple[Sample | HistogramSample, ...] = (
        *view.gauges,
        *view.counters,
        *view.histograms,
    )
    reading = Reading(samples, (), NOW_NS)
    (resource,) = encode_metrics(encoder.encode(reading)).resource_metrics
    (scope,) = resource.scope_metrics
    return list(scope.metrics)


def as_prometheus(metrics: list[Metric]) -> Iterator[tuple[Series, float]]:
    """Name series as a collector does that writes OTLP to Prometheus: `.` becomes `_`, counters get `_total`."""
    for metric in metrics:
        name = metric.name.replace(".", "_")
        for point in metric.gauge.data_points:
            yield (name, _labels(point.attributes)), point.as_double or point.as_int
        for point in metric.sum.data_points:
            yield (f"{name}_total", _labels(point.attributes)), point.as_double or point.as_int
        for histogram in metric.histogram.data_points:
            labels = dict(_labels(histogram.attributes))
            yield (f"{name}_sum", _sorted(labels)), histogram.sum
            yield (f"{name}_count", _sorted(labels)), histogram.count
            running = 0
            bounds = [*histogram.explicit_bounds, float("inf")]
            for bound, count in zip(bounds, histogram.bucket_counts, strict=True):
                running += count
                yield (f"{name}_bucket", _sorted(labels | {"le": str(bound)})), running


def _labels(pairs: object) -> tuple[tuple[str, str], ...]:
    return _sorted(attributes(pairs))


def _sorted(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def test_every_series_of_the_metrics_page_goes_out_with_the_same_value() -> None:
    view, clock = played()
    page = MetricsPage(ViewCollector(lambda: view, [], EngineIdentity("e", 0, "tiny")), clock, 0).render().body
    expected = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if value}
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            expected[sample.name, _sorted(labels)] = sample.value

    found = dict(as_prometheus(encoded(view)))

    assert len(expected) > 300
    assert found == expected


def test_names_units_and_kinds_follow_from_the_catalogue() -> None:
    view, _ = played()
    found = {metric.name: metric for metric in encoded(view)}

    for declared in CATALOGUE:
        metric = found.get(f"kvwatch.{declared.name}")
        if metric is None:
            continue
        kind = {MetricKind.COUNTER: "sum", MetricKind.GAUGE: "gauge", MetricKind.HISTOGRAM: "histogram"}[declared.kind]
        assert metric.WhichOneof("data") == kind
        assert metric.description == declared.brief
        assert metric.unit in {"s", "By", "{token}", "{block}", "1", ""}
        assert (metric.unit == "1") is (declared.unit == "ratio"), "Prometheus would call a count a ratio"
    assert found["kvwatch.kv_blocks"].unit == "{block}"


def test_counters_are_cumulative_and_monotonic_and_say_since_when() -> None:
    view, _ = played()
    for metric in encoded(view):
        for point in metric.sum.data_points:
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            assert (point.start_time_unix_nano, point.time_unix_nano) == (BEGIN_NS, NOW_NS)
        for gauge in metric.gauge.data_points:
            assert (gauge.start_time_unix_nano, gauge.time_unix_nano) == (0, NOW_NS)
        for histogram in metric.histogram.data_points:
            assert histogram.start_time_unix_nano == BEGIN_NS
            assert not histogram.HasField("min")
            assert not histogram.HasField("max")


def test_a_hostile_model_name_goes_through() -> None:
    view, _ = played()
    metrics = encoded(view, '\ud800"\n\\' + "x" * 10_000)

    name = dict(_labels(metrics[0].gauge.data_points[0].attributes))["model_name"]
    assert name.startswith('?"\n\\x')
    assert len(name) == 256
