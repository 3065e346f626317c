"""What can be done to an engine beside changing its settings: admission, drain, abort, the prefix cache, the recorder.

Every act has a line in the audit trail before it is done and one that says what came of it.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvwatch.admin import problems
from kvwatch.admin.audit import AuditEntry
from kvwatch.admin.config import Reason
from kvwatch.admin.engines import AdminEngine, EngineQuery
from kvwatch.admin.operation import PREFIX, Answer, Call, Operation
from kvwatch.admin.problems import Problem
from kvwatch.admin.threads import off_loop
from kvwatch.admin.tokens import Role
from kvwatch.control import AdmissionState, PinnedPrefix, PrefixControl, PrefixReset, PrefixScope
from kvwatch.errors import ControlError, ExporterError

MAX_PIN_TOKENS = 32_768
MAX_PAUSE_SECONDS = 3600.0
MAX_WAIT_SECONDS = 30.0
DUMP_SECONDS = 30.0

T = TypeVar("T")


class Why(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why it is done."""

    reason: Reason


class Pause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how long, and why."""

    reason: Reason
    seconds: Annotated[
        float, Meta(ge=0.1, le=MAX_PAUSE_SECONDS, description="Admission goes on by itself after this time.")
    ]


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and the grace time that is announced."""

    reason: Reason
    grace_seconds: Annotated[float, Meta(ge=0, le=86_400, description="Grace time that is announced.")] = 30.0


class Reset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the prefix cache is reset, and why."""

    reason: Reason
    unpin: Annotated[bool, Meta(description="End all pins first; else pins refuse the reset.")] = False
    wait_seconds: Annotated[
        float, Meta(ge=0, le=MAX_WAIT_SECONDS, description="How long to wait until what is in use was released.")
    ] = 0.0


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prefix is to stay, and why: exactly one of `token_ids`, `text` and `request`."""

    reason: Reason
    token_ids: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**31 - 1)]],
        Meta(max_length=MAX_PIN_TOKENS, description="The prefix, as token ids."),
    ] = []
    text: Annotated[str, Meta(max_length=131_072, description="The prefix, as text without a chat template.")] = ""
    request: Annotated[str, Meta(max_length=512, description="A live request whose prompt is to stay.")] = ""
    num_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="Only so many tokens of its prompt.")
    ] = None
    cache_salt: Annotated[str, Meta(max_length=512, description="`cache_salt` of the requests that share it.")] = ""
    tenant: Annotated[str, Meta(max_length=512, description="Tenant of the requests that share it.")] = ""


class ActAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    audit: AuditEntry
    message: str = ""


class AdmissionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether waiting requests are admitted now."""

    admission: AdmissionState
    audit: AuditEntry | None = None


class PinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that is pinned, or was."""

    prefix: PinnedPrefix
    audit: AuditEntry


class PinsAnswer(msgspec.Struct, frozen=True):
    """All pins, the oldest first."""

    pins: list[PinnedPrefix]


class ResetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the reset did."""

    reset: PrefixReset
    audit: AuditEntry


class DumpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The flight recorder's file."""

    file: str
    """Its name in the recorder's folder."""
    audit: AuditEntry


# ---------------------------------------------------------------- admission, drain, requests


async def get_admission(call: Call[EngineQuery, None]) -> Answer:
    """Show whether admission is paused."""
    live = call.site.engines.find(call.query).require_live()
    return Answer(AdmissionAnswer(admission=await off_loop(live.admission)))


async def pause(call: Call[EngineQuery, Pause]) -> Answer:
    """Pause admission for a time."""
    engine, body = call.site.engines.find(call.query), call.body
    live, actor = engine.require_live(), call.caller.name
    state, entry = await act(
        call, engine, "admission.pause", f"{body.seconds:g} s",
        lambda: live.pause_admission(body.seconds, actor=actor, reason=body.reason),
    )  # fmt: skip
    return Answer(AdmissionAnswer(admission=state, audit=entry))


async def resume(call: Call[EngineQuery, Why]) -> Answer:
    """Admit waiting requests again."""
    engine = call.site.engines.find(call.query)
    live, actor, reason = engine.require_live(), call.caller.name, call.body.reason
    state, entry = await act(
        call, engine, "admission.resume", "", lambda: live.resume_admission(actor=actor, reason=reason)
    )
    return Answer(AdmissionAnswer(admission=state, audit=entry))


