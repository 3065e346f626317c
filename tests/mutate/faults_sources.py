"""Deliberate faults of a sidecar's sources: what engines may send, and what follows from it."""

from mutate.fault import Fault

FOREIGN = "tests/unit/sidecar/test_sidecar_foreign.py"
DISCOVERY = "tests/unit/sources/test_sources_discovery.py"
GARBAGE = "tests/unit/sources/test_sources_garbage.py"
HOSTILE = "tests/unit/sidecar/test_sidecar_hostile_engines.py"
MIRROR = "tests/unit/sources/test_sources_mirror.py"
SCRAPE = "tests/unit/sources/test_sources_scrape.py"
STREAM = "tests/unit/sources/test_sources_stream_reader.py"
TABLE = "tests/unit/sidecar/test_sidecar_table.py"
WHO_BINDS = "tests/unit/sidecar/test_sidecar_who_binds.py"

SOURCES = (
    Fault(
        name="garbage-begins-a-new-life",
        stands_for="One message that is no batch, under an old number, wipes what is known of the cache.",
        file="kvwatch/sources/stream_reader.py",
        old="        if not batch.is_illegible or seq == self.order.next_seq:\n",
        new="        if seq <= 1 << 64:\n",
        tests=(GARBAGE,),
    ),
    Fault(
        name="a-time-without-end",
        stands_for="A clock that is set wrong ends the subscription when its time is counted in nanoseconds.",
        file="kvwatch/sources/stream_reader.py",
        old="    return batch.ts if batch.ts is None or 0 <= batch.ts < MAX_UNIX_SECONDS else nan\n",
        new="    return batch.ts\n",
        tests=(GARBAGE,),
    ),
    Fault(
        name="a-clear-costs-all-places",
        stands_for="A storm of clears keeps the sidecar busy for seconds with what was never stored.",
        file="kvwatch/sources/insight/ghosts.py",
        old="            self._forget(content)\n        self._removed = {}\n",
        new="            self._forget(content)\n        self._removed = {}\n        self._make_room()\n",
        tests=(GARBAGE,),
    ),
    Fault(
        name="ranks-without-end",
        stands_for="An engine that names other ranks in every answer takes all files and all memory.",
        file="kvwatch/sources/foreign.py",
        old="if target.dp_rank not in self._ranks and len(self._ranks) >= MAX_RANKS:",
        new="if len(self._ranks) < 0:",
        tests=(HOSTILE,),
    ),
    Fault(
        name="an-address-that-is-never-let-go",
        stands_for="An engine cannot start again since the sidecar sits on its address.",
        file="kvwatch/sources/foreign.py",
        old="                await rank.stop()\n\n    def _rank",
        new="                pass\n\n    def _rank",
        tests=(WHO_BINDS,),
    ),
    Fault(
        name="bound-whatever-listens",
        stands_for="The sidecar binds the address of an engine that has bound it itself, and hears nothing.",
        file="kvwatch/sources/foreign.py",
        old="return bound(target) if listener is Listener.NOBODY else target",
        new="return bound(target)",
        tests=(WHO_BINDS,),
    ),
    Fault(
        name="priorities-count-twice",
        stands_for="Requests of each priority are added to the total that SGLang shows beside them.",
        file="kvwatch/sources/scrape/page.py",
        old="if rule.total_where_empty and row.labels.get(rule.total_where_empty):",
        new="if rule.total_where_empty and not row.labels:",
        tests=(SCRAPE,),
    ),
    Fault(
        name="a-second-copy-is-no-copy",
        stands_for="A hash that two blocks hold is gone for the mirror when the first of them is removed.",
        file="kvwatch/sources/place.py",
        old="                if self._believes_copies:\n",
        new="                if not self._believes_copies:\n",
        tests=(MIRROR,),
    ),
    Fault(
        name="a-gap-that-is-no-gap",
        stands_for="Batches that were lost for good leave the history whole, and its counts look exact.",
        file="kvwatch/sources/stream_reader.py",
        old="            self.mirror.lose(seq - self.order.next_seq)\n",
        new="            pass\n",
        tests=(STREAM,),
    ),
    Fault(
        name="loopback-is-taken-at-its-word",
        stands_for="An SGLang on another machine tells its own loopback address, and the sidecar asks its own machine.",
        file="kvwatch/sources/discovery.py",
        old='_OWN_LOOPBACK.sub("tcp://*:", value) if isinstance(value, str) else value for',
        new="value for",
        tests=(DISCOVERY,),
    ),
    Fault(
        name="what-nobody-knows-is-shown",
        stands_for="Of an engine that tells no evictions' reasons, series appear that no source can know.",
        file="kvwatch/sources/source.py",
        old="frozenset({m.KV_BLOCK_STORES, m.KV_BLOCK_EVICTIONS, m.KV_BLOCK_LIFETIME})",
        new="frozenset({m.KV_BLOCK_STORES, m.KV_BLOCK_EVICTIONS, m.KV_BLOCK_LIFETIME, m.KV_BLOCK_COPIES})",
        tests=(TABLE,),
    ),
    Fault(
        name="the-last-page-for-ever",
        stands_for="O38: an engine that does not answer keeps the gauges of its last page.",
        file="kvwatch/sources/scrape/scraper.py",
        old="        self._shown = {rank: totals.counters() for rank, totals in self._totals.items()}\n",
        new="",
        tests=(SCRAPE,),
    ),
    Fault(
        name="gauges-of-who-is-gone",
        stands_for="O35: an engine that is gone has gauges again as soon as a late message comes.",
        file="kvwatch/observatory/watch.py",
        old="        if self._options.is_up():\n            return view\n",
        new="        if view.gauges:\n            return view\n",
        tests=(FOREIGN,),
    ),
)
