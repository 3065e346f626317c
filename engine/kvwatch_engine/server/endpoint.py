"""The way of a generation request: body, plan, engine, answer."""

import asyncio
from contextlib import ExitStack
from dataclasses import replace

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvwatch_engine.contracts.errors import RequestRejected
from kvwatch_engine.contracts.request import RequestOrigin
from kvwatch_engine.server.access import caller_of
from kvwatch_engine.server.api_keys import Caller
from kvwatch_engine.server.bodies import read_body
from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.drain import Drain
from kvwatch_engine.server.errors import ApiError
from kvwatch_engine.server.generation import Generations, Run
from kvwatch_engine.server.planning import Incoming, Planner
from kvwatch_engine.server.protocol.reply import Usage
from kvwatch_engine.server.request_log import RequestRecord, record_of
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.shapes import Plan
from kvwatch_engine.server.streaming import StreamWriter, stream_answer

TENANT_HEADER = "x-kvwatch-tenant"
"""Says on whose behalf a request runs. Telemetry only, and of no account where API keys say it: see `api_keys.py`."""
MAX_TENANT_CHARS = 128


class GenerationEndpoint:
    """ASGI application of one generation route.

    An application rather than a function: the answer is sent while the job is open, so that the job is closed, and
    the engine freed, at the moment the answer is complete or the client gone.
    """

    def __init__(self, planner: Planner, generations: Generations, drain: Drain, settings: ServerSettings) -> None:
        self._planner = planner
        self._generations = generations
        self._drain = drain
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            RequestRejected, ApiError: answered by the application's exception handlers; nothing was sent yet.
            ClientGone: there is nobody to answer.
        """
        record = record_of(scope)
        caller = caller_of(scope)
        origin = self._origin(record, Headers(scope=scope), caller)
        with ExitStack() as running:
            try:
                body = await self._drain.unless_draining(read_body(Request(scope, receive), self._settings))
                plan = await self._planner.plan(Incoming(body, caller))
                running.enter_context(self._drain.running())
            except (RequestRejected, ApiError) as error:
                self._generations.note_rejection(record.request_id, error, origin, round(record.begin * 1e9))
                raise
            record.answer_id, record.is_stream = plan.job.id, plan.is_stream
            salt = caller.tenant_salt if caller is not None else ""
            adapter = "" if plan.job.adapter is None else plan.job.adapter.name
            told = replace(origin, is_stream=plan.is_stream, adapter=adapter)
            job = replace(plan.job, origin=told, tenant_salt=salt)
            async with self._generations.start(job, receive) as run:
                try:
                    if plan.is_stream:
                        await stream_answer(plan, run, record, StreamWriter(scope, send, self._settings.write_seconds))
                        return
                    choices = await _collect(run, record)
                finally:
                    record.usage = run.usage()
            if any(choice.prompt for choice in choices):  # a long prompt's take a while to write
                answer = await asyncio.to_thread(_written, plan, choices, run.usage())
            else:
                answer = _written(plan, choices, run.usage())
            await Response(answer, media_type="application/json")(scope, receive, send)

    def _origin(self, record: RequestRecord, headers: Headers, caller: Caller | None) -> RequestOrigin:
        tenant = caller.tenant if caller is not None else _utf8(headers.get(TENANT_HEADER, ""))[:MAX_TENANT_CHARS]
        return RequestOrigin(
            operation=self._planner.operation,
            trace_parent=record.trace.to_trace_parent(),
            trace_state=record.trace_state,
            tenant=tenant,
        )


def _written(plan: Plan, choices: list[ChoiceDelta], usage: Usage) -> bytes:
    return msgspec.json.encode(plan.shape.answer(choices, usage))


def _utf8(value: str) -> str:
    """Return a header's value as its sender meant it: HTTP gives it as Latin-1, people write UTF-8."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


async def _collect(run: Run, record: RequestRecord) -> list[ChoiceDelta]:
    """Return every choice as one piece, in order."""
    pieces: dict[int, list[ChoiceDelta]] = {choice.index: [] for choice in run.choices.values()}
    async for deltas in run.deltas():
        record.saw(deltas)
        for delta in deltas:
            pieces[delta.index].append(delta)
    return [_join(index, found) for index, found in sorted(pieces.items())]


def _join(index: int, pieces: list[ChoiceDelta]) -> ChoiceDelta:
    text = "".join(piece.text for piece in pieces)
    records = tuple(record for piece in pieces for record in piece.records)
    last = pieces[-1]
    return ChoiceDelta(
        index, text, records, last.finish_reason, is_first=True, score=last.score, prompt=pieces[0].prompt
    )