async def drain(call: Call[EngineQuery, Drain]) -> Answer:
    """Begin to drain."""
    engine = call.site.engines.find(call.query)
    live, seconds = engine.require_live(), call.body.grace_seconds
    _, entry = await act(call, engine, "drain", f"{seconds:g} s", lambda: live.begin_drain(seconds))
    return Answer(ActAnswer(audit=entry, message="new requests are refused; those that were accepted go on"))


async def abort(call: Call[EngineQuery, Why]) -> Answer:
    """End a request."""
    engine, request = call.site.engines.find(call.query), call.path["request"]
    live = engine.require_live()

    def end() -> bool:
        if live.abort_request(request):
            return True
        raise ControlError(_not_live(request))

    try:
        _, entry = await act(call, engine, "request.abort", request, end)
    except ControlError as error:
        if str(error) != _not_live(request):
            raise
        raise Problem(problems.NOT_FOUND, str(error)) from error
    return Answer(ActAnswer(audit=entry, message=f"request {request} has ended and its blocks are free"))


def _not_live(request: str) -> str:
    return f"request {request!r} is not live; GET {PREFIX}/requests lists those that are"


# ---------------------------------------------------------------- prefix cache


async def get_pins(call: Call[EngineQuery, None]) -> Answer:
    """Show all pins."""
    prefixes = _prefixes(call.site.engines.find(call.query))
    return Answer(PinsAnswer(await off_loop(prefixes.pinned_prefixes)))


async def pin(call: Call[EngineQuery, Pin]) -> Answer:
    """Keep a prefix."""
    engine, body, actor = call.site.engines.find(call.query), call.body, call.caller.name
    prefixes = _prefixes(engine)
    if sum((bool(body.token_ids), bool(body.text), bool(body.request))) != 1:
        raise Problem(problems.CONFLICT, "name the prefix by exactly one of token_ids, text and request")
    if body.request:
        prefix, entry = await act(
            call, engine, "prefix.pin", f"request {body.request}",
            lambda: prefixes.pin_request(body.request, body.num_tokens, actor=actor, reason=body.reason),
        )  # fmt: skip
        return Answer(PinAnswer(prefix=prefix, audit=entry))
    token_ids = body.token_ids
    if body.text:
        if engine.tokenize is None:
            raise Problem(problems.UNSUPPORTED, "texts cannot be turned into tokens here; give token_ids")
        token_ids = await off_loop(engine.tokenize, body.text)
    scope = PrefixScope(cache_salt=body.cache_salt, tenant=body.tenant)
    prefix, entry = await act(
        call, engine, "prefix.pin", f"{len(token_ids)} tokens",
        lambda: prefixes.pin_prefix(token_ids, scope, actor=actor, reason=body.reason),
    )  # fmt: skip
    return Answer(PinAnswer(prefix=prefix, audit=entry))


async def unpin(call: Call[EngineQuery, Why]) -> Answer:
    """End a pin."""
    engine, name, actor = call.site.engines.find(call.query), call.path["pin"], call.caller.name
    prefixes, reason = _prefixes(engine), call.body.reason
    if all(each.pin != name for each in await off_loop(prefixes.pinned_prefixes)):
        raise Problem(problems.NOT_FOUND, f"there is no pin {name!r}; GET {PREFIX}/pins lists all")
    prefix, entry = await act(
        call, engine, "prefix.unpin", name, lambda: prefixes.unpin_prefix(name, actor=actor, reason=reason)
    )
    return Answer(PinAnswer(prefix=prefix, audit=entry))


async def reset(call: Call[EngineQuery, Reset]) -> Answer:
    """Forget the content of the prefix cache."""
    engine, body, actor = call.site.engines.find(call.query), call.body, call.caller.name
    prefixes = _prefixes(engine)
    done, entry = await act(
        call, engine, "prefix.reset", "all" if body.unpin else "",
        lambda: prefixes.reset_prefix_cache(
            actor=actor, reason=body.reason, unpin=body.unpin, wait_seconds=body.wait_seconds
        ),
    )  # fmt: skip
    return Answer(ResetAnswer(reset=done, audit=entry))


def _prefixes(engine: AdminEngine) -> PrefixControl:
    engine.require_live()
    if engine.prefixes is None:
        raise Problem(problems.UNSUPPORTED, "the prefix cache of this engine can neither be pinned nor reset from here")
    return engine.prefixes


