"""`adapters`: LoRA adapters, listed, loaded and unloaded while requests run."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvwatch.admin import problems
from kvwatch.admin.act import ActAnswer, Why, act, action
from kvwatch.admin.audit import AuditEntry
from kvwatch.admin.config import Reason
from kvwatch.admin.engines import AdminEngine, EngineQuery
from kvwatch.admin.operation import PREFIX, Answer, Call, Operation
from kvwatch.admin.problems import Problem
from kvwatch.admin.threads import off_loop
from kvwatch.control import AdapterControl, AdapterInfo


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which adapter, and why."""

    reason: Reason
    name: Annotated[str, Meta(min_length=1, max_length=256, description="Name under which requests ask for it.")]
    path: Annotated[str, Meta(min_length=1, max_length=4096, description="Its folder, beneath --lora-dir.")]
    replace: Annotated[bool, Meta(description="Take the place of an adapter of this name.")] = False


class AdaptersAnswer(msgspec.Struct, frozen=True):
    """Adapters that requests may name."""

    adapters: list[AdapterInfo]


class AdapterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that was loaded."""

    adapter: AdapterInfo
    audit: AuditEntry


async def get_adapters(call: Call[EngineQuery, None]) -> Answer:
    """List the adapters."""
    adapters = _adapters(call.site.engines.find(call.query))
    return Answer(AdaptersAnswer(await off_loop(adapters.adapters)))


async def load(call: Call[EngineQuery, LoadAdapter]) -> Answer:
    """Load an adapter."""
    engine, body = call.site.engines.find(call.query), call.body
    adapters = _adapters(engine)
    loaded, entry = await act(
        call, engine, "adapter.load", f"{body.name} from {body.path}{' in place of it' if body.replace else ''}",
        lambda: adapters.load_adapter(body.name, body.path, replace=body.replace),
    )  # fmt: skip
    return Answer(AdapterAnswer(adapter=loaded, audit=entry))


async def unload(call: Call[EngineQuery, Why]) -> Answer:
    """Unload an adapter."""
    engine, name = call.site.engines.find(call.query), call.path["name"]
    adapters = _adapters(engine)
    if all(each.name != name for each in await off_loop(adapters.adapters)):
        raise Problem(problems.NOT_FOUND, f"there is no adapter {name!r}; GET {PREFIX}/adapters lists all")
    _, entry = await act(call, engine, "adapter.unload", name, lambda: adapters.unload_adapter(name))
    return Answer(ActAnswer(audit=entry, message="requests that were accepted go on; its weights are freed after them"))


def _adapters(engine: AdminEngine) -> AdapterControl:
    engine.require_live()
    if engine.adapters is None:
        raise Problem(problems.UNSUPPORTED, "the LoRA adapters of this engine are not seen from here")
    return engine.adapters


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/adapters", name="listAdapters", tag="read",
        brief="LoRA adapters that are served.", query=EngineQuery, answer=AdaptersAnswer, handler=get_adapters,
    ),
    action(
        path="adapters", name="loadAdapter", brief="Load a LoRA adapter from beneath --lora-dir and serve it.",
        body=LoadAdapter, answer=AdapterAnswer, handler=load,
    ),
    action(
        path="adapters/{name}/unload", name="unloadAdapter", brief="Serve a LoRA adapter no more.",
        body=Why, answer=ActAnswer, handler=unload,
    ),
)  # fmt: skip
