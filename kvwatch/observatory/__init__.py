"""The observatory: one thread that watches one engine and tells everybody who asks.

- observatory.py  the thread: collector, ledger, metrics listener, and the parts beside them
- part.py         what a part is: an exporter, the recorder, the stream
- settings.py     what an operator can set, whatever engine is watched
- plan.py         settings checked before anything is opened, then made into an observatory with its parts
"""

from kvwatch.observatory.observatory import Observatory
from kvwatch.observatory.part import Part

__all__ = ["Observatory", "Part"]
