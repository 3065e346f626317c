"""The kvwatch engine: PagedAttention serving, instrumented down to the single block.

contracts/   values that the parts exchange; no torch
memory/      who owns which block; the tensors behind the blocks
scheduling/  what runs in the next step, and what happens to its results; no torch
model/       loading, forward pass, sampling
engine.py    the step loop on its own thread
server/      the OpenAI-compatible API
serve/       puts engine, server and observatory together (`kvwatch serve`)
"""
