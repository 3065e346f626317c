"""Prometheus and OpenMetrics.

- families.py   a view as families of series
- writer.py     families as bytes, in both formats
- page.py       the rendered page, at most one rendering a second whoever asks
- process.py    metrics of the observatory itself
- gateway.py    the signals of the Gateway API Inference Extension
- aliases.py    the same numbers under vLLM's names
- labels.py     label values that any reader can take
- settings.py   allow-lists and thresholds as the operator writes them
- asgi.py       the read-only listener: /metrics, /health, /ready
"""
