"""Every rule speaks on its own sick run, and is silent on a healthy engine and on every other rule's sick run."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from sick_runs import HEALTHY_RUNS, SICK_RUNS, Looks

from kvwatch.doctor.pages import EngineKey, read_engines
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.insight.diagnosis import RULES, Diagnosis, Observation, Reading, diagnose
from kvwatch.ledger.view import View
from kvwatch.telemetry.clock import SystemClock

OWN_RUNS = [(rule, run) for rule, runs in SICK_RUNS.items() for run in runs]


@cache
def looks(run: Callable[[], Looks]) -> Looks:
    return run()


def judged(run: Callable[[], Looks]) -> Diagnosis:
    return diagnose(Observation(*looks(run)))


@pytest.mark.parametrize("run", HEALTHY_RUNS, ids=lambda run: run.__name__)
def test_all_rules_judge_a_healthy_engine_and_are_silent(run: Callable[[], Looks]) -> None:
    diagnosis = judged(run)

    assert diagnosis.findings == ()
    assert diagnosis.unjudged == ()
    assert diagnosis.bottleneck == ""


@pytest.mark.parametrize(("rule", "run"), OWN_RUNS, ids=[run.__name__ for _, run in OWN_RUNS])
def test_a_rule_speaks_on_its_own_sick_run_and_all_others_are_silent(rule: str, run: Callable[[], Looks]) -> None:
    diagnosis = judged(run)

    assert [each.rule for each in diagnosis.findings] == [rule]
    assert diagnosis.bottleneck == diagnosis.findings[0].sentence


@pytest.mark.parametrize(("rule", "run"), OWN_RUNS, ids=[run.__name__ for _, run in OWN_RUNS])
def test_a_finding_is_one_sentence_with_evidence_and_a_next_step(rule: str, run: Callable[[], Looks]) -> None:
    (finding,) = judged(run).findings

    assert finding.rule == rule
    assert finding.sentence.endswith(".")
    assert finding.sentence.count(". ") == 0
    assert finding.next_step.endswith(".")
    assert finding.evidence
    assert all(name.startswith("kvwatch_") for each in finding.evidence for name in each.metrics)


def test_every_rule_has_a_sick_run() -> None:
    of_sidecars = {rule.name for rule in RULES if rule.only_of_sidecars}

    assert SICK_RUNS.keys() == {rule.name for rule in RULES} - of_sidecars


@pytest.mark.parametrize(("rule", "run"), OWN_RUNS, ids=[run.__name__ for _, run in OWN_RUNS])
def test_the_metrics_page_leads_to_the_same_diagnosis_as_the_views(rule: str, run: Callable[[], Looks]) -> None:
    before, now = (_from_page(reading) for reading in looks(run))
    through_page = diagnose(Observation(before, now))

    assert [each.rule for each in through_page.findings] == [rule]
    assert through_page.findings[0].sentence == judged(run).findings[0].sentence


SOURCE = 'kvwatch_source_{}{{engine="a",dp_rank="0",model_name="m"}} {}\n'


@pytest.mark.parametrize(
    ("up", "complete", "drift", "speaks"),
    [(1, 1, 0, False), (0, 0, 0, True), (1, 0, 0, True), (1, 1, 7, True)],
    ids=["whole", "not reached", "history not known", "drifting"],
)
def test_a_sidecar_that_knows_too_little_of_its_engine_says_so(
    up: int, complete: int, drift: int, *, speaks: bool
) -> None:
    page = SOURCE.format("up", up) + SOURCE.format("complete", complete) + SOURCE.format("drift_blocks", drift)
    (samples,) = read_engines(page).values()

    diagnosis = diagnose(Observation(Reading(0.0, samples), Reading(10.0, samples)))

    assert [each.rule for each in diagnosis.findings] == (["source_incomplete"] if speaks else [])


def test_every_rule_is_explained_in_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")

    assert [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")] == [
        rule.name for rule in RULES
    ]


def _from_page(reading: Reading) -> Reading:
    view = View(0, 0, 0, (), (), ())
    collector = ViewCollector(lambda: view, [lambda: reading.samples], EngineIdentity("chat", 0, "tiny"))
    page = MetricsPage(collector, SystemClock()).render().body.decode()
    return Reading(reading.seconds, read_engines(page)[EngineKey("chat", 0, "tiny")])
