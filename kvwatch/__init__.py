"""kvwatch: an observatory for the paged KV cache of an LLM server.

This package is the base install: telemetry contract, ledger, exporters and configuration. It knows no engine and
imports neither torch nor transformers. The engine that ships beside it is `kvwatch_engine`.
"""

__version__ = "0.1.0"
