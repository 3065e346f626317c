"""KV-cache events as vLLM and SGLang put them on the wire.

- kv_events.py   the event classes of vLLM 0.26 and later, batches, and their bytes: what kvwatch publishes
- frames.py      the ZeroMQ frames around a batch: live and replayed
- foreign.py     events of any version of either engine, after the differences were taken away
- decoder.py     bytes of any version, and of none, to those
- pieces.py      its slow way: what is broken is left out piece by piece

Knows bytes only: neither sockets nor the events of kvwatch itself.
"""
