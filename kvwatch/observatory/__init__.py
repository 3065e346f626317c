"""The observatory: one thread that watches engines and tells everybody who asks.

- observatory.py  one engine in this process: its watch, the thread, the metrics listener
- fleet.py        many engines, as a sidecar has them: the same, with one page for all
- watch.py        one engine that is watched: ledger, counters, and the parts beside them
- thread.py       the thread and its event loop
- part.py         what a part is: an exporter, the recorder, the stream
- settings.py     what an operator can set, whatever engine is watched
- plan.py         settings checked before anything is opened, then made into an observatory with its parts
"""

from kvwatch.observatory.observatory import Observatory
from kvwatch.observatory.part import Part

__all__ = ["Observatory", "Part"]
