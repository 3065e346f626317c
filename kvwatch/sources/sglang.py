"""The source of an SGLang: `/server_info` tells where it publishes, and under which name the model is served."""

from kvwatch.sources.discovery import Discovered, DiscoveryError, read_sglang_info
from kvwatch.sources.engine_http import EngineHTTP
from kvwatch.sources.engines import EngineSpec
from kvwatch.sources.foreign import ForeignSource
from kvwatch.sources.insight import make_observer
from kvwatch.sources.scrape import make_scraper
from kvwatch.sources.source import Source
from kvwatch.sources.vllm import as_wanted, given


def make_source(spec: EngineSpec) -> Source:
    """Return the source of an SGLang.

    Raises:
        ConfigError: an address that was given is malformed.
    """

    async def discover(http: EngineHTTP) -> Discovered:
        body = await http.get("/server_info")
        if body is None:
            body = await http.get("/get_server_info")  # the path of older versions
        if body is None:
            raise DiscoveryError(f"{spec.url} has no /server_info; is it an SGLang?")
        found = read_sglang_info(body, url=spec.url)
        return Discovered(as_wanted(found.targets, spec), found.model_name)

    return ForeignSource(
        spec,
        discover,
        given=given(spec),
        scraper=make_scraper(spec),
        make_observer=lambda: make_observer(spec.max_blocks),
    )
