"""Values that the engine's parts exchange. A leaf: no torch, nothing else of the engine.

block.py     block ids and hashes
cache.py     shape of the KV cache
sampling.py  how tokens are chosen
adapter.py   LoRA adapters by name and identity
request.py   what a caller submits and gets back
step.py      what one step computes, and its results
settings.py  the engine's limits and policies
errors.py    errors
"""
