"""LoRA adapters over HTTP: chosen by `model`, loaded and unloaded while requests run."""

import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from builders import Recorder, make_settings
from lora_adapters import AdaptedReference, make_adapter
from openai_server import RunningServer, serve, wait_until
from tiny_models import make_tiny_model, tiny_tokenizer

from kvwatch.telemetry.events import RequestFinished, RequestQueued
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import AdapterError
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.adapters import AdapterStore
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app
from kvwatch_engine.server.adapters import AdapterOptions
from kvwatch_engine.server.api_keys import ApiKeys

BASE = "base"
PROMPT = "A block holds the keys and values of a few tokens, and a table says which blocks a sequence uses."
NUM_TOKENS = 24


class GatedRunner:
    """A model runner that computes only while its gate is open."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, step: StepInput) -> StepResult:
        assert self.gate.wait(60)
        return self._runner.execute(step)


@dataclass(frozen=True)
class Stage:
    """A server, its model, and what clients ask of it."""

    server: RunningServer
    runner: GatedRunner
    store: AdapterStore

    def complete(self, model: str, prompt: str = PROMPT, **more: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}
        return self.server.post("/v1/completions", model=model, **body)

    def text(self, model: str, prompt: str = PROMPT) -> str:
        answer = self.complete(model, prompt)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: object, path: object, **more: object) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path, **more}
        return httpx.post(f"{self.server.url}/v1/load_lora_adapter", json=body, timeout=60)

    def unload(self, name: object) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)

    def served(self) -> list[str]:
        return [card["id"] for card in self.server.get("/v1/models").json()["data"]]


@dataclass(frozen=True)
class Folders:
    """A model, a folder of adapters `a`, `b`, `c`, and what PEFT makes of them."""

    model: Path
    adapters: Path
    texts: dict[str, str]
    """By adapter, and for the base model."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    model = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    adapters = tmp_path_factory.mktemp("adapters")
    references = {BASE: AdaptedReference(model, None)}
    for seed, name in enumerate("abc"):
        references[name] = AdaptedReference(model, make_adapter(model, adapters / name, seed=seed, r=4 << seed))
    tokenizer = tiny_tokenizer()
    prompt = tokenizer(PROMPT).input_ids
    texts = {name: tokenizer.decode(each.generate(prompt, NUM_TOKENS)) for name, each in references.items()}
    assert len(set(texts.values())) == 4
    return Folders(model, adapters, texts)


@contextmanager
def lora_server(
    folders: Folders, *at_start: str, is_open: bool = True, max_adapters: int = 8, api_keys: ApiKeys | None = None
) -> Iterator[Stage]:
    model = load_model(str(folders.model), dtype="float32", served_name=BASE)
    limits = make_settings(
        num_blocks=257, block_size=8, max_model_len=512, max_batch_tokens=64, vocab_size=model.info.vocab_size,
        eos_token_ids=model.info.eos_token_ids,
    )  # fmt: skip
    dispatcher, log = OutputDispatcher(), EventLog()
    runner = GatedRunner(ModelRunner(model, KVCache(model.cache_spec(limits.block_size), limits.num_blocks)))
    engine = Engine(limits, runner, log, dispatcher)
    options = AdapterOptions(
        memory=model.adapters, max_adapters=max_adapters, folder=folders.adapters if is_open else None,
        at_start=tuple((name, folders.adapters / name) for name in at_start),
    )  # fmt: skip
    app = create_app(engine, dispatcher, model.info, ServerSettings(), api_keys=api_keys, lora=options)
    with serve(engine, app, dispatcher, log) as running:
        try:
            yield Stage(running, runner, model.adapters)
        finally:
            runner.gate.set()


