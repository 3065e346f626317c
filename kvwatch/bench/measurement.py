"""One run from its options to its report."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from kvwatch import __version__
from kvwatch.bench.arrivals import poisson
from kvwatch.bench.client import Client, make_http
from kvwatch.bench.connections import Connections
from kvwatch.bench.dialect import Dialect
from kvwatch.bench.discovery import discover
from kvwatch.bench.options import DEFAULT_CONCURRENCY, Options
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.plan import plan_requests
from kvwatch.bench.preparation import lone_answers, measure_text, reset_cache, variations, warm_up
from kvwatch.bench.report import (
    LoadReport,
    Report,
    TargetReport,
    client_report,
    count_errors,
    count_requests,
    isolation_report,
    latencies,
    scenario_reports,
    threshold_of,
    throughput,
    unfairness,
)
from kvwatch.bench.reservation import reservation_report
from kvwatch.bench.runner import Run
from kvwatch.bench.sampler import Sampler
from kvwatch.bench.saved import SavedRun, compare, read_run, saved_requests
from kvwatch.bench.scenarios import RESETTING, TRACE, RequestSpec, Scale
from kvwatch.bench.server_side import ServerSide, server_side
from kvwatch.bench.signals import Reading
from kvwatch.bench.target import Target
from kvwatch.bench.trace import TraceRequests, read_trace
from kvwatch.bench.values import report_values

SETTLE_SECONDS = 3.0
"""A page of metrics shows what happened so long ago: it is renewed once a second, and kvwatch looks at its log once a
second; the rest is room for a busy machine."""
PRESSURE_FACTOR = 1.5
"""`pressure` requests, one for each client, would fill the pool so many times."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A run and everything that is kept of it."""

    report: Report
    outcomes: list[RequestOutcome]
    readings: list[Reading]
    scale: Scale


class Watcher:
    """Is told how a run goes on; this one does not listen."""

    def prepared(self, target: Target, num_requests: int) -> None:
        """Know what is measured, just before the first request is sent."""

    def ended(self, outcome: RequestOutcome) -> None:
        """Know that a request ended."""


async def measure(options: Options, watcher: Watcher) -> Measurement:
    """Measure a target.

    Raises:
        TargetUnreachable: it does not answer as an OpenAI-compatible API.
        ConfigError: it does not serve the wanted model, or a file is wrong.
        SavedRunError: the run to compare with cannot be read.
    """
    earlier = read_run(options.compare) if options.compare else None
    async with make_http(options.api_key, options.ca_file) as http:
        target = await discover(http, options.wanted)
        dialect = Dialect(target.kind, target.model, target.endpoint)
        async with Connections(target.url, options.api_key, options.ca_file) as connections:
            client = Client(connections, dialect, options.request_timeout_seconds, options.max_retries)
            scale = await _scale(options, target, client, dialect, earlier)
            return await _Measuring(options, watcher, http, target, client, scale, earlier).run()


