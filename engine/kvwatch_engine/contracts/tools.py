"""How models write calls of functions: the names under which that is set."""

from typing import Literal

FamilyName = Literal["hermes", "llama3", "mistral"]
"""See `server/tools/families.py`."""

ToolParser = Literal["auto", "hermes", "llama3", "mistral"]
"""One of them, or whichever the model's chat template shows."""
