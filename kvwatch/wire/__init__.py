"""KV-cache events as vLLM and SGLang put them on the wire.

- kv_events.py   the event classes, batches, and their bytes
- frames.py      the ZeroMQ frames around a batch: live and replayed

Knows bytes only: neither sockets nor the events of kvwatch itself. Encodes what vLLM 0.26 and later publish (batch as
an array, events as maps) and decodes the same; a sidecar's decoder of older forms has its place here.
"""