def refusal(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """Check an error's shape; return its message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "/tmp" not in error["message"]
    assert len(error["message"]) < 800
    return str(error["message"])


def test_base_and_adapters_in_one_batch_each_give_their_own_text_cold_and_warm(folders: Folders) -> None:
    with lora_server(folders, "a", "b") as stage:
        recorder = Recorder(stage.server.log)
        names = [BASE, "a", "b"]
        stage.runner.gate.clear()
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(stage.complete, name) for name in names]
            wait_until(lambda: stage.server.engine.num_live_requests == 3, 60)
            stage.runner.gate.set()
            cold = [each.result().json() for each in asked]
        warm = [stage.complete(name).json() for name in names]
        queued = [event.adapter for event in recorder.drain() if isinstance(event, RequestQueued)]
        finished = [event.lora for event in recorder.drain() if isinstance(event, RequestFinished)]

    for answers in (cold, warm):
        assert [answer["choices"][0]["text"] for answer in answers] == [folders.texts[name] for name in names]
        assert [answer["model"] for answer in answers] == names
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in cold] == [0, 0, 0]
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 8 for answer in warm)
    assert len({answer["system_fingerprint"] for answer in cold}) == 3
    assert sorted(queued) == sorted(finished) == ["", "", "a", "a", "b", "b"]


def test_the_list_of_models_names_adapters_and_their_parent(folders: Folders) -> None:
    with lora_server(folders, "a") as stage:
        cards = {card["id"]: card for card in stage.server.get("/v1/models").json()["data"]}
        one = stage.server.get("/v1/models/a").json()

        assert list(cards) == [BASE, "a"]
        assert (cards[BASE]["parent"], cards["a"]["parent"]) == (None, BASE)
        assert one == cards["a"]
        assert one["max_model_len"] == 512
        assert stage.server.get("/v1/models/b").status_code == 404
        with stage.server.openai() as client:
            assert [model.id for model in client.models.list()] == [BASE, "a"]


def test_chat_and_streams_reach_the_adapter_too(folders: Folders) -> None:
    with lora_server(folders, "a") as stage, stage.server.openai() as client:

        def chat(model: str) -> str:
            stream = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=20, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert chat("a") != chat(BASE)
        assert chat("a") == chat("a")


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(folders: Folders) -> None:
    with lora_server(folders) as stage:
        refusal(stage.complete("c"), 404, "model")

        loaded = stage.load("c", "c")
        assert (loaded.status_code, loaded.json()["id"], loaded.json()["parent"]) == (200, "c", BASE)
        assert stage.text("c") == folders.texts["c"]
        assert stage.served() == [BASE, "c"]

        unloaded = stage.unload("c")
        assert (unloaded.status_code, unloaded.json()) == (200, {"id": "c", "object": "model", "deleted": True})
        refusal(stage.complete("c"), 404, "model")
        refusal(stage.unload("c"), 404, "lora_name")
        assert stage.served() == [BASE]
        wait_until(lambda: stage.store.num_bytes == 0, 60)
        assert stage.text(BASE) == folders.texts[BASE]


def test_the_same_name_loaded_again_is_another_adapter_to_the_cache(folders: Folders) -> None:
    with lora_server(folders, "a") as stage:

        def cached() -> int:
            usage = stage.complete("a").json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert (cached(), cached() > 0) == (0, True)
        stage.unload("a")
        assert stage.load("a", "a").status_code == 200
        assert (cached(), cached() > 0) == (0, True)

        assert stage.unload("a").status_code == 200
        assert stage.load("a", "b").status_code == 200
        assert stage.text("a") == folders.texts["b"]


def test_an_adapter_takes_the_place_of_another_of_its_name_only_when_told_to(folders: Folders) -> None:
    with lora_server(folders, "a") as stage:
        assert "is served as 'a' already" in refusal(stage.load("a", "b"), 409, "lora_name")
        assert stage.text("a") == folders.texts["a"]

        assert stage.load("a", "b", load_inplace=True).status_code == 200

        assert stage.text("a") == folders.texts["b"]
        assert stage.served() == [BASE, "a"]
        assert "is served as 'base' already" in refusal(stage.load(BASE, "b", load_inplace=True), 409, "lora_name")


def test_unloading_during_traffic_lets_accepted_requests_end_and_refuses_new_ones(folders: Folders) -> None:
    with lora_server(folders, "a", max_adapters=1) as stage, ThreadPoolExecutor(4) as pool:
        held = stage.store.num_bytes
        stage.runner.gate.clear()
        asked = [pool.submit(stage.text, "a") for _ in range(3)] + [pool.submit(stage.text, BASE)]
        wait_until(lambda: stage.server.engine.num_live_requests == 4, 60)

        assert stage.unload("a").status_code == 200
        refusal(stage.complete("a"), 404, "model")
        assert stage.store.num_bytes == held, "requests need it"
        assert "1 of them until their last requests end" in refusal(stage.load("b", "b"), 409)

        stage.runner.gate.set()
        assert [each.result(60) for each in asked] == [folders.texts["a"]] * 3 + [folders.texts[BASE]]
        wait_until(lambda: stage.store.num_bytes == 0, 60)
        wait_until(lambda: stage.load("b", "b").status_code == 200, 60)
        assert stage.text("b") == folders.texts["b"]


def test_loads_and_unloads_beside_requests_disturb_none_of_them(folders: Folders) -> None:
    """Texts come from exactly one adapter: the one that was served when they were asked for."""
    with lora_server(folders, "a") as stage, ThreadPoolExecutor(3) as pool:
        steady: list[Future[str]] = []
        changing: list[str] = []
        for turn in range(4):
            steady += [pool.submit(stage.text, name) for name in ("a", BASE)]
            assert stage.load("x", "bc"[turn % 2]).status_code == 200
            steady += [pool.submit(stage.text, name) for name in ("a", BASE)]
            changing.append(stage.text("x"))
            assert stage.unload("x").status_code == 200

        assert changing == [folders.texts["b"], folders.texts["c"]] * 2
        assert [each.result(60) for each in steady] == [folders.texts["a"], folders.texts[BASE]] * 8
        wait_until(lambda: stage.server.engine.num_live_requests == 0, 60)
        stage.server.engine.check_integrity()


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "../a", "/etc", "-rf", "a\n", "a\0b", "ä", "x" * 129, 'a"}\n', "a=b", "a,b", "a%2f"],
    ids=repr,
)
def test_a_name_that_could_not_stand_as_it_is_is_refused(open_stage: Stage, name: str) -> None:
    assert "is no name for an adapter" in refusal(open_stage.load(name, "a"), 400, "lora_name")
    assert open_stage.served() == [BASE]


@pytest.fixture(scope="module")
def open_stage(folders: Folders) -> Iterator[Stage]:
    with lora_server(folders) as stage:
        yield stage


def test_paths_that_lead_out_of_the_allowed_folder_are_refused_like_those_to_nowhere(
    open_stage: Stage, folders: Folders, tmp_path: Path
) -> None:
    outside = shutil.copytree(folders.adapters / "a", tmp_path / "outside")
    links = folders.adapters / "links"
    links.mkdir()
    (links / "folder").symlink_to(outside)
    (links / "circle").symlink_to(links / "circle")
    inside = shutil.copytree(folders.adapters / "a", links / "file")
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    paths = [
        "", ".", "..", "../..", str(outside), "/", "/etc", "/etc/passwd", "~", "nowhere", "a/../../outside",
        str(folders.adapters), "a/adapter_config.json", "links/folder", "links/file", "links/circle", "x" * 5000, "a\0",
        f"../{tmp_path.name}/outside", "x" * 300,
    ]  # fmt: skip
    try:
        messages = {path: refusal(open_stage.load("x", path), 400, "lora_path") for path in paths}
    finally:
        shutil.rmtree(links)

    assert all("--lora-dir" in message for message in messages.values())
    assert open_stage.served() == [BASE]
    assert open_stage.store.num_bytes == 0


def test_an_absolute_path_and_one_with_detours_inside_are_fine(open_stage: Stage, folders: Folders) -> None:
    for path in (str(folders.adapters / "a"), "b/../a", "./a/"):
        assert open_stage.load("fine", path).status_code == 200
        assert open_stage.text("fine") == folders.texts["a"]
        assert open_stage.unload("fine").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"lora_name": "x"}', b'{"lora_name": 1, "lora_path": "a"}',
        b'{"lora_name": "x", "lora_path": 1}',
    ],
    ids=repr,
)  # fmt: skip
def test_a_body_that_asks_for_nothing_clear_is_a_400(open_stage: Stage, body: bytes) -> None:
    for route in ("load", "unload"):
        answer = httpx.post(f"{open_stage.server.url}/v1/{route}_lora_adapter", content=body, timeout=60)
        assert answer.status_code in (400, 404), "a name without a path is enough to unload"
    assert open_stage.served() == [BASE]


def test_a_form_cannot_load_anything(open_stage: Stage) -> None:
    answer = httpx.post(
        f"{open_stage.server.url}/v1/load_lora_adapter", content=b'{"lora_name": "x", "lora_path": "a"}', timeout=60,
        headers={"content-type": "text/plain"},
    )  # fmt: skip
    assert answer.status_code == 415


def test_a_bad_adapter_is_refused_with_its_reason_and_nothing_changes(open_stage: Stage, folders: Folders) -> None:
    bad = shutil.copytree(folders.adapters / "a", folders.adapters / "bad")
    (bad / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "target_modules": ["q_proj"]}')
    try:
        message = refusal(open_stage.load("bad", "bad"), 400, "lora_path")
    finally:
        shutil.rmtree(bad)

    assert "adapter 'bad' cannot be loaded: model.layers.0.self_attn.q_proj.lora_A has shape (4, 64)" in message
    assert open_stage.served() == [BASE]
    assert open_stage.store.num_bytes == 0
    assert open_stage.text(BASE) == folders.texts[BASE]


def test_no_more_adapters_than_the_limit(folders: Folders) -> None:
    with lora_server(folders, "a", "b", max_adapters=2) as stage:
        assert "the limit is 2; unload one" in refusal(stage.load("c", "c"), 409)
        assert stage.served() == [BASE, "a", "b"]


def test_while_it_is_off_nothing_is_loaded_or_unloaded(folders: Folders) -> None:
    with lora_server(folders, "a", is_open=False) as stage:
        assert "--lora-dir" in refusal(stage.load("b", "b"), 403)
        assert "--lora-dir" in refusal(stage.unload("a"), 403)
        assert stage.text("a") == folders.texts["a"]
        with stage.server.openai() as client, pytest.raises(openai.NotFoundError):
            client.completions.create(model="b", prompt="x")


def test_a_bad_adapter_at_start_keeps_the_server_from_starting(folders: Folders) -> None:
    reason = re.escape("adapter 'nowhere' cannot be loaded: the adapter has no adapter_config.json")
    with pytest.raises(AdapterError, match=reason), lora_server(folders, "nowhere"):
        pass


def test_where_keys_are_asked_for_only_an_admins_loads_and_unloads(folders: Folders, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.boss]\nkey = "{"b" * 20}"\nadmin = true\n[keys.user]\nkey = "{"u" * 20}"\n')
    with lora_server(folders, api_keys=ApiKeys(str(file))) as stage:

        def post(route: str, key: str | None, **body: str) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key * 20}"}
            return httpx.post(f"{stage.server.url}/v1/{route}", json=body, headers=headers, timeout=60)

        def load(key: str | None) -> httpx.Response:
            return post("load_lora_adapter", key, lora_name="a", lora_path="a")

        refusal(load(None), 401)
        assert "admin = true" in refusal(load("u"), 403)
        assert load("b").status_code == 200
        assert post("completions", "u", model="a", prompt=PROMPT).status_code == 200
        refusal(post("unload_lora_adapter", "u", lora_name="a"), 403)
        refusal(post("unload_lora_adapter", None, lora_name="a"), 401)
        assert post("unload_lora_adapter", "b", lora_name="a").status_code == 200