@dataclass(slots=True)
class _Measuring:
    """A run whose target is known."""

    _options: Options
    _watcher: Watcher
    _http: httpx.AsyncClient
    _target: Target
    _client: Client
    _scale: Scale
    _earlier: SavedRun | None
    _sampler: Sampler = field(init=False)
    _specs: Sequence[RequestSpec] = field(init=False)
    _num_cut: int = field(init=False)

    def __post_init__(self) -> None:
        self._sampler = Sampler(self._http, self._target)
        self._specs, self._num_cut = _requests(self._options, self._scale)

    async def run(self) -> Measurement:
        reset, alone = await self._prepare()
        before = await self._settled(0.0)
        self._watcher.prepared(self._target, len(self._specs))
        run = Run(
            self._client, self._specs, self._options.concurrency, self._options.max_seconds, self._watcher.ended
        )  # fmt: skip
        self._client.peak_in_flight = 0
        started, cpu = time.time(), time.process_time()
        await run.run([self._sampler.run])
        cpu_seconds = time.process_time() - cpu
        after = await self._settled(run.duration_seconds)
        readings, failures = self._sampler.readings, self._sampler.num_failures
        report = self._report(run, server_side(before, readings, after, failures), alone, reset, started, cpu_seconds)
        return Measurement(report=report, outcomes=run.outcomes, readings=readings, scale=self._scale)

    async def _prepare(self) -> tuple[str, dict[str, list[str]]]:
        """Do what is asked before the run and not measured; return what became of the reset, and lone answers."""
        if self._options.trace is not None:  # has none of the scenarios, and its prompts are better not all made now
            return "not needed", {}
        reset = "not needed"
        if RESETTING & self._options.weights.keys():
            reset = await reset_cache(self._http, self._target, self._options.reset_token)
        alone = await lone_answers(self._client, self._specs)
        await warm_up(self._client, self._specs)
        return reset, alone

    async def _settled(self, seconds: float) -> Reading | None:
        """Return a reading that shows everything up to now."""
        if self._target.metrics_url is None:
            return None
        await asyncio.sleep(SETTLE_SECONDS)
        return await self._sampler.take(seconds) or await self._sampler.take(seconds)

    def _report(
        self,
        run: Run,
        server: ServerSide | None,
        alone: Mapping[str, list[str]],
        reset: str,
        started: float,
        cpu_seconds: float,
    ) -> Report:
        outcomes, earlier = run.outcomes, self._earlier
        threshold = threshold_of(outcomes)
        planned = {TRACE: len(self._specs)} if self._options.trace else Counter(each.scenario for each in self._specs)
        report = Report(
            kvwatch_version=__version__,
            started_unix_seconds=started,
            duration_seconds=run.duration_seconds,
            is_interrupted=run.is_interrupted,
            target=self._target_report(),
            load=self._load_report(reset),
            requests=count_requests(outcomes, len(self._specs)),
            errors=count_errors(outcomes),
            peak_concurrency=self._client.peak_in_flight,
            throughput=throughput(outcomes, run.duration_seconds),
            latency=latencies(outcomes, threshold),
            stall_threshold_seconds=threshold,
            worst_wait_ratio=unfairness(outcomes, threshold),
            scenarios=scenario_reports(outcomes, planned, threshold),
            server=server,
            reservation=reservation_report(outcomes, self._scale.limit_tokens),
            isolation=isolation_report(outcomes, alone, [each.name for each in self._scale.variations]),
            comparison=compare(outcomes, earlier, str(self._options.compare)) if earlier else None,
            client=client_report(run.lags, cpu_seconds, run.duration_seconds),
        )
        values = report_values(report)
        results = [assertion.check(values) for assertion in self._options.assertions]
        return msgspec.structs.replace(report, assertions=results)

    def _target_report(self) -> TargetReport:
        target = self._target
        return TargetReport(
            url=target.url,
            kind=target.kind,
            model=target.model,
            endpoint=target.endpoint,
            max_model_len=target.max_model_len,
            token_capacity=target.token_capacity,
            limit_tokens=self._scale.limit_tokens,
            is_limit_assumed=self._earlier is None and self._options.limit_tokens is None and not target.has_limit,
            tokens_per_word=self._scale.text.tokens_per_word,
        )

    def _load_report(self, reset: str) -> LoadReport:
        options = self._options
        arrival = "trace" if options.trace else "closed" if options.rate is None else "poisson"
        return LoadReport(
            weights=options.weights,
            arrival=arrival,
            concurrency=options.concurrency,
            rate=options.rate,
            seed=options.seed,
            num_planned=len(self._specs),
            num_cut=self._num_cut,
            reset=reset,
        )


def saved_run(options: Options, measurement: Measurement) -> SavedRun:
    """Return a run in the form in which it is kept."""
    requests = saved_requests(
        measurement.outcomes, measurement.report.stall_threshold_seconds, has_texts=options.has_texts
    )
    return SavedRun(seed=options.seed, scale=measurement.scale, requests=requests)


async def _scale(options: Options, target: Target, client: Client, dialect: Dialect, earlier: SavedRun | None) -> Scale:
    """Return what lengths are scaled to: as in the run to compare with, or what the target says."""
    if earlier is not None:
        return earlier.scale
    limit = options.limit_tokens or target.limit_tokens
    pool = target.token_capacity
    clients = options.concurrency or DEFAULT_CONCURRENCY
    return Scale(
        limit_tokens=limit,
        pressure_tokens=limit // 2 if pool is None else max(64, int(PRESSURE_FACTOR * pool / clients)),
        text=await measure_text(client, limit),
        variations=variations(target.models, has_salt=dialect.has_salt, has_images=options.has_images),
    )


def _requests(options: Options, scale: Scale) -> tuple[Sequence[RequestSpec], int]:
    """Return the requests, and how many of them had to be cut."""
    if options.trace is not None:
        lines = read_trace(options.trace, options.num_requests)
        requests = TraceRequests(
            lines, options.seed, options.trace_speed, options.trace_scale, scale.limit_tokens, scale.text
        )  # fmt: skip
        return requests, requests.num_cut
    specs = plan_requests(options.weights, options.num_requests, options.seed, scale)
    return (specs if options.rate is None else poisson(specs, options.rate, options.seed)), 0
