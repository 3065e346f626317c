"""The engine's KV state rebuilt from events, and the immutable view that exporters read.

- pool.py       blocks of one tier: reference counts, hashes, filled slots, tables
- index.py      resident hashes of a foreign engine, counted
- ledger.py     applies events to pools and requests; the law; comparison with a snapshot
- store.py      counters and histograms, fed as the events' declarations say
- feeds.py      compiles those declarations
- series.py     allow-lists of labels, further bounds of histograms
- window.py     minima over the last while
- gauges.py     what the ledger's state says as gauges
- view.py       the immutable view
- mirror.py     ledger, store and view of one engine together; when a view is published
- collector.py  brings a mirror the events of a log and heals its gaps

All of it belongs to one thread (the observatory's); only `Mirror.view` is read from others.
"""
