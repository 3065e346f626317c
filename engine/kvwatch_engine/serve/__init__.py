"""`kvwatch serve`: the composition root. Engine, server and observatory in one process.

command.py     the command: makes everything, serves until a signal comes
settings.py    what can be set
engine.py      from settings to a model and an engine
tiers.py, lora.py, images.py, admin.py, signals.py    what was set about each of these

Only this package knows engine, server and observatory.
"""

from kvwatch_engine.serve.command import COMMAND, serve
from kvwatch_engine.serve.settings import ServeSettings

__all__ = ["COMMAND", "ServeSettings", "serve"]