# ---------------------------------------------------------------- recorder


async def dump(call: Call[EngineQuery, Why]) -> Answer:
    """Have the flight recorder written out."""
    engine = call.site.engines.find(call.query)
    write = engine.dump_flight
    if write is None:
        raise Problem(problems.UNSUPPORTED, "there is no flight recorder here; start the server with --flight-dir")

    def dump_now() -> str:
        try:
            return write("admin").result(DUMP_SECONDS).name
        except (ExporterError, TimeoutError) as error:
            raise ControlError(str(error) or f"nothing was written within {DUMP_SECONDS:g} s") from error

    try:
        name, entry = await act(call, engine, "flight.dump", "", dump_now)
    except ControlError as error:
        raise Problem(problems.CONFLICT, str(error)) from error
    return Answer(DumpAnswer(file=name, audit=entry))


# ---------------------------------------------------------------- all of them


async def act(
    call: Call[Any, Any], engine: AdminEngine, action: str, subject: str, do: Callable[[], T]
) -> tuple[T, AuditEntry]:
    """Do something with a line in the audit trail before and after it."""
    trail = call.site.trail
    begun = await off_loop(trail.begin, call.site.entry(call.caller, engine, action, call.body.reason, subject))
    try:
        result = await off_loop(do)
    except ControlError as error:
        trail.end(msgspec.structs.replace(begun, outcome="refused", message=str(error)))
        raise
    except Exception as error:
        trail.end(msgspec.structs.replace(begun, outcome="failed", message=type(error).__name__))
        raise
    return result, trail.end(msgspec.structs.replace(begun, outcome="done"))


def action(  # noqa: PLR0913 - by keyword
    *, path: str, name: str, brief: str, body: Any, answer: type[msgspec.Struct], handler: Any, method: str = "POST",
    links: Any = None,
) -> Operation:  # fmt: skip
    """Return an operation that changes something, needs the role for it, and has a reason in its body."""
    return Operation(
        method=method, path=f"{PREFIX}/{path}", name=name, brief=brief, tag="act", role=Role.OPERATE, query=EngineQuery,
        body=body, answer=answer, handler=handler, problems=(problems.NO_AUDIT,), links=links or {},
    )  # fmt: skip


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/admission", name="getAdmission", tag="read",
        brief="Whether waiting requests are admitted, or for how long not.",
        query=EngineQuery, answer=AdmissionAnswer, handler=get_admission,
    ),
    action(
        path="admission/pause", name="pauseAdmission", brief="Admit no waiting request for a time; who runs goes on.",
        body=Pause, answer=AdmissionAnswer, handler=pause,
    ),
    action(
        path="admission/resume", name="resumeAdmission", brief="Admit waiting requests again.",
        body=Why, answer=AdmissionAnswer, handler=resume,
    ),
    action(
        path="drain", name="drain", brief="Refuse new requests from now on; it cannot be undone.",
        body=Drain, answer=ActAnswer, handler=drain,
    ),
    action(
        path="requests/{request}/abort", name="abortRequest", brief="End a request and free its blocks.",
        body=Why, answer=ActAnswer, handler=abort,
    ),
    Operation(
        method="GET", path=f"{PREFIX}/pins", name="listPins", tag="read", brief="Prefixes that stay.",
        query=EngineQuery, answer=PinsAnswer, handler=get_pins,
    ),
    action(
        path="pins", name="pinPrefix", brief="Keep a prefix that is cached now, named by tokens, text or request.",
        body=Pin, answer=PinAnswer, handler=pin,
        links={"unpin": {"operationId": "unpinPrefix", "parameters": {"pin": "$response.body#/prefix/pin"}}},
    ),
    action(
        path="pins/{pin}/unpin", name="unpinPrefix", brief="End a pin.", body=Why, answer=PinAnswer, handler=unpin,
    ),
    action(
        path="prefix-cache/reset", name="resetPrefixCache", brief="Forget what the prefix cache holds, in all tiers.",
        body=Reset, answer=ResetAnswer, handler=reset,
    ),
    action(
        path="flight/dump", name="dumpFlight", brief="Have the flight recorder written out.",
        body=Why, answer=DumpAnswer, handler=dump,
    ),
)  # fmt: skip
