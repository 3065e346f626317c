"""The telemetry contract: events, metrics, the log. A leaf: standard library and msgspec only.

schema.py   how an event and a metric are declared
events/     every event, by family
buckets.py  upper bounds of histograms
metrics.py  every metric, with what it means and what to do about it
log.py      the bounded, sequenced, in-process event log
snapshot.py the engine's whole state between two steps; heals a subscriber that lost events
clock.py    the two clocks
"""
