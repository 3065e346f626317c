"""What a sidecar reads: a remote kvwatch, a vLLM, an SGLang. Each turns foreign facts into the events of kvwatch.

- source.py   what every source offers, and what it is given
"""
