"""Series: what callers name cannot make more of them; what operators ask for is there; gateways find their signals."""

import shutil
import subprocess

import pytest
from naive_engine import ManualClock, NaiveEngine
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvwatch.errors import ConfigError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.gateway import gateway_samples
from kvwatch.exporters.prometheus.labels import MAX_CHARS, printable
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.exporters.prometheus.settings import MAX_NAMES, parse_names, parse_seconds, series_settings
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.series import SeriesSettings
from kvwatch.telemetry.buckets import TTFT_SECONDS
from kvwatch.telemetry.events import FirstToken, RequestFinished
from kvwatch.telemetry.events.request import FinishReason
from kvwatch.telemetry.log import EventLog

Series = tuple[str, tuple[tuple[str, str], ...]]

HOSTILE_NAMES = [
    'quote " and brace }', "back\\slash", "line\nend", "carriage\rreturn", "lone \ud800 surrogate", "nul \0",
    "a" * 10_000,
    "tab\t", "{injected=\"1\"} 5\nkvwatch_fake 1", "# HELP x", "\u202e right to left", "🦊" * 3_000, " ", "other",
]  # fmt: skip


class Stage:
    """A mirror, its page, and a log to append to."""

    def __init__(self, series: SeriesSettings | None = None, model_name: str = "tiny") -> None:
        self.clock = ManualClock()
        self.log = EventLog(8192, self.clock)
        self.engine = NaiveEngine(self.log)
        self.cursor = self.log.subscribe("test")
        self.mirror = Mirror(self.clock, 0, series=series)
        self.mirror.load(self.engine.snapshot())
        self._page = MetricsPage(
            ViewCollector(
                lambda: self.mirror.view,
                [lambda: gateway_samples(self.mirror.view)],
                EngineIdentity("x", 0, model_name),
            ),
            self.clock,
            0,
        )

    def finish(self, tenant: str, lora: str = "", reason: FinishReason = "stop") -> None:
        self.log.append(RequestFinished("r", reason, 4, 2, 0, 0, 1, 1, 1, 1, 3, tenant=tenant, lora=lora))

    def text(self, accept: str = "text/plain") -> str:
        self.mirror.apply(self.cursor.read(8192))
        self.mirror.publish()
        return self._page.render(accept).body.decode()

    def samples(self) -> dict[Series, float]:
        families = parse_text(self.text())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    def finished(self) -> dict[tuple[str, str], float]:
        """Requests that ended with `stop`, by tenant and adapter; those that are not 0."""
        found: dict[tuple[str, str], float] = {}
        for (name, labels), value in self.samples().items():
            of = dict(labels)
            if name == "kvwatch_requests_finished_total" and of["reason"] == "stop" and value:
                found[of.get("tenant", ""), of.get("lora", "")] = value
        return found


@pytest.mark.parametrize("series", [None, series_settings("gold,silver", "sql", {})])
def test_fifty_adapters_and_a_thousand_tenants_add_no_series(series: SeriesSettings | None) -> None:
    """llm-d-batch-gateway#202, vllm#11117: every tenant and adapter made series of its own."""
    stage = Stage(series)
    before = stage.samples().keys()

    for number in range(1000):
        stage.finish(f"tenant-{number}", f"adapter-{number % 50}")
    after = stage.samples()

    assert after.keys() == before
    assert len(after) <= 750
    assert stage.finished() == {("other", "other"): 1000}


