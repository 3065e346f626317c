"""Server-sent events are lines for every client."""

import json

import msgspec

from kvwatch_engine.server.streaming import _event


class Chunk(msgspec.Struct):
    text: str


def test_an_event_is_one_line_whatever_its_text_holds() -> None:
    text = "".join(map(chr, range(0x0250))) + "\u2027\u2028\u2029\u202a\U0001f98a"

    sent = _event(Chunk(text)).decode()

    line, *rest = sent.splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
