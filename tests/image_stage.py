"""A server of a tiny model that takes images, and what clients ask of it."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from builders import make_settings
from image_oracle import NUM_NEW_TOKENS, Oracle, Prompt
from openai_server import RunningServer, serve
from PIL import Image
from tiny_vision_model import picture

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app

NAME = "tiny-llava"
LIMITS = ServerSettings(max_images=3, max_image_bytes=40_000, max_image_pixels=10_000)
Part = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A server of a model that takes images, and what transformers makes of its prompts."""

    server: RunningServer
    oracle: Oracle

    def ask(self, *content: str | Part, **more: object) -> httpx.Response:
        parts = [text(part) if isinstance(part, str) else part for part in content]
        return self.chat([{"role": "user", "content": parts}], **more)

    def chat(self, messages: list[Part], **more: object) -> httpx.Response:
        body = {"max_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True, **more}
        return self.server.post("/v1/chat/completions", model=NAME, messages=messages, **body)

    def prompt(self, rendered: str, *pictures: int) -> Prompt:
        """Return what a user's message is made to, by transformers' processor."""
        whole = f"<|im_start|>user\n{rendered}<|im_end|>\n<|im_start|>assistant\n"
        return self.oracle.prompt(whole, *pictures) if pictures else self.oracle.plain(whole)

    def expected(self, prompt: Prompt) -> str:
        answer = self.oracle.answer(prompt)
        return str(self.oracle.processor.tokenizer.decode(answer, skip_special_tokens=True))


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def image(seed: int, **more: object) -> Part:
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed)), **more}}


def data_url(shown: Image.Image, kind: str = "PNG", media_type: str = "", **options: object) -> str:
    file = BytesIO()
    shown.save(file, kind, **options)
    return f"data:{media_type or f'image/{kind.lower()}'};base64,{base64.b64encode(file.getvalue()).decode()}"


@contextmanager
def serving(folder: Path, limits: ServerSettings = LIMITS) -> Iterator[RunningServer]:
    model = load_model(str(folder), dtype="float32", served_name=NAME)
    settings = make_settings(
        block_size=4, num_blocks=400, max_model_len=400, max_batch_tokens=32, vocab_size=model.info.vocab_size,
        eos_token_ids=model.info.eos_token_ids, weights_fingerprint=model.info.weights_fingerprint,
    )  # fmt: skip
    runner = ModelRunner(model, KVCache(model.cache_spec(4), settings.num_blocks))
    dispatcher, log = OutputDispatcher(), EventLog()
    engine = Engine(settings, runner, log, dispatcher)
    with serve(engine, create_app(engine, dispatcher, model.info, limits), dispatcher, log) as server:
        yield server


def content_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def error_of(answer: httpx.Response, status: int = 400) -> Part:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert isinstance(found, dict)
    return found
