"""Any decoder of transformers over the paged cache: its own modules compute, only attention is ours.

    route.py    the attention function that transformers calls, and where it finds the step's cache
    falcon.py   the same door for Falcon, whose attention does not ask transformers' interface
    support.py  what can be refused before weights are read, with the reason
    trace.py    what each layer asks of attention: heads, window, scale, soft cap
    network.py  forward pass over packed tokens, as the engine wants it
    proof.py    logits over the paged cache against transformers' own attention, at every load
    load.py     from a folder to all of this

The lean decoder (`model/decoder.py`) is faster; this path serves what it does not know.
"""
