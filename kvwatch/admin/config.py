"""`config`, `config/diff` and `audit`: what is set, what was declared, who changed it; and changing it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvwatch.admin import problems
from kvwatch.admin.app import etag
from kvwatch.admin.audit import AuditEntry
from kvwatch.admin.change_desk import ACTION, WantedChange
from kvwatch.admin.decoding import UNKNOWN_NOTE
from kvwatch.admin.engines import AdminEngine, EngineQuery, given
from kvwatch.admin.live_config import ConfigAnswer, DiffAnswer, config_answer, diff_answer
from kvwatch.admin.operation import PREFIX, Answer, Call, NoQuery, Operation, RequestHeader
from kvwatch.admin.problems import Problem
from kvwatch.admin.threads import off_loop
from kvwatch.admin.tokens import Role
from kvwatch.control import LIVE_SETTINGS, ChangeOutcome, ChangePreview, LiveSetting, SettingValue

IF_MATCH = "If-Match"
NOT_BLANK = "[^\\u0000-\\u0020\\u007f-\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff]"
"""Something to read. Spelled out, since \\s is not the same in every language."""
MAX_EXPIRY_SECONDS = 30 * 86_400.0
MAX_WHOLE = 2**31 - 1
MAX_AUDIT_ID = 2**53 - 1

Reason = Annotated[
    str, Meta(min_length=1, max_length=500, pattern=NOT_BLANK, description="Why, for whoever reads the audit.")
]
ExpiresIn = Annotated[
    float,
    Meta(ge=1, le=MAX_EXPIRY_SECONDS, description="Seconds after which the declared values are in force again."),
]


Persist = Annotated[bool, Meta(description="Write the values to the configuration file, so that they do not expire.")]


def _type_of(setting: LiveSetting) -> Any:
    if setting.type == "choice":
        kind: Any = Literal[setting.choices]
    elif setting.type == "int":
        low, high = int(setting.minimum or 0), int(setting.maximum or MAX_WHOLE)
        kind = Annotated[int, Meta(ge=low, le=high)]
    elif setting.type == "float":
        kind = Annotated[float, Meta(ge=setting.minimum, le=setting.maximum)]
    else:
        kind = bool if setting.type == "bool" else Annotated[str, Meta(max_length=64)]
    kind = kind | None if setting.is_optional else kind
    return Annotated[kind | UnsetType, Meta(description=setting.brief)]


ChangedSettings = msgspec.defstruct(
    "ChangedSettings",
    [(key, _type_of(setting), UNSET) for key, setting in LIVE_SETTINGS.items()],
    namespace={
        "__doc__": "New values by key; what is left out stays as it is.",
        UNKNOWN_NOTE: ", or cannot change while the engine runs",
    },
    module=__name__,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)


class ConfigChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to change, why and for how long."""

    changes: Annotated[ChangedSettings, Meta(extra_json_schema={"minProperties": 1})]  # type: ignore[valid-type]
    reason: Reason
    expires_in: ExpiresIn = 3600.0
    persist: Persist = False


class Revert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a change is taken back, and for how long."""

    reason: Reason
    expires_in: ExpiresIn = 3600.0
    persist: Persist = False


class ChangeQuery(EngineQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine, and whether it is only asked."""

    dry_run: Annotated[bool, Meta(description="Only say what would happen.")] = False


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which entries are wanted."""

    cursor: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_AUDIT_ID)] | UnsetType,
        Meta(description="`next_cursor` of the page before."),
    ] = UNSET
    limit: Annotated[int, Meta(ge=1, le=1000, description="Most entries of the page.")] = 100


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or what would be."""

    is_dry_run: bool
    preview: ChangePreview | None = None
    """What would happen; for a dry run only."""
    outcome: ChangeOutcome | None = None
    """What has happened."""
    audit: AuditEntry | None = None
    """Its entry in the audit trail."""


class AuditPage(msgspec.Struct, frozen=True):
    """Entries of the audit trail, the newest first."""

    entries: list[AuditEntry]
    next_cursor: int | None
    """None after the last one that is kept."""


# ---------------------------------------------------------------- reading


async def get_config(call: Call[EngineQuery, None]) -> Answer:
    """Show all settings."""
    return Answer(await _config(call, call.site.engines.find(call.query)))


async def get_diff(call: Call[EngineQuery, None]) -> Answer:
    """Show what has drifted."""
    engine = call.site.engines.find(call.query)
    state = await off_loop(engine.require_live().settings)
    return Answer(diff_answer(engine, state, call.site.desk.expiries(engine)))


async def get_audit(call: Call[AuditQuery, None]) -> Answer:
    """Show a page of the audit trail."""
    limit = call.query.limit
    before = given(call.query.cursor)
    found = call.site.trail.page(MAX_AUDIT_ID + 1 if before is None else before, limit + 1)
    shown = found[:limit]
    return Answer(AuditPage(shown, shown[-1].id if len(found) > limit else None))


async def get_audit_entry(call: Call[NoQuery, None]) -> Answer:
    """Show one entry."""
    return Answer(_entry(call))


async def _config(call: Call[Any, Any], engine: AdminEngine) -> ConfigAnswer:
    state = await off_loop(engine.require_live().settings)
    return config_answer(engine, state, call.site.desk.expiries(engine))


def _entry(call: Call[Any, Any]) -> AuditEntry:
    number = call.path["id"]
    found = call.site.trail.find(int(number)) if number.isascii() and number.isdigit() and len(number) < 20 else None
    if found is None:
        raise Problem(problems.NOT_FOUND, f"the audit trail keeps no entry {number}; GET {PREFIX}/audit lists them")
    return found


# ---------------------------------------------------------------- changing