def test_those_on_the_allow_lists_keep_their_names_and_all_others_are_other() -> None:
    stage = Stage(series_settings(" gold, silver ,", "sql", {}))
    for tenant, lora in [("gold", ""), ("gold", "sql"), ("silver", "x"), ("Gold", ""), ("", ""), ("", "sql")]:
        stage.finish(tenant, lora)

    assert stage.finished() == {
        ("gold", ""): 1, ("gold", "sql"): 1, ("silver", "other"): 1, ("other", ""): 1, ("", ""): 1, ("", "sql"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_arrive_as_they_are_and_add_nothing(name: str) -> None:
    stage = Stage(SeriesSettings(allowed={"tenant": frozenset([name])}), model_name=name)
    plain = Stage(SeriesSettings(allowed={"tenant": frozenset(["plain"])}))
    stage.finish(name, name)

    samples = stage.samples()

    expected_series = len(plain.samples()) - 5 * 2 * (name == "other")  # "other" is no name of its own
    assert len(samples) == expected_series
    assert {name for name, _ in samples} == {name for name, _ in plain.samples()}
    assert all(dict(labels)["model_name"] == printable(name) for _, labels in samples)
    assert stage.finished() == {(printable(name), "other"): 1}
    openmetrics = list(parse_openmetrics(stage.text("application/openmetrics-text")))  # type: ignore[no-untyped-call]
    assert sum(len(family.samples) for family in openmetrics) == len(samples)


def test_a_name_of_ten_kilobytes_does_not_make_the_page_large() -> None:
    assert len(Stage(model_name="m" * 10_000).text()) < 4 * len(Stage().text())


def test_long_names_that_begin_alike_stay_apart() -> None:
    first, second = printable("x" * 9_999 + "1"), printable("x" * 9_999 + "2")

    assert first != second
    assert len(first) == len(second) == MAX_CHARS


def test_promtool_accepts_hostile_names_allow_lists_and_thresholds() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    names = [name for name in HOSTILE_NAMES if "," not in name]
    stage = Stage(
        SeriesSettings(
            allowed={"tenant": frozenset(names)},
            thresholds=series_settings(None, None, {"--slo-ttft": "0.2,0.3", "--slo-e2e": "3"}).thresholds,
        ),
        model_name='hostile "\\\n',
    )
    for name in names:
        stage.finish(name)

    result = subprocess.run(
        [promtool, "check", "metrics"], input=stage.text().encode(), capture_output=True, timeout=30, check=False
    )

    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_thresholds_become_bounds_and_count_what_lies_below_them() -> None:
    stage = Stage(series_settings(None, None, {"--slo-ttft": "0.2, 0.03, 0.25"}))
    for ttft_ms in (29, 30, 31, 200, 201):
        stage.log.append(FirstToken("r", ttft_ms * 1_000_000))

    counts = {
        dict(labels)["le"]: value
        for (name, labels), value in stage.samples().items()
        if name == "kvwatch_time_to_first_token_seconds_bucket"
    }

    assert (counts["0.03"], counts["0.2"], counts["0.25"], counts["+Inf"]) == (2, 4, 5, 5)
    assert list(map(float, counts)) == sorted(map(float, counts))
    assert len(counts) == len(TTFT_SECONDS) + 2 + 1, "0.25 was a bound before; the last is +Inf"


def test_thresholds_touch_no_other_histogram() -> None:
    changed = Stage(series_settings(None, None, {"--slo-ttft": "0.2"})).samples().keys() - Stage().samples().keys()

    assert {(name, dict(labels)["le"]) for name, labels in changed} == {
        ("kvwatch_time_to_first_token_seconds_bucket", "0.2")
    }


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", "1;2", "0.2,,x", "1e300"])
def test_a_threshold_that_is_no_time_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--slo-ttft: .* is no time in seconds; write for instance"):
        parse_seconds(text, "--slo-ttft")


def test_too_many_names_or_thresholds_are_refused() -> None:
    with pytest.raises(ConfigError, match="--metrics-tenants: 21 names"):
        parse_names(",".join(f"t{number}" for number in range(MAX_NAMES + 1)), "--metrics-tenants")
    with pytest.raises(ConfigError, match="--slo-itl: 9 thresholds"):
        parse_seconds(",".join(f"0.0{number}" for number in range(1, 10)), "--slo-itl")


def test_no_series_is_told_twice_or_names_a_process_or_a_value_that_is_none() -> None:
    """vllm#28792, #18053, #28924, #40112: a series for each pid, double counts, the label "None", names that clash."""
    stage = Stage(series_settings("gold", None, {}))
    stage.engine.step([(0, 0), (0, 1), (11, 3)])
    stage.finish("gold")
    stage.text()
    clock, identity = stage.clock, EngineIdentity("x", 0, "tiny")
    page = MetricsPage(ViewCollector(lambda: stage.mirror.view, [], identity, has_vllm_aliases=True), clock, 0)

    families = list(parse_text(page.render().body.decode()))

    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    samples = [(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples]
    assert len(set(samples)) == len(samples)
    labels = {pair for _, pairs in samples for pair in pairs}
    assert {"pid", "job", "instance", "pod", "host", "hostname"}.isdisjoint(name for name, _ in labels)
    assert {"None", "none", "null", "nan"}.isdisjoint(value for _, value in labels)


def test_a_gateway_finds_one_series_for_each_of_its_signals() -> None:
    """aibrix#2735: a router read the first of several series under one name."""
    stage = Stage()
    seen_running = seen_waiting = 0
    for number in range(40):
        stage.clock.advance(0.01)
        stage.engine.step([(0, number), (number % 13, number), (11, number)])

        samples = stage.samples()

        signals = {name: value for (name, _), value in samples.items() if name.startswith("kvwatch_gateway_")}
        assert len([name for name, _ in samples if name.startswith("kvwatch_gateway_")]) == 4
        assert signals["kvwatch_gateway_queued_requests"] == len(stage.engine.waiting)
        assert signals["kvwatch_gateway_running_requests"] == len(stage.engine.running)
        used, capacity = len(stage.engine.used()), stage.engine.num_blocks - 1
        assert signals["kvwatch_gateway_kv_utilization_ratio"] == used / capacity
        (config,) = (dict(labels) for name, labels in samples if name == "kvwatch_gateway_cache_config_info")
        assert (config["block_size"], config["num_gpu_blocks"]) == ("4", str(capacity))
        seen_running += len(stage.engine.running)
        seen_waiting += len(stage.engine.waiting)
    assert seen_running
    assert seen_waiting
