"""Which replica answers: requests that begin alike go to the same one, unless it is much busier than another.

Rendezvous hashing: each request ranks the replicas by a hash of its prefix and their name. A replica that goes or comes
moves only the prefixes that were or will be its own. Nothing here knows how requests travel.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

PREFIX_CHARACTERS = 512
"""Of a prompt that decide where it goes: about 128 tokens. With more, prompts with one system message would part."""

IMBALANCE = 8
"""Requests by which the owner may be busier than the least busy one; beyond that another computes the prefix again."""


def prefix_of(path: str, body: bytes) -> str:
    """Return what a request is routed by: a digest of how its prompt begins; of its whole body if it has none.

    Args:
        path: Of the URL, such as `/v1/completions`.
        body: As it was sent; need not be JSON.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    text = _beginning(fields) if isinstance(fields, dict) else None
    if text is None:
        text = body.decode(errors="replace")
    model = fields.get("model") if isinstance(fields, dict) else ""
    return hashlib.blake2b(
        f"{path}\0{model}\0{text[:PREFIX_CHARACTERS]}".encode(errors="replace"), digest_size=16
    ).hexdigest()


def ranked(prefix: str, names: Sequence[str]) -> list[str]:
    """Return the names of replicas, the one that owns this prefix first."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{prefix}\0{name}".encode(), digest_size=8).digest())


def chosen(prefix: str, busy: Mapping[str, int]) -> list[str]:
    """Return replicas in the order in which they should be asked.

    Args:
        prefix: What the request is routed by.
        busy: For each replica how many requests it has.
    """
    order = ranked(prefix, list(busy))
    if not order or busy[order[0]] <= min(busy.values()) + IMBALANCE:
        return order
    return sorted(order, key=lambda name: busy[name])


def _beginning(fields: Mapping[str, object]) -> str | None:
    """Return the text with which the prompt begins, or None if the request has no prompt."""
    messages = fields.get("messages")
    if isinstance(messages, list):
        return "\0".join(json.dumps(each, sort_keys=True, ensure_ascii=False) for each in messages)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else json.dumps(prompt) if prompt is not None else None
