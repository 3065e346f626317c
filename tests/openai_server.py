"""The OpenAI server for tests: real tokenizers, the real engine, real HTTP on a free loopback port.

The model may be arithmetic (`NullModel`), so that every token of an answer is known in advance.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from builders import NullModel, make_settings
from openai import OpenAI
from starlette.applications import Starlette
from starlette.types import ASGIApp
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvwatch.http_protocol import BoundedRequestProtocol
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.model import ModelInfo, SamplingDefaults
from kvwatch_engine.engine import Engine
from kvwatch_engine.guidance import GuidanceLimits
from kvwatch_engine.server import OutputDispatcher, ServerSettings, create_app
from kvwatch_engine.server.api_keys import ApiKeys
from kvwatch_engine.server.runtime import make_server

MODEL = "tests/arithmetic"
PATIENT = GuidanceLimits(compile_seconds=240, rest_seconds=0.000_1)
"""For machines that are busy with other tests: what takes a processor's time is refused all the same."""
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and loop.first %}{{ raise_exception('an answer cannot come first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}quietly {% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEXTS = [
    "A block is a fixed number of slots; a slot holds the keys and values of one token.",
    "Blöcke, Größe, çà et là: naïve café.",
    "def allocate(self, count: int) -> list[int] | None:\n    return self.free[:count]\n",
    "Быстрая лиса и ленивая собака. 日本語のテキスト。 مرحبا بالعالم",
    "smile 😀 wave 👋🏽 flag 🇪🇺 family 👩‍👩‍👧‍👦 done",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 20 40 80 160",
]


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Return a tokenizer of the kind that Llama 3, Qwen and SmolLM use; most characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|start|>", "<|unused|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("größer", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer of the kind that Llama 2 and Mistral use: marked words, rare characters as bytes."""
    pieces = sorted(
        {
            word
            for text in TEXTS[:3]
            for word in text.replace(" ", " \u2581").split()
            if word.isascii() or "\u2581" in word
        }
    )
    letters = sorted({letter for text in TEXTS[:3] for letter in text if letter.isascii()} | {"\u2581"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    names += [piece for piece in pieces if piece not in names]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(Regex(" "), "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tokenizer as a model folder holds it."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END if tokenizer.token_to_id(END) else None)
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return folder


def make_model_info(folder: Path, vocab_size: int, **defaults: float) -> ModelInfo:
    """Describe the arithmetic model; `defaults` are its sampling defaults."""
    return ModelInfo(
        name=MODEL, folder=folder, architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
        hidden_size=1, vocab_size=vocab_size, max_position=1024, eos_token_ids=(3,),
        sampling_defaults=SamplingDefaults(**defaults),  # type: ignore[arg-type]
        dtype="float32", dtype_reason="", weights_fingerprint="arithmetic", weights_bytes=0,
    )  # fmt: skip


class RunningServer:
    """A server under test."""

    def __init__(self, engine: Engine, app: Starlette, dispatcher: OutputDispatcher, port: int, log: EventLog) -> None:
        self.engine = engine
        self.log = log
        self.app = app
        self.dispatcher = dispatcher
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @contextmanager
    def openai(self) -> Iterator[OpenAI]:
        """Give the official client, which does not retry."""
        with OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180) as client:
            yield client

    def post(self, path: str, **body: object) -> httpx.Response:
        """Send a JSON body without any client in between; the model is filled in."""
        return httpx.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=180)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=180)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that live sequences hold."""
        return sum(1 for count in self.engine.snapshot().tiers[0].ref_counts if count)

    def wait_idle(self, seconds: float = 30.0) -> float:
        """Wait until the engine has no request and no used block; return how long that took."""
        return wait_until(lambda: self.engine.num_live_requests == 0 and self.num_used_blocks == 0, seconds)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> float:
    """Wait for a condition; return how long that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not so after {seconds} s"
        time.sleep(0.005)
    return time.monotonic() - begin


@contextmanager
def arithmetic_server(
    folder: Path,
    model: NullModel,
    settings: ServerSettings | None = None,
    metrics_app: ASGIApp | None = None,
    send_buffer_bytes: int | None = None,
    api_keys: ApiKeys | None = None,
    **engine_settings: object,
) -> Iterator[RunningServer]:
    """Serve the arithmetic model with the tokenizer in `folder`."""
    limits = make_settings(
        **{"vocab_size": model.vocab_size, "num_blocks": 257, "max_model_len": 512, **engine_settings}
    )
    model.block_size = limits.block_size
    dispatcher = OutputDispatcher()
    log = EventLog()
    engine = Engine(limits, model, log, dispatcher)
    info = make_model_info(folder, model.vocab_size)
    app = create_app(engine, dispatcher, info, settings or ServerSettings(guidance=PATIENT), metrics_app, api_keys)
    with serve(engine, app, dispatcher, log, send_buffer_bytes) as running:
        yield running


@contextmanager
def serve(
    engine: Engine, app: Starlette, dispatcher: OutputDispatcher, log: EventLog, send_buffer_bytes: int | None = None
) -> Iterator[RunningServer]:
    """Serve an application on a free port. A small send buffer makes slow readers felt early."""
    server = make_server(app, BoundedRequestProtocol)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # asyncio sets it only on sockets that name their protocol, which those of `create_server` do not.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn-under-test")
        engine.start()
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield RunningServer(engine, app, dispatcher, listener.getsockname()[1], log)
        finally:
            server.should_exit = True
            thread.join(20)
            engine.stop()
    assert not thread.is_alive()