async def patch_config(call: Call[ChangeQuery, ConfigChange]) -> Answer:
    """Change settings, all that are asked for or none."""
    body, engine = call.body, call.site.engines.find(call.query)
    changes = {key: value for key, value in msgspec.structs.asdict(body.changes).items() if value is not UNSET}
    if not changes:
        raise Problem(problems.INVALID, "the body is wrong: changes names no setting; name at least one")
    async with call.site.desk.turn(engine):
        config = await _config(call, engine)
        tag = etag(msgspec.json.encode(config))
        if call.headers[IF_MATCH.lower()].strip() != tag:
            detail = f"the settings are not those that {IF_MATCH} names; GET {PREFIX}/config and decide again"
            raise Problem(problems.STALE, detail)
        if call.query.dry_run:
            return Answer(ChangeAnswer(is_dry_run=True, preview=await _preview(engine, changes)))
        wanted = WantedChange(
            entry=call.site.entry(call.caller, engine, ACTION, body.reason, " ".join(changes)),
            changes=changes,
            expires_in=body.expires_in,
            is_persistent=body.persist,
            expected_version=config.version,
        )
        return await _apply(call, engine, wanted)


async def revert(call: Call[ChangeQuery, Revert]) -> Answer:
    """Take a change back: its settings get the values that they had before."""
    entry = _entry(call)
    if entry.action != ACTION or entry.outcome != "done" or not entry.changes:
        detail = f"entry {entry.id} is no change of settings that was carried out; only such can be taken back"
        raise Problem(problems.CONFLICT, detail)
    engine = call.site.engines.find(EngineQuery(engine=entry.engine, dp_rank=entry.dp_rank))
    changes: dict[str, SettingValue] = {each.key: each.old for each in entry.changes}
    async with call.site.desk.turn(engine):
        state = await off_loop(engine.require_live().settings)
        now = {each.key: each.live for each in state.settings}
        other = next((each for each in entry.changes if now.get(each.key) != each.new), None)
        if other is not None:
            detail = (
                f"{other.key} is {now.get(other.key)} and no longer {other.new}, as change {entry.id} made it; "
                f"change it with PATCH {PREFIX}/config"
            )
            raise Problem(problems.CONFLICT, detail)
        if call.query.dry_run:
            return Answer(ChangeAnswer(is_dry_run=True, preview=await _preview(engine, changes)))
        named = call.site.entry(call.caller, engine, ACTION, call.body.reason, " ".join(changes))
        wanted = WantedChange(
            entry=msgspec.structs.replace(named, reverts=entry.id),
            changes=changes,
            expires_in=call.body.expires_in,
            is_persistent=call.body.persist,
            expected_version=state.version,
        )
        return await _apply(call, engine, wanted)


async def _preview(engine: AdminEngine, changes: dict[str, SettingValue]) -> ChangePreview:
    return await off_loop(engine.require_live().preview, changes)


async def _apply(call: Call[Any, Any], engine: AdminEngine, wanted: WantedChange) -> Answer:
    entry, outcome = await call.site.desk.apply(engine, wanted)
    return Answer(ChangeAnswer(is_dry_run=False, outcome=outcome, audit=entry))


_REVERT_LINK = {
    "operationId": "revertChange",
    "parameters": {"id": "$response.body#/audit/id"},
    "description": "Take the change back.",
}

OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/config", name="getConfig", tag="read",
        brief="All settings: value in force, declared value and its source, how it can change, when it reverts.",
        query=EngineQuery, answer=ConfigAnswer, handler=get_config,
        links={
            "change": {"operationId": "changeConfig", "parameters": {IF_MATCH: "$response.header.ETag"}},
        },
    ),
    Operation(
        method="PATCH", path=f"{PREFIX}/config", name="changeConfig", tag="change", role=Role.OPERATE,
        brief="Change settings, all or none; with `dry_run` only say what would happen.",
        query=ChangeQuery, body=ConfigChange, answer=ChangeAnswer, handler=patch_config,
        headers=(
            RequestHeader(
                name=IF_MATCH, is_required=True,
                brief="ETag of the configuration that the change was decided on.",
            ),
        ),
        problems=(problems.STALE, problems.FAILED, problems.NO_AUDIT),
        links={"revert": _REVERT_LINK},
    ),
    Operation(
        method="GET", path=f"{PREFIX}/config/diff", name="getConfigDiff", tag="read",
        brief="What is live and not declared, also as TOML and as Helm values.",
        query=EngineQuery, answer=DiffAnswer, handler=get_diff,
    ),
    Operation(
        method="GET", path=f"{PREFIX}/audit", name="listAudit", tag="read",
        brief="Who changed what, when, from where, why, and what became of it; the newest first.",
        query=AuditQuery, answer=AuditPage, handler=get_audit,
        links={
            "entry": {"operationId": "getAuditEntry", "parameters": {"id": "$response.body#/entries/0/id"}},
            "revert": {"operationId": "revertChange", "parameters": {"id": "$response.body#/entries/0/id"}},
            "next": {"operationId": "listAudit", "parameters": {"cursor": "$response.body#/next_cursor"}},
        },
    ),
    Operation(
        method="GET", path=f"{PREFIX}/audit/{{id}}", name="getAuditEntry", tag="read",
        brief="One entry of the audit trail.", answer=AuditEntry, handler=get_audit_entry,
    ),
    Operation(
        method="POST", path=f"{PREFIX}/audit/{{id}}/revert", name="revertChange", tag="change", role=Role.OPERATE,
        brief="Give the settings of a change the values that they had before it.",
        query=ChangeQuery, body=Revert, answer=ChangeAnswer, handler=revert,
        problems=(problems.FAILED, problems.NO_AUDIT), links={"revert": _REVERT_LINK},
    ),
)  # fmt: skip
