"""How a request is written for a target: OpenAI's fields for any server, extensions only where they are known."""

import base64
import secrets
import struct
import zlib

import msgspec

from kvwatch.bench.scenarios import RequestSpec
from kvwatch.bench.signals import Kind

_FIXED_LENGTH = frozenset[Kind]({"kvwatch", "vllm", "sglang"})
"""Servers that know `ignore_eos`."""
_SALTED = frozenset[Kind]({"kvwatch", "vllm", "sglang"})
"""Servers that know `cache_salt`."""

_COLOURS = ((200, 30, 30), (30, 30, 200))


class Dialect:
    """Writes bodies for one kind of server."""

    def __init__(self, kind: Kind, model: str, endpoint: str) -> None:
        self._model = model
        self._endpoint = endpoint
        self.has_fixed_length = kind in _FIXED_LENGTH
        self.has_salt = kind in _SALTED

    def path(self, spec: RequestSpec) -> str:
        """Return the path that a request is posted to; pictures exist in chats only."""
        return "/v1/chat/completions" if self._is_chat(spec) else "/v1/completions"

    def body(self, spec: RequestSpec) -> bytes:
        """Return the body."""
        fields: dict[str, object] = {
            "model": spec.variation.model or self._model,
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "seed": spec.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        fields |= self._prompt(spec)
        if spec.n > 1:
            fields["n"] = spec.n
        if spec.stop:
            fields["stop"] = list(spec.stop)
        if spec.is_fixed_length and self.has_fixed_length:
            fields["ignore_eos"] = True
        if self.has_salt and (spec.is_uncached or spec.variation.salt):
            # A salt that nobody has used hides everything cached, and leaves the answer as it is.
            fields["cache_salt"] = secrets.token_hex(8) if spec.is_uncached else spec.variation.salt
        return msgspec.json.encode(fields)

    def _prompt(self, spec: RequestSpec) -> dict[str, object]:
        if not self._is_chat(spec):
            return {"prompt": spec.prompt}
        content: object = spec.prompt
        if spec.variation.image is not None:
            url = f"data:image/png;base64,{base64.b64encode(picture(spec.variation.image)).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": spec.prompt}]
        return {"messages": [{"role": "user", "content": content}]}

    def _is_chat(self, spec: RequestSpec) -> bool:
        return self._endpoint == "chat" or spec.variation.image is not None


def picture(number: int, size: int = 64) -> bytes:
    """Return a square PNG of one colour, another for 0 and 1."""
    row = b"\0" + bytes(_COLOURS[number % len(_COLOURS)]) * size
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(row * size)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
