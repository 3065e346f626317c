"""Asks a target for the diagnosis that it has made itself, or for two pages some seconds apart, judged here."""

import time
from collections.abc import Callable, Mapping

import httpx
import msgspec

from kvwatch.doctor.pages import EngineKey, Engines, UnreadablePageError, read_engines
from kvwatch.errors import KVWatchError
from kvwatch.insight.diagnosis import DiagnosisReport, EngineDiagnosis, Observation, Reading, diagnose
from kvwatch.ledger.view import HistogramSample, Sample

GET_SECONDS = 10.0
"""For a whole answer."""

MAX_ANSWER_BYTES = 16 << 20

METRICS_PATH = "/metrics"
DIAGNOSIS_PATH = "/admin/v1/diagnosis"

MAX_REFUSAL_BYTES = 4096
"""What is read of the words of whoever refuses."""

_REFUSED = {401, 403}

Samples = list[Sample | HistogramSample]


class _Problem(msgspec.Struct):
    """Of a problem document, what says why."""

    detail: str


class TargetUnreachableError(KVWatchError):
    """Nothing answers there, or not with metrics."""


class DiagnosisRefusedError(TargetUnreachableError):
    """The target tells its diagnosis only to whoever sends a token, and none or a wrong one was sent."""


class Asker:
    """One target over HTTP. One thread; `close` it at the end.

    Args:
        url: Root of the target, or its metrics page.
        sleep: Waits between two pages.
        token: Sent when it is asked for its diagnosis, and then only.
    """

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep, token: str | None = None) -> None:
        self._root = url.rstrip("/").removesuffix(METRICS_PATH).removesuffix(DIAGNOSIS_PATH).rstrip("/")
        self._sleep = sleep
        self._credentials = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Only what is asked for: no proxy from the environment, no redirect to elsewhere, nothing packed.
        self._client = httpx.Client(timeout=GET_SECONDS, trust_env=False, headers={"Accept-Encoding": "identity"})

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def own_diagnosis(self) -> DiagnosisReport | None:
        """Return the diagnosis that the target has made; None if it has looked once only.

        Raises:
            DiagnosisRefusedError: it wants a token for it, or another one.
            TargetUnreachableError: it offers none here.
        """
        text = self._get(DIAGNOSIS_PATH, self._credentials)
        try:
            report = msgspec.json.decode(text, type=DiagnosisReport)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TargetUnreachableError(f"{self._root + DIAGNOSIS_PATH} answers with something else") from error
        # An observatory that has just begun has looked once: then two pages from here are quicker.
        return report if report.engines and all(each.diagnosis for each in report.engines) else None

    def observe(self, seconds: float) -> DiagnosisReport:
        """Look twice, `seconds` apart, and judge what happened between.

        Raises:
            TargetUnreachableError: a page cannot be had, or says nothing of an engine.
        """
        before, since = self._look()
        self._sleep(seconds)
        now, until = self._look()
        return DiagnosisReport(
            tuple(_judged(key, before.get(key), since, samples, until) for key, samples in now.items())
        )

    def _look(self) -> tuple[Engines, float]:
        url = self._root + METRICS_PATH
        try:
            text = self._get(METRICS_PATH)
            return read_engines(text.decode("utf-8", "replace")), time.monotonic()
        except UnreadablePageError as error:
            raise TargetUnreachableError(f"{url}: {error}; is this the metrics listener of an engine?") from error

    def _get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        url, body, end = self._root + path, bytearray(), time.monotonic() + GET_SECONDS
        try:
            with self._client.stream("GET", url, headers=headers) as answer:
                if path == DIAGNOSIS_PATH and answer.status_code in _REFUSED:
                    raise DiagnosisRefusedError(f"{url} answers {answer.status_code}: {_detail(answer)}")
                if answer.status_code != httpx.codes.OK:
                    raise TargetUnreachableError(f"{url} answers with status {answer.status_code}")
                for piece in answer.iter_raw():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES or time.monotonic() > end:
                        raise TargetUnreachableError(
                            f"{url} answers with more than {MAX_ANSWER_BYTES} bytes or for more than {GET_SECONDS:g} s"
                        )
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise TargetUnreachableError(
                f"{url} cannot be reached ({type(error).__name__}); is the server up, and is this its address?"
            ) from error
        return bytes(body)


def _detail(answer: httpx.Response) -> str:
    """Return why a server refuses, in its own words if they are an admin API's."""
    body = next(answer.iter_raw(), b"")[:MAX_REFUSAL_BYTES]
    try:
        detail = msgspec.json.decode(body, type=_Problem).detail
    except (msgspec.MsgspecError, RecursionError):
        detail = "it wants a token"
    shown = "".join(letter for letter in detail if letter.isprintable())
    return f"{shown} (here: --token-file FILE)"


def _judged(key: EngineKey, before: Samples | None, since: float, now: Samples, until: float) -> EngineDiagnosis:
    diagnosis = None if before is None else diagnose(Observation(Reading(since, before), Reading(until, now)))
    return EngineDiagnosis(*key, diagnosis)
