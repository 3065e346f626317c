"""Text as protobuf takes it. Knows nothing else."""

MAX_CHARS = 256
"""Characters kept of what somebody outside chose freely."""


def clean(text: str, max_chars: int = MAX_CHARS) -> str:
    """Cut a text and replace what UTF-8 cannot express (lone surrogates): one such text would cost its whole batch."""
    return text[:max_chars].encode("utf-8", "replace").decode("utf-8")
