"""The admin API over a real engine: its listener on a free loopback port, tokens of every kind, requests that run."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from builders import NullModel, make_request, make_settings
from openai_server import wait_until

from kvwatch.admin.engines import AdminEngine, AdminEngines, DeclaredSetting
from kvwatch.admin.part import AdminPart
from kvwatch.admin.settings import AdminOptions
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.logs import LogLevel
from kvwatch.observatory.observatory import Observatory
from kvwatch.stream.access import StreamOptions
from kvwatch.stream.server import StreamServer
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.contracts.step import Int64Array
from kvwatch_engine.engine import Engine
from kvwatch_engine.live import LiveEngine
from kvwatch_engine.live.changer import RebuildLimits

STEP_SECONDS = 0.005
"""What a step takes, so that requests are there while they are looked at."""

MAX_BLOCKS = 2000
"""Blocks that the model's memory has room for."""

TOKENS = {
    "read": "reader-0123456789abcdef",
    "prompts": "prompter-0123456789abcdef",
    "operate": "operator-0123456789abcdef",
    "other": "another-operator-0123456789",
    "expired": "expired-0123456789abcdef",
}
"""Tokens by the name that they have in the file."""

TOKEN_FILE = f"""
# who     may      token                  until
read      read     {TOKENS["read"]}
prompts   prompts  {TOKENS["prompts"]}    2099-01-01T00:00:00Z
operate   operate  {TOKENS["operate"]}
other     operate  {TOKENS["other"]}
expired   operate  {TOKENS["expired"]}    2001-01-01
"""


class SmallModel(NullModel):
    """One whose memory is soon full."""

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        if num_blocks > MAX_BLOCKS:
            raise MemoryError(f"there is room for {MAX_BLOCKS} blocks")
        super().rebuild(num_blocks, sources, destinations)


class AdminStage:
    """A running admin listener and what is behind it."""

    def __init__(
        self,
        engine: Engine,
        model: NullModel,
        log: EventLog,
        part: AdminPart,
        observatory: Observatory,
        stream: StreamServer,
    ) -> None:
        self.engine = engine
        self.model = model
        self.log = log
        self.part = part
        self.observatory = observatory
        assert part.address is not None
        self.port = part.address[1]
        assert stream.address is not None
        self.grpc = f"127.0.0.1:{stream.address[1]}"
        self.url = f"http://127.0.0.1:{self.port}"
        self.api = f"{self.url}/admin/v1"

    def client(self, token: str | None = None) -> httpx.Client:
        """Return a client whose paths begin at the API, with the token of that name."""
        headers = {} if token is None else {"Authorization": f"Bearer {TOKENS[token]}"}
        return httpx.Client(base_url=self.api, headers=headers, timeout=60, trust_env=False)

    def submit(self, name: str, num_prompt_tokens: int = 40, max_tokens: int = 2000, prompt: int = 1) -> None:
        """Give the engine a request that runs for some seconds; equal `prompt`s begin alike."""
        tokens = [4 + (index * prompt) % 40 for index in range(num_prompt_tokens)]
        self.engine.submit(make_request(name, tokens, max_tokens=max_tokens, ignore_eos=True))

    def wait_running(self, number: int) -> None:
        """Wait until so many requests run, as the ledger's view shows it."""
        wait_until(lambda: self.value("requests", state="running") == number, 60)

    def value(self, name: str, **labels: str) -> float | None:
        """Return one of the values on the metrics page now."""
        for sample in self.observatory.samples():
            known = dict(zip(sample.metric.labels, sample.labels, strict=True))
            if sample.metric.name == name and known == labels and hasattr(sample, "value"):
                return float(sample.value)
        return None


@contextmanager
def admin_stage(
    folder: Path,
    *,
    options: Mapping[str, object] | None = None,
    declared: tuple[DeclaredSetting, ...] = (),
    stream_token_file: str | None = None,
    rebuilds: RebuildLimits | None = None,
    **engine_settings: object,
) -> Iterator[AdminStage]:
    """Run an engine of arithmetic with an admin listener; `options` are those of the listener."""
    token_file = folder / "tokens"
    token_file.write_text(TOKEN_FILE, encoding="utf-8")
    generous = {
        "changes_per_minute": 1e6,
        "changes_at_once": 10**6,
        "failures_per_minute": 1e6,
        "failures_at_once": 10**6,
    }
    given = {"listen": "127.0.0.1:0", "token_file": str(token_file)} | generous | dict(options or {})
    log = EventLog()
    limits: dict[str, object] = {"block_size": 16, "num_blocks": 401, "max_model_len": 4000} | engine_settings
    settings = make_settings(**limits)
    model = SmallModel()
    model.block_size = settings.block_size
    model.on_step = lambda _: time.sleep(STEP_SECONDS)
    engine = Engine(settings, model, log, _ignore, memory=model)
    control = LiveEngine(engine, rebuilds)
    control.attach("log_level", LogLevel())
    identity = EngineIdentity("chat", 0, "tiny")
    engines = AdminEngines()
    engines.add(
        AdminEngine(
            labels={"engine": "chat", "dp_rank": "0", "model_name": "tiny"},
            log=log,
            view=lambda: observatory.view,
            control=control,
            live=control,
            prefixes=control,
            declared=declared,
        )
    )
    part = AdminPart(AdminOptions(**given), engines)  # type: ignore[arg-type]
    stream = StreamServer(
        log, control, StreamOptions(listen="127.0.0.1:0", token_file=stream_token_file), {"engine": "chat"},
        services=[part.grpc_service()],
    )  # fmt: skip
    observatory = Observatory(log, engine, identity, parts=[part, stream], view_interval_seconds=0)
    engine.start()
    observatory.start()
    try:
        assert stream.is_serving.wait(60)
        yield AdminStage(engine, model, log, part, observatory, stream)
    finally:
        engine.stop()
        observatory.stop()


def _ignore(_: Sequence[SequenceOutput]) -> None:
    """Let outputs go."""
