"""An engine that is looked into and changed while it serves. Above `engine`, below the composition root.

values.py      settings by their keys: reads them, and makes those that are wanted
planning.py    what a change would do, and what stands against it
changer.py     carries it out between two steps
rebuild.py     blocks of another size or type
journal.py     a file that tells the next start what was live
inspection.py  blocks, requests and prefixes, in pages
prefixes.py    pins and the reset of the prefix cache
control.py     `LiveEngine`: all of it for the observatory and the admin API, from any thread
"""

from kvwatch_engine.live.changer import RebuildLimits
from kvwatch_engine.live.control import LiveEngine
from kvwatch_engine.live.journal import LiveJournal

__all__ = ["LiveEngine", "LiveJournal", "RebuildLimits"]
