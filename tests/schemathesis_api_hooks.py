"""What schemathesis is told of the API: most bodies name the model that is served, and ask for few tokens."""

from typing import Any

import schemathesis
from openai_server import MODEL

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Let three of four bodies name the model, so that what is behind its name is reached."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and len(str(body)) % 4:
        body["model"] = MODEL
    for name in _LIMITS:
        if isinstance(body.get(name), int) and body[name] > 8:
            body[name] = body[name] % 8 + 1
