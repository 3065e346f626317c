"""The source of a vLLM: from 0.32 on it tells where it publishes, before that it must be given."""

from contextlib import suppress

import msgspec

from kvwatch.sources.discovery import Discovered, DiscoveryError, given_targets, read_vllm_sources
from kvwatch.sources.endpoints import Target
from kvwatch.sources.engine_http import EngineHTTP
from kvwatch.sources.engines import EngineSpec
from kvwatch.sources.foreign import ForeignSource
from kvwatch.sources.insight import make_observer
from kvwatch.sources.scrape import make_scraper
from kvwatch.sources.source import Source


def make_source(spec: EngineSpec) -> Source:
    """Return the source of a vLLM.

    Raises:
        ConfigError: an address that was given is malformed.
    """

    async def discover(http: EngineHTTP) -> Discovered:
        if spec.kv_events is not None:
            return Discovered((), await _model_name(http))
        body = await http.get("/kv_event_sources")
        if body is None:
            raise DiscoveryError(
                f"{spec.url} has no /kv_event_sources, which vLLM has from 0.32 on; name the address with the option "
                "kv_events, as kv_events=tcp://HOST:5557"
            )
        targets = as_wanted(read_vllm_sources(body, url=spec.url), spec)
        return Discovered(targets, await _model_name(http))

    return ForeignSource(
        spec,
        discover,
        given=given(spec),
        scraper=make_scraper(spec),
        make_observer=lambda: make_observer(spec.max_blocks),
    )


def given(spec: EngineSpec) -> tuple[Target, ...] | None:
    """Return the targets that an engine's options name, or None if it is to be asked.

    Raises:
        ConfigError: one of them is malformed.
    """
    if spec.kv_events is None:
        return None
    return given_targets(
        spec.kv_events,
        None if spec.replay == "off" else spec.replay,
        url=spec.url,
        num_ranks=spec.dp_ranks,
        topic=spec.topic,
        is_bound=spec.mode == "bind",
    )


def as_wanted(targets: tuple[Target, ...], spec: EngineSpec) -> tuple[Target, ...]:
    """Return what an engine told, changed where the options say otherwise: replays, topic, who binds."""
    return tuple(
        Target(
            each.dp_rank,
            each.live,
            None if spec.replay == "off" else each.replay,
            spec.topic or each.topic,
            each.is_bound or spec.mode == "bind",
            each.may_be_bound and spec.mode == "auto",
        )
        for each in targets
    )


async def _model_name(http: EngineHTTP) -> str:
    """Return the name under which the model is served; empty if the engine does not say it.

    Raises:
        EngineUnreachableError: it does not answer.
    """
    body = await http.get("/v1/models")
    with suppress(msgspec.MsgspecError, RecursionError, IndexError):
        if body is not None:
            return msgspec.json.decode(body, type=_Models).data[0].id
    return ""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]
