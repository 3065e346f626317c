"""KV events out: what the prefix cache holds, told to whoever routes requests by it, in vLLM's wire format.

- endpoints.py   where to publish: endpoints checked, ports moved by the data-parallel rank
- residency.py   which hashes are resident, and how to tell all of them at once
- translator.py  kvwatch's events as events of the wire
- history.py     the batches that can be replayed, in bounded memory
- publisher.py   the sockets: PUB for what happens, ROUTER for what happened
- part.py        all of it as a part of the observatory
"""
