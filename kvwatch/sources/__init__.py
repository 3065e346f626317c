"""What a sidecar reads: a remote kvwatch, a vLLM, an SGLang. Each turns foreign facts into the events of kvwatch.

- source.py          what every source offers, and what it is given
- engines.py         NAME=URL with its options; makes the source of an engine
- remote.py          a kvwatch engine over its event stream
- remote_state.py    its state at the head of its log here, for snapshots
- remote_clock.py    its clock, as well as it can be told
- remote_insight.py  what its hashes tell beside what its events count
- knowledge.py       what each source can tell of each metric

The way of a vLLM's or an SGLang's events:

- vllm.py, sglang.py   sources of either engine
- foreign.py           what both have in common: finds publishers, follows them, restarts what failed
- discovery.py         where an engine publishes; endpoints.py, engine_http.py
- who_binds.py         whether the engine binds that address or connects to it
- foreign_rank.py      one rank: log, mirror, subscription, metrics
- subscription.py      the sockets of one publisher; connection.py, replay.py
- healer.py            fills holes by replays, gives up what cannot be had
- stream_reader.py     applies batches in order; batch_order.py, held_batches.py
- mirror.py            what is resident; places.py, place.py; transitions.py tells what changes
- complaints.py        what was left out, counted and logged
- scrape/, insight/    the engine's own metrics; what the stream tells beside counts
"""
