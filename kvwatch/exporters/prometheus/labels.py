"""Label values that any reader can take, whatever a model, an adapter or a tenant is called."""

from hashlib import sha256

MAX_CHARS = 256
"""Longer values are shortened: a name of 10 kB on each of some hundred series would be a page of megabytes."""


def printable(value: str) -> str:
    """Return a label value as it is exported.

    Lone surrogates, which UTF-8 cannot express, become question marks; what is too long ends with a mark that keeps it
    apart from others that begin alike. Quotes, backslashes and line ends stay: the format itself escapes them.
    """
    text = value.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= MAX_CHARS:
        return text
    mark = sha256(text.encode()).hexdigest()[:12]
    return f"{text[: MAX_CHARS - len(mark) - 1]}~{mark}"
