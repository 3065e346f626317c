"""What each request of a server does, followed through the event stream of its admin API.

A request decodes from its first token on until it ends or is preempted, and again once it has recovered what it lost.
"""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

REBUILD = "rebuild"


@dataclass
class Moment:
    """Requests by what they do."""

    prefilling: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    recovering: set[str] = field(default_factory=set)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """How many decode, are in prefill, and are preempted."""
        return len(self.decoding), len(self.prefilling), len(self.preempted)

    def follow(self, event: dict[str, Any]) -> None:
        """Go on by one event."""
        request, places = event.get("request", ""), (self.prefilling, self.decoding, self.preempted, self.recovering)
        to = {
            "request.admitted": self.prefilling, "request.first_token": self.decoding,
            "request.preempted": self.preempted, "request.resumed": self.recovering,
            "request.recovered": self.decoding,
        }.get(event["event"])  # fmt: skip
        if to is self.prefilling and any(request in place for place in places):
            return
        if to is not None or event["event"] == "request.finished":
            for place in places:
                place.discard(request)
        if to is not None:
            to.add(request)


class EventReader:
    """Reads the stream on a thread of its own until the server ends it."""

    def __init__(self, api: str) -> None:
        self.now = Moment()
        self.control: list[tuple[dict[str, Any], tuple[int, int, int]]] = []
        """Events of control, each with what requests did right before the change that it is part of."""
        self._held: list[dict[str, Any]] = []
        self._api = api
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._listens.wait(60)

    def join(self) -> None:
        """Wait until the server has ended the stream."""
        self._thread.join(60)

    def changes(self, key: str) -> list[tuple[int, int, int]]:
        """Return what requests did before each change of a setting so far."""
        return [numbers for event, numbers in list(self.control) if event.get("key") == key]

    def _read(self) -> None:
        with httpx.stream(
            "GET", f"{self._api}/events", params={"events": "request,control"}, timeout=None, trust_env=False
        ) as answer:  # fmt: skip
            for line in answer.iter_lines():
                self._listens.set()
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"].startswith("control."):
            self.control.append((event, self.now.numbers))
        elif event["event"] == "request.preempted" and event["reason"] == REBUILD:
            self._held.append(event)  # part of a change, which is told after it
            return
        else:
            for each in self._held:
                self.now.follow(each)
            self._held.clear()
            self.now.follow(event)
